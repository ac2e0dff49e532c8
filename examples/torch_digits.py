"""Trains a small convolutional network on scikit-learn's 1,797 handwritten digits, on one process or on many:

    python examples/torch_digits.py
    horovodrun -np 2 python examples/torch_digits.py

The lines marked "Horovod" are all that data-parallel training adds to a script for one process.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import horovod.torch as hvd


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.25, random_state=seed, stratify=labels
    )
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Horovod")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # Horovod 2: each process has a GPU of its own; with `horovodrun --pin-gpus` it sees no other
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        device = torch.device("cuda")
    torch.set_num_threads(1)  # processes of one host share its cores, and for images this small one thread is fastest
    torch.manual_seed(args.seed)

    train, test = load_data(args.seed)
    # Each process sees a different part of the data.
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = make_model().to(device)
    # Horovod 3: N processes make one batch that is N times as large, so they take larger steps
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    # Horovod 4: average the gradients
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Horovod 5: start from the same weights and optimizer state
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    start = time.perf_counter()
    images_seen = 0
    with tqdm(total=args.epochs * len(loader), unit="step", disable=hvd.rank() != 0) as progress:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                images_seen += len(images) * hvd.size()
                progress.update()
                rate = images_seen / (time.perf_counter() - start)
                progress.set_postfix(
                    epoch=epoch + 1, loss=f"{loss.item():.3f}", images_per_s=f"{rate:.0f}", refresh=False
                )

    model.eval()
    images, labels = (tensor.to(device) for tensor in test.tensors)
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).double().mean()
    accuracy = hvd.allreduce(correct.cpu(), name="accuracy")
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy.item():.3f}")


if __name__ == "__main__":
    main()
