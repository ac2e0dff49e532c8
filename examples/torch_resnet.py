"""Trains a residual network on coloured images of 32 x 32, made of scikit-learn's handwritten digits, on CPUs or GPUs:

    python examples/torch_resnet.py
    horovodrun -np 2 python examples/torch_resnet.py
    horovodrun -np 8 python examples/torch_resnet.py --width 64 --blocks 3 --batch-size 128     # eight GPUs

Nothing in it depends on where it runs: each process takes the GPU of its local rank when there is one, and computes in
bfloat16 there. The learning rate grows with the number of processes and is warmed up (https://arxiv.org/abs/1706.02677).
"""

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

SIZE, DIGIT = 32, 24


class Block(nn.Module):
    """Two convolutions around which the input is added (https://arxiv.org/abs/1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def make_model(width: int, blocks: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for block in range(blocks):
            outputs = width << stage
            layers.append(Block(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def make_images(digits: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Each digit in a colour of its own, somewhere on a background of another: (n, 8, 8) -> (n, 3, 32, 32)."""
    count = len(digits)
    large = F.interpolate(digits.unsqueeze(1), (DIGIT, DIGIT), mode="bilinear")
    ink = torch.zeros(count, 1, SIZE, SIZE)
    for number, (down, right) in enumerate(torch.randint(SIZE - DIGIT + 1, (count, 2), generator=chance).tolist()):
        ink[number, :, down : down + DIGIT, right : right + DIGIT] = large[number]
    paper = 0.4 * torch.rand((count, 3, 1, 1), generator=chance)
    colour = 0.6 + 0.4 * torch.rand((count, 3, 1, 1), generator=chance)
    return paper * (1 - ink) + colour * ink + 0.05 * torch.randn((count, 3, SIZE, SIZE), generator=chance)


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    found = load_digits()
    digits, labels = torch.tensor(found.images, dtype=torch.float32) / 16, torch.tensor(found.target)
    parts = train_test_split(digits, labels, test_size=0.25, random_state=seed, stratify=labels)
    chance = torch.Generator().manual_seed(seed)  # the same images on every process
    train, test = (make_images(part, chance) for part in parts[:2])
    return TensorDataset(train, parts[2]), TensorDataset(test, parts[3])


def main() -> None:
    parser = argparse.ArgumentParser(description="A residual network with Horovod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, default=1, help="residual blocks in each of the three stages")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())  # one is all that a pinned process sees
        device = torch.device("cuda")
    else:
        torch.set_num_threads(1)  # processes of one host share its cores
    torch.manual_seed(args.seed)

    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True, pin_memory=device.type == "cuda")

    model = make_model(args.width, args.blocks).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9, weight_decay=5e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    steps = args.epochs * len(loader)
    warm_up = max(1, steps // 10)

    def share_of_the_rate(step: int) -> float:
        """From one process's rate to all of it, then down along a cosine."""
        if step < warm_up:
            return (1 + (hvd.size() - 1) * step / warm_up) / hvd.size()
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_the_rate)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(
                    model(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True)
                )
            loss.backward()
            optimizer.step()
            schedule.step()

    # The gradients were averaged; the statistics of batch normalization are those of each process's own images.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in test.tensors)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    # Processes may have different numbers of test images, so what is added up are counts.
    total = hvd.allreduce(torch.stack([right.cpu(), torch.tensor(len(labels))]), op=hvd.Sum, name="right and all")
    if hvd.rank() == 0:
        print(f"test accuracy: {total[0].item() / total[1].item():.3f} on {total[1].item()} images")


if __name__ == "__main__":
    main()
