"""Trains a network on the rows of a DataFrame, scikit-learn's 1,797 handwritten digits, and predicts with it:

    python examples/spark_torch_estimator.py                              # a Spark of its own on this machine
    spark-submit --master yarn examples/spark_torch_estimator.py --num-proc 8 --work-dir hdfs:///tmp/digits

The estimator is a stage of a pipeline. Its run is kept in the work folder: a second call with the same --run-id and
more epochs goes on where the first has ended.
"""

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator


def make_data(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Rows to train with, and to test with: a column for each pixel, and the label."""
    digits = load_digits()
    names = [f"pixel_{place}" for place in range(64)]
    rows = [(*map(float, image / 16), int(label)) for image, label in zip(digits.data, digits.target, strict=True)]
    train, test = spark.createDataFrame(rows, [*names, "label"]).randomSplit([0.75, 0.25], seed=1)
    return train, test


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with a TorchEstimator")
    parser.add_argument("--num-proc", type=int, default=2, help="processes that train, each in a task of Spark")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows in a batch of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--work-dir", help="where data and checkpoints are kept, a path or URL that all hosts share")
    parser.add_argument("--run-id", help="name of the run; default: a new one")
    args = parser.parse_args()

    builder: Any = SparkSession.builder
    spark = builder.appName("digits").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    train, test = make_data(spark)
    assembler = VectorAssembler(inputCols=[name for name in train.columns if name != "label"], outputCol="image")
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=Store.create(args.work_dir or tempfile.mkdtemp(prefix="digits-")),
        run_id=args.run_id,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        loss=F.cross_entropy,
        feature_cols=["image"],
        label_cols=["label"],
        input_shapes=[[-1, 1, 8, 8]],
        validation=0.1,
        partitions_per_process=1,  # a file for each process: more would be tiny
        batch_size=args.batch_size,
        epochs=args.epochs,
        random_seed=42,
    )
    fitted = Pipeline(stages=[assembler, estimator]).fit(train)
    rows = fitted.transform(test).select("label", "label__output").collect()
    correct = sum(int(row.label__output.toArray().argmax()) == row.label for row in rows)
    print(f"test accuracy: {correct / len(rows):.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
