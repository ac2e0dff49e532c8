"""Looks for a good learning rate for scikit-learn's 1,797 handwritten digits, with Ray Tune:

    python examples/ray_tune_digits.py                      # a Ray of its own on this machine
    RAY_ADDRESS=auto python examples/ray_tune_digits.py     # on a node of a cluster
    python examples/ray_tune_digits.py --trials 16 --num-workers 4 --use-gpu

Each trial trains with several ranks. As many trials run side by side as there is room for, and ASHA stops the bad ones
early.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from horovod.ray import tune as hvd_tune


def train(config: dict[str, Any]) -> None:
    """One rank of a trial. After a failure it goes on from the last checkpoint."""
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    parts = train_test_split(pixels, torch.tensor(digits.target), test_size=0.25, random_state=config["seed"])
    train_x, test_x, train_y, test_y = (part[hvd.rank() :: hvd.size()].to(device) for part in parts)

    model = nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    first = 0
    if (checkpoint := hvd_tune.get_checkpoint()) is not None:
        saved = torch.load(Path(checkpoint.path) / "model.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epochs"]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # The same number of steps on every rank, also where one has an image more.
    steps = int(hvd.allreduce(torch.tensor(len(train_x) // config["batch_size"]), op=hvd.Min))
    for epoch in range(first, config["epochs"]):
        order = torch.randperm(len(train_x))[: steps * config["batch_size"]]
        for batch in order.view(steps, config["batch_size"]):
            optimizer.zero_grad()
            F.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            optimizer.step()
        counts = torch.tensor([(model(test_x).argmax(1) == test_y).sum(), len(test_y)])
        right, images = hvd.allreduce(counts, op=hvd.Sum).tolist()
        with tempfile.TemporaryDirectory() as folder:
            if hvd.rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
                torch.save(state, Path(folder) / "model.pt")
            hvd_tune.report({"accuracy": right / images, "epochs": epoch + 1}, checkpoint=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Horovod and Ray Tune")
    parser.add_argument("--address", help="of a Ray cluster; default: that of RAY_ADDRESS, or a Ray of its own")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--num-workers", type=int, default=2, help="of each trial")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--epochs", type=int, default=8, help="of a trial that is not stopped")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one worker")
    parser.add_argument("--storage-path", help="of results and checkpoints; with several nodes one that all can reach")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    ray.init(args.address)
    space = {
        "lr": tune.loguniform(1e-3, 1.0),
        "width": tune.choice([32, 128]),
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "seed": args.seed,
    }
    tuner = tune.Tuner(
        hvd_tune.trainable(train, num_workers=args.num_workers, use_gpu=args.use_gpu),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.trials,
            scheduler=ASHAScheduler(max_t=args.epochs, grace_period=2),
        ),
        run_config=tune.RunConfig(
            storage_path=args.storage_path, failure_config=tune.FailureConfig(max_failures=1), verbose=1
        ),
    )
    best = tuner.fit().get_best_result()
    metrics, lr = best.metrics, best.config["lr"]
    print(f"best of {args.trials}: test accuracy {metrics['accuracy']:.3f} with a learning rate of {lr:.4f}")
    print(f"its weights: {best.checkpoint.path}")


if __name__ == "__main__":
    main()
