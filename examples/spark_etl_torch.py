"""From raw rows to predictions with Spark: clean them, train on them with Horovod, predict a table in batches.

    python examples/spark_etl_torch.py                              # with a local Spark
    spark-submit --master yarn examples/spark_etl_torch.py --num-proc 8 --work-dir hdfs:///tmp/taxis

1. ETL: rows of taxi trips, some of them broken, become features in Parquet files, by Spark alone.
2. Training: `horovod.spark.run` starts ranks in tasks of Spark; each reads its part of the files with ParquetReader.
3. Inference: the weights go to the executors once, and a pandas UDF predicts the durations of a table's rows.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from torch import nn

import horovod.spark

FEATURES = ["distance", "rush", "rain"]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(len(FEATURES), 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


def raw_trips(spark: SparkSession, count: int, seed: int) -> DataFrame:
    """As they come from elsewhere: text, kilometres or nothing, and a meter that was not stopped now and then."""
    rows = spark.range(count, numPartitions=4)
    rows = rows.withColumn("km", 0.5 + 9.5 * sql.rand(seed)).withColumn("hour", (24 * sql.rand(seed + 1)).cast("int"))
    rows = rows.withColumn("weather", sql.when(sql.rand(seed + 2) < 0.3, "rain").otherwise("dry"))
    slow = sql.when(sql.col("hour").between(7, 9) | sql.col("hour").between(16, 18), 2.0).otherwise(1.0)
    wet = sql.when(sql.col("weather") == "rain", 1.5).otherwise(1.0)
    minutes = 2 + 2 * sql.col("km") * slow * wet + 0.5 * sql.randn(seed + 3)
    minutes = sql.when(sql.rand(seed + 4) < 0.02, 9999.0).otherwise(minutes)
    km = sql.when(sql.rand(seed + 5) < 0.98, sql.col("km").cast("string"))
    return rows.select("id", km.alias("km"), "hour", "weather", minutes.alias("minutes"))


def features(raw: DataFrame) -> DataFrame:
    good = raw.where(sql.col("km").isNotNull() & (sql.col("minutes") < 1000))
    rush = sql.col("hour").between(7, 9) | sql.col("hour").between(16, 18)
    columns = {"distance": sql.col("km").cast("float") / 10, "rush": rush, "rain": sql.col("weather") == "rain"}
    casted = [column.cast("float").alias(name) for name, column in columns.items()]
    return good.select("id", *casted, (sql.col("minutes") / 60).cast("float").alias("hours"))


def train(path: str, epochs: int, batch_size: int, lr: float) -> dict[str, Any]:
    """One rank. The weights of the model that all ranks have."""
    import horovod.torch as hvd
    from horovod.data import ParquetReader
    from horovod.spark.task import get_available_devices

    hvd.init()
    gpus = get_available_devices()  # those that Spark gave to this task
    device = torch.device("cuda", int(gpus[0])) if gpus else torch.device("cpu")
    torch.set_num_threads(1)
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr * math.sqrt(hvd.size()))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    reader = ParquetReader(path, [*FEATURES, "hours"], batch_size=batch_size, rank=hvd.rank(), size=hvd.size())
    steps = reader.total_rows // hvd.size() // batch_size  # the same on all ranks
    for _ in range(epochs):
        for _, batch in zip(range(steps), reader, strict=False):
            inputs = torch.stack([torch.from_numpy(batch[name]) for name in FEATURES], dim=1)
            optimizer.zero_grad()
            F.mse_loss(model(inputs.to(device)), torch.from_numpy(batch["hours"]).to(device)).backward()
            optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="ETL, training and batch inference with Spark and Horovod")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="rows in a step of one process")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of one process")
    parser.add_argument("--work-dir", help="where features and predictions go, a path or URL that all hosts share")
    args = parser.parse_args()

    builder: Any = SparkSession.builder
    spark = builder.appName("taxis").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    work = args.work_dir or tempfile.mkdtemp(prefix="taxis-")
    features(raw_trips(spark, args.rows, seed=1)).write.mode("overwrite").parquet(f"{work}/train")

    call = (train, (f"{work}/train", args.epochs, args.batch_size, args.lr))
    weights = spark.sparkContext.broadcast(horovod.spark.run(*call, num_proc=args.num_proc)[0])

    @sql.pandas_udf("float")  # type: ignore[call-overload]
    def predicted(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        model = make_model()  # once for each task, not for each batch
        model.load_state_dict(weights.value)
        for columns in batches:
            with torch.no_grad():
                yield pd.Series(model(torch.tensor(pd.concat(columns, axis=1).to_numpy())).numpy())

    new = features(raw_trips(spark, args.rows // 4, seed=100))
    new.withColumn("predicted", predicted(*FEATURES)).write.mode("overwrite").parquet(f"{work}/predictions")

    found = spark.read.parquet(f"{work}/predictions")
    error, spread, count = found.select(
        sql.mean(sql.abs(sql.col("predicted") - sql.col("hours"))), sql.stddev("hours"), sql.count("*")
    ).first()
    print(f"predicted {count} trips: mean error {60 * error:.2f} minutes, their spread is {60 * spread:.2f}")
    spark.stop()


if __name__ == "__main__":
    main()
