"""`horovod.spark`: ranks as tasks of Spark.

    import horovod.spark

    losses = horovod.spark.run(train, args=(epochs,), num_proc=4)  # by rank

Spark places the tasks; each of them starts one process and watches it. Horovod gives the processes ranks, a coordinator
and the data plane (docs/spark.md).

    run, run_elastic (runner.py)     what users call: checks what is given
      job.py                         one call, in the driver: the coordinator, the Spark job, the end
        attending.py                 the streams of the tasks, each from its beginning to its end
        policies.py                  which process becomes which rank, and what a process that failed means
        failures.py                  whose failure it is, in words
      task/attend.py                 one task: starts its process, passes on what that prints, reports its end
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import horovod.grpc_output  # noqa: F401 - before any module here imports gRPC
from horovod.base.errors import LaunchCode, coded

try:
    import pyspark as _pyspark  # noqa: F401 - only whether it is there
except ModuleNotFoundError as error:
    if error.name != "pyspark":
        raise
    sentence = (
        f"horovod.spark needs PySpark, which is not installed ({error}). Install it with: pip install 'horovod[spark]'"
    )
    raise ImportError(coded(LaunchCode.MISSING_PROGRAM, sentence)) from error

if TYPE_CHECKING:
    from horovod.spark.runner import run as run
    from horovod.spark.runner import run_elastic as run_elastic

__all__ = ["run", "run_elastic"]


def __getattr__(name: str) -> Any:
    # Each task imports this package, and needs neither the coordinator nor the rest of the driver's side.
    if name in __all__:
        return getattr(importlib.import_module("horovod.spark.runner"), name)
    raise AttributeError(f"module 'horovod.spark' has no attribute {name!r}")
