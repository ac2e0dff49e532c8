"""A process of the job that computes data sets:

horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker config.json

Rank 0 writes the file with which training processes find the service (compute_service.TfDataServiceConfig.read), and
all run until one of these shuts it down.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import horovod.tensorflow as hvd
from horovod.base.errors import TrainingCode, coded
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
from horovod.tensorflow.data.rendezvous import Service


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int, insecure: bool = False) -> None:
    """Calls hvd.init(), and leaves hvd.shutdown() to the caller. insecure: as TfDataServiceConfig's.

    Raises ValueError as `workers_of_each`.
    """
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    each = workers_of_each(dispatchers, size)
    with contextlib.ExitStack() as stack:
        config = None
        if rank == 0:
            service = Service(key := secrets.token_bytes(32), each)
            stack.callback(service.close)
            config = TfDataServiceConfig(dispatchers, each, dispatcher_side, service.addresses, key, timeout, insecure)
            config.write(configfile)
            stack.callback(Path(configfile).unlink, missing_ok=True)
        compute_worker_fn(hvd.broadcast_object(config, name="TfDataServiceConfig"))


def workers_of_each(dispatchers: int, size: int) -> int:
    """How many of `size` workers belong to each dispatcher. ValueError if they can't be shared out evenly."""
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                f"Number of processes ({size}) must be a multiple of the number of dispatchers ({dispatchers}).",
            )
        )
    return size // dispatchers


def arguments_parser() -> argparse.ArgumentParser:
    """Of the command lines of the service, this one and that of Spark."""
    parser = argparse.ArgumentParser(description="Workers of a tf.data service for training with Horovod")
    parser.add_argument("configfile", help="where rank 0 writes what training processes need to find the service")
    parser.add_argument("--dispatchers", type=int, default=1, help="number of dispatchers, a divisor of -np")
    parser.add_argument("--dispatcher-side", default="compute", choices=["compute", "training"])
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for dispatchers and workers")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let everybody who can connect to a dispatcher or worker, from this host or another, run code there as "
        "its user; without it they need the key in the configuration file",
    )
    return parser


def run(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = arguments_parser().parse_args(arguments)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # GPUs are for training
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout, options.insecure)
    hvd.shutdown()


if __name__ == "__main__":
    run()
