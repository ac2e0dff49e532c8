"""JAX in the op matrix of tests/torch/op_cases.py: its calls in every form that the cases have.

JAX has no calls in place and none that return handles. Here both are the plain call, outside of compiled functions for
the one and, some of them, under jax.jit for the other, so that the cases see results of both kinds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import op_cases

import horovod.jax as hvd
from horovod.jax.waiting import end_compiled_calls

# Compiled functions need the same number of rows on all ranks, and know no splits: tests of their own have these.
_NOT_COMPILED = ("allgather", "grouped_allgather", "alltoall")
_EVERY = 4  # of the calls that could be compiled: to compile takes longer than all else here


class Box:
    """An array with what the cases ask of one."""

    is_cuda = False

    def __init__(self, value: jax.Array) -> None:
        self.value = value

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def clone(self) -> Box:
        return Box(self.value)

    def cpu(self) -> Box:
        return self

    def double(self) -> Box:
        return Box(jnp.asarray(self.numpy().astype(np.float64)))

    def numpy(self) -> np.ndarray:
        return np.asarray(self.value)

    def tolist(self) -> Any:
        return self.value.tolist()

    def __rmul__(self, factor: int) -> Box:
        return Box(jnp.asarray((factor * self.numpy().astype(np.float64)).astype(self.dtype)))


def _dtype_of(name: str) -> np.dtype:
    return jnp.dtype(name)


def _tensor(array: np.ndarray, dtype: str) -> Box:
    return Box(jnp.asarray(array.astype(_dtype_of(dtype))))


def _array(result: Box) -> np.ndarray:
    return result.numpy().astype(np.float64)


def use() -> None:
    """The cases of this process are JAX's from now on."""
    op_cases.tensor = _tensor
    op_cases.array = _array
    op_cases.dtype_of = _dtype_of
    op_cases.exactly = lambda array: Box(jnp.asarray(array))


def _open(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return [_open(one) for one in given]
    return given.value if isinstance(given, Box) else given


def _boxed(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return tuple(_boxed(one) for one in result)
    return Box(result) if isinstance(result, jax.Array) else result


class Calls:
    """horovod.jax as the cases call a module."""

    def __init__(self, process_set: Any) -> None:
        self._set = process_set
        self.in_functions = True
        self._calls = 0
        self.is_set = process_set is not hvd.global_process_set

    def __getattr__(self, name: str) -> Any:
        plain = name.removesuffix("_").removesuffix("_async")
        value = getattr(hvd, plain)
        if not inspect.isfunction(value):
            return value
        return lambda *given, **options: self._call(value, plain, name, given, options)

    def _call(self, function: Callable[..., Any], plain: str, name: str, given: Any, options: Any) -> Any:
        if "process_set" in inspect.signature(function).parameters:
            options["process_set"] = self._set
        first, *others = _open(given)
        compiled = False
        if self.in_functions and name.endswith("_async") and plain not in _NOT_COMPILED:
            self._calls += 1
            compiled = self._calls % _EVERY == 0
        if compiled:
            result = _boxed(jax.jit(lambda one: function(one, *others, **options))(first))
        else:
            result = _boxed(function(first, *others, **options))
        if name.endswith("_"):
            pairs = zip(given[0], result, strict=True) if isinstance(given[0], list) else [(given[0], result)]
            for box, one in pairs:
                box.value = one.value
            return given[0]
        return result

    def synchronize(self, result: Any) -> Any:
        return result

    def rank(self) -> Any:
        return self._set.rank()

    def size(self) -> Any:
        return self._set.size()

    def global_rank(self, place: int) -> Any:
        return self._set.ranks[place]


def run_row(operation: str, dtypes: Sequence[str]) -> None:
    """Runs an operation with each of the dtypes on this rank."""
    _run(Calls(hvd.global_process_set), operation, dtypes)


def run_row_in_a_set(operation: str, dtypes: Sequence[str], ranks: list[int]) -> None:
    """The same in a process set, while the other ranks do something else."""
    chosen = hvd.add_process_set(ranks)
    if chosen.included():
        _run(Calls(chosen), operation, dtypes)
    hvd.remove_process_set(chosen)


def _run(calls: Calls, operation: str, dtypes: Sequence[str]) -> None:
    use()
    with jax.enable_x64(True):
        for dtype in dtypes:
            calls.in_functions = dtype in ("bfloat16", "float32", "int32")
            op_cases.OPERATIONS[operation](calls, calls.rank(), calls.size(), dtype)
    end_compiled_calls()
