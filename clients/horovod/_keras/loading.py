"""load_model: a saved model with an optimizer that is distributed, saved with or without Horovod.

Files name the optimizer's own class, so Keras loads it with its state, and it becomes distributed then. The public
functions have this docstring, and bring `keras`, the module that loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from horovod._keras.backends import backend_of
from horovod._keras.kinds import distributed_keras
from horovod.common.gradients import Reduction
from horovod.common.optimizer_numbers import Made


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: Mapping[str, Any] | None,
    compression: Any,
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
    ours: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        ours = {"SyncBatchNormalization": sync_batch_norm(keras)}
    objects = ours | {one.__name__: one for one in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is not None:
        reduction = Reduction(compression=compression)
        # A rank may load a model only to look at it, or to go on with it while others go on with theirs.
        made = Made(["gradient"], reduction.process_set, is_from_file=True)
        distributed_keras(model.optimizer, reduction, made=made)
    return model


def sync_batch_norm(keras: Any) -> Any:
    """Our layer for a Keras and its backend, which a file may name; TensorFlow's is one of the two Keras only.

    Raises AttributeError where it is one of the other.
    """
    if keras.backend.backend() != "tensorflow":
        from horovod._keras.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    return backend_of(keras).sync_batch_norm(keras)
