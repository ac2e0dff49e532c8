"""Helpers that scripts of earlier releases import from here (horovod/common/compatibility.py says more)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.basics import Average
from horovod.common.compatibility import HorovodBasics
from horovod.common.compatibility import _cache as _cache
from horovod.common.compatibility import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from horovod.common.gradients import Reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import gpu_available as gpu_available
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradients import reduced
from horovod.tensorflow.ops.allreduce import _allreduce as _allreduce
from horovod.tensorflow.ops.allreduce import _grouped_allreduce as _grouped_allreduce
from horovod.tensorflow.optimizer import _DistributedOptimizer as _DistributedOptimizer

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
    """TensorFlow's reference to a variable, which can be a key of a dict; for a list, a tuple of references."""
    return tuple(vars_to_refs(one) for one in vars) if isinstance(vars, (list, tuple)) else _Ref.of(vars)


def refs_to_vars(refs: Any) -> Any:
    """The variables of the references that `vars_to_refs` returned, in a list for a tuple."""
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


_LegacyOptimizer = tf.compat.v1.train.Optimizer
_basics = HorovodBasics()


def _make_allreduce_grads_fn(
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:
    """A function of gradients, and of the variables that they belong to, which returns them reduced over the ranks.

    It has the arguments of hvd.DistributedOptimizer. name: of the operations' scope.
    """
    reduction = Reduction(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )

    def allreduce_grads(
        grads: Sequence[Any],
        vars: Sequence[Any] | None = None,  # noqa: A002
        use_generic_names: bool = False,
    ) -> list[Any]:
        known = [None] * len(grads) if vars is None else vars
        with tf.name_scope(name or "DistributedGradients"):
            return reduced(list(grads), known, reduction, generic_names=use_generic_names or vars is None)

    return allreduce_grads
