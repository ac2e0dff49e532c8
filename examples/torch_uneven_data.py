"""Trains on data of which every process has another amount, all of it in every epoch; on one process or on many:

    python examples/torch_uneven_data.py
    horovodrun -np 2 python examples/torch_uneven_data.py

The data stay where they are, think of one hospital for each process, so no sampler can even them out. A process that
has no batch left calls hvd.join(): the others go on, and their averages see zeros from it. It makes no steps of its own
meanwhile, so in the end it takes over the weights and the optimizer's state from the process that went on longest.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torch_digits import load_data, make_model
from tqdm import tqdm

import horovod.torch as hvd


def own_part(total: int, rank: int, size: int) -> range:
    """Process r holds r + 1 shares of the data."""
    shares = size * (size + 1) // 2
    return range(total * (rank * (rank + 1) // 2) // shares, total * ((rank + 1) * (rank + 2) // 2) // shares)


def main() -> None:
    parser = argparse.ArgumentParser(description="Uneven data with Horovod")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    train, test = load_data(args.seed)
    part = Subset(train, own_part(len(train), hvd.rank(), hvd.size()))
    loader = DataLoader(part, batch_size=args.batch_size, shuffle=True)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for _ in tqdm(range(args.epochs), unit="epoch", disable=hvd.rank() != 0):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        # No batch is left here. While others still have some, their allreduces get zeros from this process.
        last = hvd.join()
        # All are here. Those that joined early have missed the last steps.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)

    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean()
    accuracy = hvd.allreduce(accuracy, name="accuracy").item()
    batches = hvd.allgather(torch.tensor([len(loader)]), name="batches").tolist()
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.3f}; batches of each process in an epoch: {', '.join(map(str, batches))}")


if __name__ == "__main__":
    main()
