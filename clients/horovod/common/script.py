"""The line of the user's script, for warnings that Horovod gives while a framework calls it."""

from __future__ import annotations

import inspect
from typing import Final

_NOT_THE_SCRIPT: Final = frozenset(
    {"horovod", "torch", "lightning", "pytorch_lightning", "keras", "tf_keras", "tensorflow", "jax"}
)


def level_of_the_script() -> int:
    """Of the line that called backward(), step() or fit(), for warnings.warn in the function that calls this one."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_SCRIPT:
        level, frame = level + 1, frame.f_back
    return level
