"""Horovod for tf.keras: Keras 3 on TensorFlow, or tf_keras with TF_USE_LEGACY_KERAS=1:

>>> import horovod.tensorflow.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size())), loss="mse")
>>> model.fit(images, labels, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

Everything public is a name of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod._keras import api, names
from horovod._keras.api import DistributedOptimizer as DistributedOptimizer
from horovod._keras.backends import backend_of
from horovod._keras.names import *  # noqa: F403
from horovod.tensorflow.functions import broadcast_global_variables as _broadcast_global_variables
from horovod.tensorflow.keras import callbacks as callbacks
from horovod.tensorflow.keras import elastic as elastic

if not TYPE_CHECKING:  # mypy knows no lists in a list; for it, what has no _ and is not only imported is public
    __all__ = [*names.__all__, "Compression", "DistributedOptimizer", "broadcast_global_variables"]  # noqa: PLE0604
    __all__ += ["callbacks", "elastic", "load_model"]

Compression = backend_of(tf.keras).Compression


def broadcast_global_variables(root_rank: int) -> Any:
    """`horovod.tensorflow.broadcast_global_variables`."""
    return _broadcast_global_variables(root_rank)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    return api.load_model(tf.keras, filepath, custom_optimizers, custom_objects, compression)


load_model.__doc__ = api.load_model.__doc__


def __getattr__(name: str) -> object:
    """A layer, for which the backend must be known, or TensorFlow's Keras be there."""
    if name != "SyncBatchNormalization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return api.sync_batch_norm(tf.keras)
