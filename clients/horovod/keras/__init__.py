"""Horovod for Keras 3 with the backend TensorFlow or PyTorch:

>>> import horovod.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss="mse")
>>> model.fit(images, labels, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Everything public is a name of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

try:
    import keras
except ModuleNotFoundError as error:
    raise ImportError(
        f"horovod.keras needs Keras, which is not installed ({error}). Install it with: pip install 'horovod[keras]'"
    ) from error

from horovod._keras import loading
from horovod._keras.api import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    allgather,
    allreduce,
    broadcast,
    reducescatter,
)
from horovod._keras.backends import backend_of
from horovod.common.basics import (
    Adasum,
    Average,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.keras import callbacks, elastic

Compression = backend_of(keras).Compression

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def broadcast_global_variables(root_rank: int) -> Any:
    """Of v1 sessions, which Keras 3 does not have: raises RuntimeError and says what to use."""
    raise RuntimeError(
        f"Keras 3 has no global variables (root_rank={root_rank}). Use "
        "hvd.callbacks.BroadcastGlobalVariablesCallback, or hvd.broadcast_variables of the module of the backend."
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """A saved model, whose optimizer is distributed, with its state. It may have been saved with or without Horovod.

    Example:

        >>> model = hvd.load_model("model.keras")
        >>> model.fit(images, labels)

    Args:
        filepath: what Keras's load_model takes.
        custom_optimizers: classes of optimizers that are not Keras's own.
        custom_objects: as for Keras's load_model.
        compression: how gradients travel, for example Compression.fp16.
        legacy_opts: accepted for scripts of older releases.
    """
    return loading.load_model(
        keras,
        filepath,
        custom_optimizers,
        custom_objects,
        compression,
    )
