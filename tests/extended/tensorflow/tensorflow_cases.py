"""TensorFlow in the op matrix of tests/torch/op_cases.py: its calls in every form that the cases have.

TensorFlow has no calls in place and none that return handles. Here both are the plain call, eager for the one and in a
tf.function for the other, so that the cases see results of both kinds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import op_cases
import tensorflow as tf

import horovod.tensorflow as hvd

# What needs PyTorch's own kinds of tensors, tests of their own take the place of.
OPERATIONS = {name: case for name, case in op_cases.OPERATIONS.items() if name != "sparse_allreduce"}


class Box:
    """A tensor with what the cases ask of one."""

    is_cuda = False

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value

    @property
    def dtype(self) -> tf.DType:
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape.as_list())

    def clone(self) -> Box:
        return Box(self.value)

    def cpu(self) -> Box:
        return self

    def double(self) -> Box:
        return Box(tf.cast(_wide(self.value), tf.float64))

    def numpy(self) -> np.ndarray:
        return self.value.numpy()

    def tolist(self) -> Any:
        return self.value.numpy().tolist()

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


def _open(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return [_open(one) for one in given]
    return given.value if isinstance(given, Box) else given


def _boxed(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return tuple(_boxed(one) for one in result)
    return Box(result) if isinstance(result, tf.Tensor) else result


class Calls:
    """horovod.tensorflow as the cases call a module."""

    def __init__(self, process_set: Any) -> None:
        self._set = process_set
        self.in_functions = True
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
        if name == "alltoall_async" and len(given) == 1:
            given = (*given, None)
        inputs = _open(given)
        try:
            if self.in_functions and name.endswith("_async"):
                result = _boxed(tf.function(lambda: function(*inputs, **options), autograph=False)())
            else:
                result = _boxed(function(*inputs, **options))
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(str(error)) from None
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
    for dtype in dtypes:
        calls.in_functions = dtype in ("bfloat16", "float32", "int32")  # tracing takes longer than all else here
        OPERATIONS[operation](calls, calls.rank(), calls.size(), dtype)
