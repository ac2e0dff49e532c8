"""Functions of ours inside of a tf.function, whose Python TensorFlow would otherwise rewrite (AutoGraph)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.autograph.impl.api import autograph_artifact


def as_it_is(*functions: Callable[..., Any]) -> None:
    """These are called as they are written: nothing in them depends on a tensor's value. A mark costs no call."""
    for function in functions:
        autograph_artifact(function)
