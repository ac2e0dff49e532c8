"""Allreduces as nodes of TensorFlow, and their gradients: the same allreduces of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._core import OpType
from horovod.tensorflow import xla
from horovod.tensorflow.library import OPS
from horovod.tensorflow.ops.calls import by_dtype, for_inputs, run
from horovod.tensorflow.order.names import Named, of_gradient


def reduce(
    tensor: tf.Tensor, called: Named, op: int, prescale: float, postscale: float, process_set_id: int
) -> tf.Tensor:
    if xla.compiling():
        return _reduce_in_xla([tensor], called, op, prescale, postscale, process_set_id)[0]
    return run(
        OPS.horovod_allreduce,
        called,
        process_set_id,
        tensor=tensor,
        reduce_op=op,
        prescale_factor=repr(float(prescale)),
        postscale_factor=repr(float(postscale)),
    )


def reduce_group(
    tensors: Sequence[tf.Tensor], called: Named, op: int, prescale: float, postscale: float, process_set_id: int
) -> list[tf.Tensor]:
    def reduce_part(part: Named, of_one_dtype: list[tf.Tensor]) -> Any:
        if xla.compiling():
            return _reduce_in_xla(of_one_dtype, part, op, prescale, postscale, process_set_id)
        return run(
            OPS.horovod_grouped_allreduce,
            part,
            process_set_id,
            tensors=of_one_dtype,
            reduce_op=op,
            prescale_factor=repr(float(prescale)),
            postscale_factor=repr(float(postscale)),
        )

    return by_dtype(tensors, called, reduce_part)


def _reduce_in_xla(
    tensors: Sequence[tf.Tensor], called: Named, op: int, prescale: float, postscale: float, process_set_id: int
) -> list[tf.Tensor]:
    options: Any = {"reduce_op": op, "prescale": prescale, "postscale": postscale}

    @tf.custom_gradient
    def call(*tensors: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            return _reduce_in_xla(upstream, called.of_gradient(), op, prescale, postscale, process_set_id)

        return tuple(xla.collective(OpType.ALLREDUCE, tensors, called, process_set_id, **options)), gradient

    return list(call(*tensors))


def reduction_of(operation: Any) -> tuple[int, float, float, int]:
    factors = (operation.get_attr(f"{name}_factor") for name in ("prescale", "postscale"))
    return (operation.get_attr("reduce_op"), *map(float, factors), operation.get_attr("process_set_id"))


@tf.RegisterGradient("HorovodAllreduce")
def _gradient(operation: Any, gradient: Any) -> list[Any]:
    tensor = tf.convert_to_tensor(gradient)
    return for_inputs(operation, reduce(tensor, of_gradient(operation), *reduction_of(operation)))


@tf.RegisterGradient("HorovodGroupedAllreduce")
def _grouped_gradient(operation: Any, *gradients: Any) -> list[Any]:
    tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
    return for_inputs(operation, *reduce_group(tensors, of_gradient(operation), *reduction_of(operation)))
