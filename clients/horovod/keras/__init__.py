"""Horovod for Keras 3 with the backend TensorFlow, PyTorch or JAX:

>>> import horovod.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss="mse")
>>> model.fit(images, labels, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Everything public is a name of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

try:
    import keras
except ModuleNotFoundError as error:
    raise ImportError(
        f"horovod.keras needs Keras, which is not installed ({error}). Install it with: pip install 'horovod[keras]'"
    ) from error

from horovod._keras import api, names
from horovod._keras.backends import backend_of
from horovod._keras.names import *  # noqa: F403
from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Average as Average
from horovod.common.process_sets import ProcessSet as ProcessSet
from horovod.common.process_sets import global_process_set as global_process_set
from horovod.common.signatures import name_reductions as _name_reductions
from horovod.keras import callbacks as callbacks
from horovod.keras import elastic as elastic

if not TYPE_CHECKING:  # mypy knows no lists in a list; for it, what has no _ and is not only imported is public
    __all__ = [*names.__all__, "Compression", "DistributedOptimizer", "broadcast_global_variables"]  # noqa: PLE0604
    __all__ += ["callbacks", "elastic", "load_model"]

Compression = backend_of(keras).Compression
_Optimizer = TypeVar("_Optimizer")


def DistributedOptimizer(  # noqa: N802
    optimizer: _Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> _Optimizer:
    """That of horovod.tensorflow.keras. Arguments by position are in the order that this module has always had."""
    return api.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )


DistributedOptimizer.__doc__ = api.DistributedOptimizer.__doc__


def broadcast_global_variables(root_rank: int) -> Any:
    """Of v1 sessions, which Keras 3 does not have: raises RuntimeError for any `root_rank`."""
    raise RuntimeError(
        coded(
            TrainingCode.NO_GRAPH,
            f"Keras 3 has no global variables (root_rank={root_rank}). Use "
            "hvd.callbacks.BroadcastGlobalVariablesCallback, or hvd.broadcast_variables of the module of the backend.",
        )
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    return api.load_model(keras, filepath, custom_optimizers, custom_objects, compression)


load_model.__doc__ = api.load_model.__doc__
_name_reductions(globals())


def __getattr__(name: str) -> object:
    """A layer, for which the backend must be known, or TensorFlow's Keras be there."""
    if name != "SyncBatchNormalization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return api.sync_batch_norm(keras)
