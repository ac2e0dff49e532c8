"""Trains on scikit-learn's 1,797 handwritten digits with processes that Ray places and starts:

    python examples/ray_digits.py                      # a Ray of its own on this machine
    RAY_ADDRESS=auto python examples/ray_digits.py     # on a node of a cluster
    python examples/ray_digits.py --address ray://head:10001 --num-workers 8 --use-gpu

Each worker has an object of the class Trainer. The driver calls its methods on all of them, and gets the weights from
rank 0 in the end.
"""

import argparse
from typing import Any

import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from horovod.ray import RayExecutor, ray_logger


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_data(seed: int) -> list[torch.Tensor]:
    """Images and labels to train with, and to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, torch.tensor(digits.target), test_size=0.25, random_state=seed, stratify=digits.target
    )
    return [train_x, train_y, test_x, test_y]


class Trainer:
    """One rank. It joins the world when it is made, and stays in it from call to call."""

    def __init__(self, lr: float, seed: int) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        train_x, train_y, _, _ = load_data(seed)
        self.images, self.labels = (one[hvd.rank() :: hvd.size()].to(self.device) for one in (train_x, train_y))
        self.model = make_model().to(self.device)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr * hvd.size(), momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def train(self, epochs: int, batch_size: int) -> float:
        """The mean loss of the last epoch, over all ranks."""
        import horovod.torch as hvd

        # The same number of steps on every rank, also where one has an image more.
        steps = int(hvd.allreduce(torch.tensor(len(self.images) // batch_size), op=hvd.Min))
        mean = torch.zeros(())
        for epoch in range(epochs):
            losses = []
            for batch in torch.randperm(len(self.images))[: steps * batch_size].view(steps, batch_size):
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(self.images[batch]), self.labels[batch])
                loss.backward()
                self.optimizer.step()
                losses.append(loss.detach())
            mean = hvd.allreduce(torch.stack(losses).mean().cpu())
            if hvd.rank() == 0:
                ray_logger.log({"epoch": epoch, "loss": round(float(mean), 4)})
        return float(mean)

    def get_weights(self) -> dict[str, torch.Tensor]:
        return {name: value.cpu() for name, value in self.model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Horovod on Ray")
    parser.add_argument("--address", help="of a Ray cluster; default: that of RAY_ADDRESS, or a Ray of its own")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one worker")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one worker")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    ray.init(args.address)
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=args.num_workers, use_gpu=args.use_gpu)
    executor.start(Trainer, executable_kwargs={"lr": args.lr, "seed": args.seed})

    def show(info: dict[str, Any]) -> None:
        print(f"epoch {info['epoch']}: loss {info['loss']}")

    losses = executor.execute(lambda trainer: trainer.train(args.epochs, args.batch_size), callbacks=[show])
    assert len(set(losses)) == 1, "all ranks have trained together"
    weights = executor.execute_single(lambda trainer: trainer.get_weights())
    executor.shutdown()

    model = make_model()
    model.load_state_dict(weights)
    _, _, test_x, test_y = load_data(args.seed)
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
