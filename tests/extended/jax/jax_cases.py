"""JAX in the op matrix of tests/torch/op_cases.py; of the calls that return handles, some are made under jax.jit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import unchanging_cases

import horovod.jax as hvd
from horovod.jax.waiting import end_compiled_calls

# Compiled functions need the same number of rows on all ranks, and know no splits: tests of their own have these.
_NOT_COMPILED = ("allgather", "grouped_allgather", "alltoall")
_EVERY = 4  # of the calls that could be compiled: to compile takes longer than all else here


class Box(unchanging_cases.Box):
    def double(self) -> Box:
        return Box(jnp.asarray(self.numpy().astype(np.float64)))

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


class Calls(unchanging_cases.Calls):
    def __init__(self, process_set: Any) -> None:
        super().__init__(hvd, jax.Array, Box, process_set)
        self._calls = 0

    def call(self, function: Callable[..., Any], name: str, given: list[Any], options: dict[str, Any]) -> Any:
        first, *others = given
        if self.in_functions and name.endswith("_async") and name.removesuffix("_async") not in _NOT_COMPILED:
            self._calls += 1
            if self._calls % _EVERY == 0:
                return jax.jit(lambda one: function(one, *others, **options))(first)
        return function(first, *others, **options)


def run_row(operation: str, dtypes: Sequence[str]) -> None:
    """Runs an operation with each of the dtypes on this rank."""
    _run(Calls(hvd.global_process_set), operation, dtypes)


def run_row_in_a_set(operation: str, dtypes: Sequence[str], ranks: list[int]) -> None:
    """The same in a process set, while the other ranks do something else."""
    unchanging_cases.run_in_a_set(hvd, ranks, lambda chosen: _run(Calls(chosen), operation, dtypes))


def _run(calls: Calls, operation: str, dtypes: Sequence[str]) -> None:
    use()
    with jax.enable_x64(True):
        for dtype in dtypes:
            calls.in_functions = dtype in ("bfloat16", "float32", "int32")
            op_cases.OPERATIONS[operation](calls, calls.rank(), calls.size(), dtype)
    end_compiled_calls()
