"""Helpers that scripts of earlier releases import from here (horovod/common/compatibility.py says more)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod.common.compatibility import _cache as _cache

__all__ = ["refs_to_vars", "vars_to_refs"]


def _executing_eagerly() -> bool:
    """Whether operations run at once, rather than in a graph."""
    return bool(tf.executing_eagerly())


def _has_eager() -> bool:
    """Whether this TensorFlow can execute eagerly: all that Horovod supports can."""
    return True


def _make_subgraph(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` as a tf.function."""
    function: Callable[..., Any] = tf.function(f)
    return function


def vars_to_refs(vars: Any) -> Any:  # noqa: A002
    """What can be a key of a dict in place of a variable, or a tuple of such for a list: TensorFlow's references."""
    return tuple(vars_to_refs(one) for one in vars) if isinstance(vars, (list, tuple)) else _Ref.of(vars)


def refs_to_vars(refs: Any) -> Any:
    """The variables of what `vars_to_refs` returned, in a list for a tuple."""
    return [refs_to_vars(one) for one in refs] if isinstance(refs, (list, tuple)) else refs.deref()


class _Ref:
    """For a keras.Variable, which has no `ref()`."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    @classmethod
    def of(cls, variable: Any) -> Any:
        return variable.ref() if hasattr(variable, "ref") else cls(variable)

    def deref(self) -> Any:
        return self._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ref) and other._variable is self._variable
