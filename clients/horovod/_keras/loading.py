"""load_model: a saved model with an optimizer that is distributed, saved with or without Horovod.

Files name the optimizer's own class, so Keras loads it with its state, and it becomes distributed then.
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
    objects = {one.__name__: one for one in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is not None:
        distributed_keras(model.optimizer, Reduction(compression=compression))
    return model
