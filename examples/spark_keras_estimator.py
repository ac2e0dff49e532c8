"""Trains a Keras model on the rows of a DataFrame, scikit-learn's 1,797 handwritten digits, and predicts with it:

python examples/spark_keras_estimator.py
KERAS_BACKEND=torch python examples/spark_keras_estimator.py --num-proc 4
"""

import argparse
import tempfile
from typing import Any

import keras
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits

from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator


def make_data(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Rows to train with, and to test with."""
    digits = load_digits()
    rows = [(Vectors.dense(image / 16), int(label)) for image, label in zip(digits.data, digits.target, strict=True)]
    train, test = spark.createDataFrame(rows, ["image", "label"]).randomSplit([0.75, 0.25], seed=1)
    return train, test


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with a KerasEstimator")
    parser.add_argument("--num-proc", type=int, default=2, help="processes that train, each in a task of Spark")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows in a batch of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--work-dir", help="where data and checkpoints are kept, a path or URL that all hosts share")
    args = parser.parse_args()

    builder: Any = SparkSession.builder
    spark = builder.appName("digits").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    train, test = make_data(spark)
    layers = [
        keras.Input([8, 8, 1]),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    estimator = KerasEstimator(
        num_proc=args.num_proc,
        store=Store.create(args.work_dir or tempfile.mkdtemp(prefix="digits-")),
        model=keras.Sequential(layers),
        optimizer=keras.optimizers.SGD(args.lr, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        feature_cols=["image"],
        label_cols=["label"],
        label_shapes=[[-1]],  # a class, where the model has ten outputs
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
