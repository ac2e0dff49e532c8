"""PowerSGD on scikit-learn's handwritten digits: a GradientCompressor of one's own, on one process or on many:

    horovodrun -np 2 python examples/torch_powersgd.py
    horovodrun -np 2 python examples/torch_powersgd.py --rank 0        without compression, to compare

PowerSGD (Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithms 1 and 2) sends two thin matrices P and Q in place of an n x m gradient, whose product is near
it: rank * (n + m) numbers and not n * m. What the product leaves out is added to the next gradient (error feedback),
and Q is where the next step starts (warm start), so that one multiplication a step is enough.

P must be averaged before Q can be computed, so a gradient needs two reductions, and the error and Q must be remembered.
Two static functions around one reduction (hvd.Compression.fp16 and its like) can't express that. A GradientCompressor
can: it is a generator that yields P, then Q, and DistributedOptimizer does the rest as ever. P travels while the
backward pass goes on, all Qs travel together in step(), and synchronize() and skip_synchronize() mean what they always
mean. The other way, a plain optimizer and hvd.allreduce in a loop of one's own, would give all of that up.
"""

import argparse
import zlib
from collections.abc import Generator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch_digits import load_data, make_model

import horovod.torch as hvd
from horovod.torch.compression import Compression, GradientCompressor


class PowerSGD(GradientCompressor):
    """Gradients of two or more dimensions as matrices of a low rank; small ones and vectors travel as they are.

    For op=hvd.Average, and not with GradScaler: the remembered error has the scale of the step that left it.

    Args:
        rank: columns of P and Q. More cost more bytes and leave out less.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.errors: dict[str, torch.Tensor] = {}  # what was left out so far, n x m; differs between processes
        self.starts: dict[str, torch.Tensor] = {}  # Q of the last step, m x rank; the same on all processes

    def reduce(self, name: str, gradient: torch.Tensor) -> Generator[torch.Tensor, None, torch.Tensor]:
        matrix = gradient.flatten(1) if gradient.ndim > 1 else gradient.view(1, -1)
        n, m = matrix.shape
        if self.rank * (n + m) >= n * m:
            yield gradient
            return gradient
        if name not in self.starts:
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # all processes start from the same Q
            self.starts[name] = torch.randn(m, self.rank, generator=seed).to(matrix)
            self.errors[name] = torch.zeros_like(matrix)
        matrix = matrix + self.errors[name]

        p = matrix @ self.starts[name]
        yield p
        # QR and not Gram-Schmidt: it gives orthonormal columns even where P has none, such as for a gradient of zeros.
        p = torch.linalg.qr(p).Q
        q = matrix.T @ p
        yield q
        approximation = p @ q.T
        self.errors[name] = matrix - approximation
        self.starts[name] = q
        return approximation.view_as(gradient)


def train(rank: int, epochs: int, batch_size: int = 32, lr: float = 0.02, seed: int = 42) -> float:
    """Trains with gradients of this rank (0: without compression); returns the accuracy on the test images."""
    torch.manual_seed(seed)
    training, test = load_data(seed)
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank(), seed=seed)
    loader = DataLoader(training, batch_size, sampler=sampler, drop_last=True)

    model = make_model()
    # Horovod 3: N processes make one batch that is N times as large, so they take larger steps
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    # Horovod 4: average the gradients, as matrices of a low rank
    compression = PowerSGD(rank) if rank else Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    # Horovod 5: start from the same weights and optimizer state
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if hvd.rank() == 0 and hvd.size() > 1 and rank:
        print(f"a step sends {numbers_sent(model, rank)} numbers in place of {numbers_sent(model, 0)}")

    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).double().mean()
    return hvd.allreduce(correct, name="accuracy").item()


def numbers_sent(model: nn.Module, rank: int) -> int:
    """In one step of one process."""
    total = 0
    for parameter in model.parameters():
        n = parameter.shape[0] if parameter.ndim > 1 else 1
        m = parameter.numel() // n
        total += min(n * m, rank * (n + m)) if rank else n * m
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="PowerSGD with Horovod")
    parser.add_argument(
        "--rank", type=int, default=2, help="of the gradients; 0: no compression (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes
    torch.set_num_threads(1)  # Horovod 2: processes of one host share its cores
    accuracy = train(args.rank, args.epochs, args.batch_size, args.lr, args.seed)
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
