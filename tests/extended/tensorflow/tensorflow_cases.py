"""TensorFlow in the op matrix of tests/torch/op_cases.py; the calls that return handles are made in a tf.function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import op_cases
import tensorflow as tf
import unchanging_cases

import horovod.tensorflow as hvd

# What needs PyTorch's own kinds of tensors, tests of their own take the place of.
OPERATIONS = {name: case for name, case in op_cases.OPERATIONS.items() if name != "sparse_allreduce"}


class Box(unchanging_cases.Box):
    def double(self) -> Box:
        return Box(tf.cast(_wide(self.value), tf.float64))

    def numpy(self) -> np.ndarray:
        return self.value.numpy()

    def __rmul__(self, factor: int) -> Box:
        return Box(tf.cast(factor, self.value.dtype) * self.value)


def _wide(value: tf.Tensor) -> tf.Tensor:
    """TensorFlow casts eight-bit floats to float32 only."""
    return tf.cast(value, tf.float32) if value.dtype.size == 1 and value.dtype.is_floating else value


def _dtype_of(name: str) -> tf.DType:
    return getattr(tf, name, None) or getattr(tf.dtypes.experimental, name)


def _tensor(array: np.ndarray, dtype: str) -> Box:
    # A new tensor, which nothing else refers to.
    return Box(
        tf.cast(tf.cast(tf.constant(array), tf.float32) if "float8" in dtype else tf.constant(array), _dtype_of(dtype))
    )


def _array(result: Box) -> np.ndarray:
    return result.double().numpy()


def use() -> None:
    """The cases of this process are TensorFlow's from now on."""
    op_cases.tensor = _tensor
    op_cases.array = _array
    op_cases.dtype_of = _dtype_of
    op_cases.exactly = lambda array: Box(tf.constant(array))


class Calls(unchanging_cases.Calls):
    def __init__(self, process_set: Any) -> None:
        super().__init__(hvd, tf.Tensor, Box, process_set)

    def call(self, function: Callable[..., Any], name: str, given: list[Any], options: dict[str, Any]) -> Any:
        if name == "alltoall_async" and len(given) == 1:
            given = [*given, None]
        try:
            if self.in_functions and name.endswith("_async"):
                return tf.function(lambda: function(*given, **options), autograph=False)()
            return function(*given, **options)
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(str(error)) from None


def run_row(operation: str, dtypes: Sequence[str]) -> None:
    """Runs an operation with each of the dtypes on this rank."""
    _run(Calls(hvd.global_process_set), operation, dtypes)


def run_row_in_a_set(operation: str, dtypes: Sequence[str], ranks: list[int]) -> None:
    """The same in a process set, while the other ranks do something else."""
    unchanging_cases.run_in_a_set(hvd, ranks, lambda chosen: _run(Calls(chosen), operation, dtypes))


def _run(calls: Calls, operation: str, dtypes: Sequence[str]) -> None:
    use()
    for dtype in dtypes:
        calls.in_functions = dtype in ("bfloat16", "float32", "int32")  # tracing takes longer than all else here
        OPERATIONS[operation](calls, calls.rank(), calls.size(), dtype)
