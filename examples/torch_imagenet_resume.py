"""Trains as one does on ImageNet, with mixed precision, and goes on from its last checkpoint when it is started again:

    python examples/torch_imagenet_resume.py --checkpoint resnet.pt
    horovodrun -np 2 python examples/torch_imagenet_resume.py --checkpoint resnet.pt
    horovodrun -np 8 -H a:4,b:4 python examples/torch_imagenet_resume.py --checkpoint /shared/resnet.pt --width 64

The model and the small images are those of torch_resnet.py. After each epoch all ranks validate, and rank 0 saves all
that training depends on, so that a run that was killed ends with the weights of one that was not. Only rank 0 reads
and writes the checkpoint.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch_resnet import load_data, make_model

import horovod.torch as hvd


def validate(model: nn.Module, test: TensorDataset, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy on all test images, the same on all ranks."""
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in test.tensors)
    with torch.no_grad():
        answers = model(images)
        loss = F.cross_entropy(answers, labels, reduction="sum")
        right = (answers.argmax(1) == labels).sum()
    model.train()
    # Ranks may have different numbers of images, so the ranks add up sums and counts, not averages.
    sums = torch.tensor([loss.item(), right.item(), len(labels)], dtype=torch.float64)
    loss_sum, right_sum, count = hvd.allreduce(sums, op=hvd.Sum, name="validation").tolist()
    return loss_sum / count, right_sum / count


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoint, resume and mixed precision with Horovod")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from and to write; default: none")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--warm-up-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, default=1, help="residual blocks in each of the three stages")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():  # a process that sees one GPU only, as with --pin-gpus, takes that one
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    if device.type == "cpu":
        torch.set_num_threads(1)  # processes of one host share its cores
    torch.manual_seed(args.seed)

    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    model = make_model(args.width, args.blocks).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr * hvd.size(), momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)  # bfloat16 has the range of float32
    warm_up, steps = args.warm_up_epochs * len(loader), args.epochs * len(loader)

    def share_of_the_rate(step: int) -> float:
        """From one process's rate to that of all (https://arxiv.org/abs/1706.02677), then down along a cosine."""
        if step < warm_up:
            return (1 + (hvd.size() - 1) * step / warm_up) / hvd.size()
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_the_rate)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}

    state: dict[str, Any] | None = None
    if hvd.rank() == 0 and args.checkpoint is not None and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location="cpu")
    state = hvd.broadcast_object(state, root_rank=0, name="checkpoint")  # from now on all ranks have it
    first = 0
    if state is None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    else:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first = state["epochs"]
        if hvd.rank() == 0:
            print(f"goes on after epoch {first}", flush=True)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)  # the order depends on nothing but seed and epoch, so a run that goes on has it too
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, half):
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # skips the step, on all ranks alike, if gradients overflowed
            scaler.update()
            schedule.step()
        hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)  # statistics of batch normalization
        test_loss, accuracy = validate(model, test, device)
        if hvd.rank() == 0:
            if args.checkpoint is not None:
                state = {name: part.state_dict() for name, part in parts.items()} | {"epochs": epoch + 1}
                unfinished = args.checkpoint.with_suffix(".part")
                torch.save(state, unfinished)
                os.replace(unfinished, args.checkpoint)  # a run that is killed now leaves the old one whole
            print(f"epoch {epoch + 1}: test loss {test_loss:.6f}, test accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
