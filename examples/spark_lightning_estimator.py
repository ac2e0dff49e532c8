"""Trains a LightningModule on the rows of a DataFrame, scikit-learn's 1,797 handwritten digits, and predicts with it:

python examples/spark_lightning_estimator.py
spark-submit --master yarn examples/spark_lightning_estimator.py --num-proc 8 --work-dir hdfs:///tmp/digits
"""

import argparse
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

from horovod.spark.common.store import Store
from horovod.spark.lightning import TorchEstimator


def make_data(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Rows to train with, and to test with."""
    digits = load_digits()
    rows = [(Vectors.dense(image / 16), int(label)) for image, label in zip(digits.data, digits.target, strict=True)]
    train, test = spark.createDataFrame(rows, ["image", "label"]).randomSplit([0.75, 0.25], seed=1)
    return train, test


class Digits(pl.LightningModule):
    """A batch is a dict of tensors by column."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        correct = (self(batch["image"]).argmax(1) == batch["label"]).float().mean()
        self.log("val_accuracy", correct, sync_dist=True, batch_size=len(batch["label"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with the lightning TorchEstimator")
    parser.add_argument("--num-proc", type=int, default=2, help="processes that train, each in a task of Spark")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows in a batch of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--work-dir", help="where data and checkpoints are kept, a path or URL that all hosts share")
    args = parser.parse_args()

    builder: Any = SparkSession.builder
    spark = builder.appName("digits").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    train, test = make_data(spark)
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(args.work_dir or tempfile.mkdtemp(prefix="digits-")),
        model=Digits(args.lr),
        feature_cols=["image"],
        label_cols=["label"],
        input_shapes=[[-1, 1, 8, 8]],
        validation=0.1,
        partitions_per_process=1,  # a file for each process: more would be tiny
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=42,
    )
    rows = estimator.fit(train).transform(test).select("label", "label__output").collect()
    correct = sum(int(row.label__output.toArray().argmax()) == row.label for row in rows)
    print(f"test accuracy: {correct / len(rows):.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
