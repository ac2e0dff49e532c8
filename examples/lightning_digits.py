"""Trains a LightningModule on scikit-learn's 1,797 handwritten digits, with a Trainer in each process:

    horovodrun -np 2 python examples/lightning_digits.py
    python examples/lightning_digits.py --ray --num-workers 2    # Ray places and starts the processes

On a cluster of Ray: RAY_ADDRESS=auto, or --address ray://head:10001.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from horovod.lightning import HorovodStrategy


class Digits(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Sequence[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Sequence[torch.Tensor], _: int) -> None:
        images, labels = batch
        right = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, batch_size=len(labels), sync_dist=True)  # of all ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def load_data(batch_size: int, seed: int) -> list[DataLoader[Any]]:
    """To train with, and to test with. The Trainer gives each rank its part of both."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, torch.tensor(digits.target), test_size=0.25, random_state=seed, stratify=digits.target
    )
    return [
        DataLoader(TensorDataset(train_x, train_y), batch_size=batch_size, shuffle=True),
        DataLoader(TensorDataset(test_x, test_y), batch_size=batch_size),
    ]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """One rank: what it has found out, and rank 0 its weights."""
    L.seed_everything(args.seed, verbose=False)
    torch.set_num_threads(1)
    train_data, test_data = load_data(args.batch_size, args.seed)
    trainer = L.Trainer(
        strategy=HorovodStrategy(),
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits(lr=args.lr * trainer.world_size)
    trainer.fit(model, train_data, test_data)
    weights = {name: value.cpu() for name, value in model.state_dict().items()} if trainer.is_global_zero else None
    accuracy = float(trainer.callback_metrics["accuracy"])
    return {"accuracy": accuracy, "ranks": trainer.world_size, "first": trainer.is_global_zero, "weights": weights}


def train_on_ray(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What all ranks have found out."""
    import ray

    from horovod.ray import RayExecutor

    ray.init(args.address)
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=args.num_workers, use_gpu=args.use_gpu)
    executor.start()
    try:
        return executor.run(train, args=[args])
    finally:
        executor.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Horovod and Lightning")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--ray", action="store_true", help="with processes that Ray starts")
    parser.add_argument("--address", help="of a Ray cluster; default: that of RAY_ADDRESS, or a Ray of its own")
    parser.add_argument("--num-workers", type=int, default=2, help="with --ray")
    parser.add_argument("--use-gpu", action="store_true", help="with --ray: one GPU for each worker")
    args = parser.parse_args()

    found = train_on_ray(args)[0] if args.ray else train(args)
    if found["first"]:
        print(f"test accuracy: {found['accuracy']:.3f} with {found['ranks']} processes")


if __name__ == "__main__":
    main()
