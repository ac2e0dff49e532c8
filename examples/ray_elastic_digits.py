"""Trains on scikit-learn's 1,797 handwritten digits on whatever room a Ray cluster has, while nodes come and go:

    python examples/ray_elastic_digits.py                      # a Ray of its own on this machine
    RAY_ADDRESS=auto python examples/ray_elastic_digits.py     # on a node of a cluster
    python examples/ray_elastic_digits.py --address ray://head:10001 --min-workers 2 --max-workers 8 --use-gpu

Where a worker or its node is lost, the others go back to their last commit and go on; where room comes, they take in
another worker at the next commit. What an elastic script needs is in torch_elastic_digits.py; here it is a function.
"""

import argparse
from typing import Any

import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from horovod.ray import RayExecutor, ray_logger


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_data(seed: int) -> list[TensorDataset]:
    """Digits to train with, and to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, torch.tensor(digits.target), test_size=0.25, random_state=seed, stratify=digits.target
    )
    return [TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)]


def train(epochs: int, batch_size: int, lr: float, seed: int) -> dict[str, torch.Tensor]:
    """What each worker runs. Returns the weights, which all have."""
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    train_set, _ = load_data(seed)
    model = make_model().to(device)
    # No broadcast of the weights here: a worker that comes later would wait in it alone. run() sends the state.
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train_set, seed=seed)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)

    def follow_the_size() -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr * hvd.size()

    state.register_reset_callbacks([follow_the_size])

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < epochs:
            for images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
                optimizer.step()
                sampler.record_batch(state.batch, len(images))
                state.batch += 1
                if state.batch % 5 == 0:
                    state.commit()
            state.epoch += 1
            if hvd.rank() == 0:
                ray_logger.log({"epoch": state.epoch, "workers": hvd.size()})
            sampler.set_epoch(state.epoch)
            state.commit()

    loop(state)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Horovod on Ray, elastic")
    parser.add_argument("--address", help="of a Ray cluster; default: that of RAY_ADDRESS, or a Ray of its own")
    parser.add_argument("--min-workers", type=int, default=1, help="it goes on with so many")
    parser.add_argument("--max-workers", type=int, default=2, help="it grows to so many, where there is room")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one worker")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one worker")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    ray.init(args.address)
    executor = RayExecutor(
        RayExecutor.create_settings(),
        min_workers=args.min_workers,
        max_workers=args.max_workers,
        use_gpu=args.use_gpu,
        cooldown_range=(10, 300),  # a node on which a worker has failed is used again
    )
    executor.start()

    def show(info: dict[str, Any]) -> None:
        print(f"epoch {info['epoch']} ends with workers: {info['workers']}")

    weights, *_ = executor.run(train, args=[args.epochs, args.batch_size, args.lr, args.seed], callbacks=[show])
    executor.shutdown()

    model = make_model()
    model.load_state_dict(weights)
    test_x, test_y = load_data(args.seed)[1].tensors
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
