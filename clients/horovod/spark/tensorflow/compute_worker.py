"""A tf.data service in the tasks of a Spark job, for training processes anywhere:

python -m horovod.spark.tensorflow.compute_worker config.json --num-proc 4

It is the job of horovod.tensorflow.data.compute_worker. The driver writes the file with which training processes find
the service (compute_service.TfDataServiceConfig.read), and all run until one of these shuts it down.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

import horovod.spark
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
from horovod.tensorflow.data.compute_worker import arguments_parser, workers_of_each
from horovod.tensorflow.data.rendezvous import Service

__all__ = ["main", "run"]


def main(
    dispatchers: int,
    dispatcher_side: str,
    configfile: str,
    timeout: int,
    num_proc: int | None = None,
    insecure: bool = False,
) -> None:
    """Runs the service with one worker in each of `num_proc` tasks, by default as many as Spark runs at a time.

    Args:
        dispatchers: the number of dispatchers, a divisor of the number of workers.
        dispatcher_side: "compute" or "training".
        configfile: a file that this call makes, and removes when the service has ended.
        timeout: seconds to wait for dispatchers and workers.
        insecure: work without a key. Anybody who can connect to a dispatcher or worker can then run code there as its
            user.

    Raises:
        ValueError: the workers can't be shared out evenly to the dispatchers.
        RuntimeError: as horovod.spark.run.
    """
    context = SparkSession.builder.getOrCreate().sparkContext
    size = num_proc or context.defaultParallelism
    with contextlib.ExitStack() as stack:
        each = workers_of_each(dispatchers, size)
        service = Service(key := secrets.token_bytes(32), each)
        stack.callback(service.close)
        config = TfDataServiceConfig(dispatchers, each, dispatcher_side, service.addresses, key, timeout, insecure)
        config.write(configfile)
        stack.callback(Path(configfile).unlink, missing_ok=True)
        horovod.spark.run(_work, (config.to_dict(),), num_proc=size)


def _work(config: dict[str, object]) -> None:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # GPUs are for training
    import horovod.tensorflow as hvd

    hvd.init()
    compute_worker_fn(TfDataServiceConfig.from_dict(config))
    hvd.shutdown()


def run(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = arguments_parser()
    parser.add_argument("--num-proc", type=int, help="number of workers; default: as many tasks as Spark runs")
    options = parser.parse_args(arguments)
    main(
        options.dispatchers,
        options.dispatcher_side,
        options.configfile,
        options.timeout,
        options.num_proc,
        options.insecure,
    )


if __name__ == "__main__":
    run()
