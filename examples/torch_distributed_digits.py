"""Trains the network of torch_digits.py with torch.distributed over Horovod's engine, on one process or on many:

    torchrun --nproc-per-node 2 examples/torch_distributed_digits.py
    torchrun --nproc-per-node 2 examples/torch_distributed_digits.py --sharded
    horovodrun -np 2 python examples/torch_distributed_digits.py

With --sharded each process keeps a part of every weight (FSDP2), else all of them (DistributedDataParallel). The lines
marked "Horovod" are all that differs from a script for gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch.distributed  # noqa: F401  (Horovod 1: this registers the backend)


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
    parser = argparse.ArgumentParser(description="Digits with torch.distributed over Horovod")
    parser.add_argument("--sharded", action="store_true", help="FSDP2 in place of DistributedDataParallel")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    # Horovod 2: the backend's name. torchrun says which process this is; horovodrun, mpirun and the like say it to
    # Horovod, which then begins the world.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    dist.init_process_group("horovod", init_method="env://" if by_torchrun else "horovod://")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # processes of one host share its cores, and for images this small one thread is fastest
    torch.manual_seed(args.seed)  # the same weights on each process

    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, num_replicas=size, rank=rank, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = make_model()
    trained = fully_shard(model) if args.sharded else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=args.lr * size, momentum=0.9)
    torch.manual_seed(args.seed + rank)  # dropout differs between processes
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(trained(images), labels).backward()
            optimizer.step()

    trained.eval()
    images, labels = test.tensors
    with torch.no_grad():
        correct = (trained(images[rank::size]).argmax(1) == labels[rank::size]).sum()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"test accuracy: {correct.item() / len(labels):.3f} with {size} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
