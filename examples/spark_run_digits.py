"""Trains on scikit-learn's 1,797 handwritten digits with processes in tasks of Spark:

    python examples/spark_run_digits.py                                    # a Spark of its own on this machine
    spark-submit --master spark://head:7077 examples/spark_run_digits.py --num-proc 8
    spark-submit --master "local[2,4]" examples/spark_run_digits.py --min-num-proc 1  # goes on when processes are lost

Each process gets the function `train`, and its result comes back to the driver.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import horovod.spark


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


def train(epochs: int, batch_size: int, lr: float, seed: int) -> dict[str, Any]:
    """One rank. The weights of the model that all ranks have."""
    import horovod.torch as hvd
    from horovod.spark.task import get_available_devices

    hvd.init()
    gpus = get_available_devices()  # those that Spark gave to this task
    device = torch.device("cuda", int(gpus[0])) if gpus else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train_x, train_y, _, _ = (one.to(device) for one in load_data(seed))
    model = make_model().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train_y)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    def follow_the_size() -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr * hvd.size()

    state.register_reset_callbacks([follow_the_size])

    @hvd.elastic.run  # in a job of fixed size it calls the function once
    def run(state: Any) -> None:
        while state.epoch < epochs:
            sampler.set_epoch(state.epoch)
            own = torch.tensor(list(sampler), device=device)
            for batch in own.split(batch_size):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(train_x[batch]), train_y[batch])
                loss.backward()
                optimizer.step()
            mean = hvd.allreduce(loss.detach().cpu())
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {float(mean):.4f}")
            state.epoch += 1
            state.commit()

    run(state)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Horovod on Spark")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--min-num-proc", type=int, help="the job is elastic, and needs so many processes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    builder: Any = SparkSession.builder
    spark = builder.appName("digits").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    call = (train, (args.epochs, args.batch_size, args.lr, args.seed))
    if args.min_num_proc is None:
        weights = horovod.spark.run(*call, num_proc=args.num_proc)
    else:
        weights = horovod.spark.run_elastic(*call, num_proc=args.num_proc, min_num_proc=args.min_num_proc)
    spark.stop()

    model = make_model()
    model.load_state_dict(weights[0])
    _, _, test_x, test_y = load_data(args.seed)
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
