"""load_model: a saved model with an optimizer that is distributed, saved with or without Horovod.

Files name the optimizer's own class, so Keras loads it with its state, and it becomes distributed then. The public
functions have this docstring, and bring `keras`, the module that loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from horovod._keras.kinds import distributed_keras
from horovod.common.gradients import Reduction


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
    ours = _layers(keras)
    objects = ours | {one.__name__: one for one in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is not None:
        distributed_keras(model.optimizer, Reduction(compression=compression))
    return model


def _layers(keras: Any) -> dict[str, Any]:
    """Ours, which a file may name: of TensorFlow, and of one Keras where there are two."""
    if keras.backend.backend() != "tensorflow":
        return {}
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization as Layer

    return {Layer.__name__: Layer} if issubclass(Layer, keras.layers.Layer) else {}
