"""hvd.reducescatter and its grouped form: a reduction of which every rank gets some rows.

Of n rows in a world of s ranks the first n % s ranks get n // s + 1, the others n // s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._core import OpType
from horovod.base.errors import OperationCode, coded
from horovod.common.basics import Adasum, Average, Max, Min, Product, Sum
from horovod.common.ops.compression import compressed, compressed_group
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import xla
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.library import OPS
from horovod.tensorflow.ops.allgather import gather
from horovod.tensorflow.ops.calls import by_dtype, check_op, dense, for_inputs, id_of, run
from horovod.tensorflow.ops.reductions import reduction_of
from horovod.tensorflow.ops.world import size_op
from horovod.tensorflow.order.names import Named, another, named, of_gradient


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """This rank's rows of the reduction of `tensor` over all ranks, as a new tensor. Differentiable.

    Every rank must call it with the same shape, dtype and op. Example, on ranks 0 and 1:

        >>> hvd.reducescatter(tf.constant([1.0, 2.0, 3.0]), op=hvd.Sum).numpy().tolist()
        [2.0, 4.0]  # on rank 0; [6.0] on rank 1
    """
    with tf.device(device_dense):
        tensor = dense(tensor, "reducescatter", name)
        arguments = (op, name, process_set, ignore_name_scope, prescale_factor, postscale_factor)
        return compressed(compression, tensor, _reducescatter, *arguments)


def _reducescatter(
    tensor: tf.Tensor,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    prescale: float,
    postscale: float,
) -> tf.Tensor:
    _check(op, tensor, process_set)
    called = named("reducescatter", "HorovodReducescatter", name, tensor, ignore_name_scope)
    process_set_id = id_of(process_set, "Reducescatter")
    if xla.compiling():
        return _scatter_in_xla(tensor, called, op, prescale, postscale, process_set_id)
    return run(
        OPS.horovod_reducescatter,
        called,
        process_set_id,
        tensor=tensor,
        reduce_op=op,
        prescale_factor=repr(float(prescale)),
        postscale_factor=repr(float(postscale)),
    )


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """`reducescatter` of several tensors as one operation; a list of new tensors in the order given. Differentiable.

    Example, on ranks 0 and 1:

        >>> [one.numpy().tolist() for one in hvd.grouped_reducescatter([tf.ones([2]), tf.ones([2, 1])], op=hvd.Sum)]
        [[2.0], [[2.0]]]
    """
    with tf.device(device_dense):
        made = [dense(tensor, "grouped_reducescatter", name) for tensor in tensors]
        arguments = (op, name, process_set, prescale_factor, postscale_factor)
        return compressed_group(compression, made, _grouped_reducescatter, *arguments)


def _grouped_reducescatter(
    tensors: Sequence[tf.Tensor],
    op: int,
    name: str | None,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
) -> list[tf.Tensor]:
    if not tensors:
        return []
    for tensor in tensors:
        _check(op, tensor, process_set)
    called = named("grouped_reducescatter", "HorovodGroupedReducescatter", name, tensors[0])
    process_set_id = id_of(process_set, "Reducescatter")

    def scatter_part(part: Named, of_one_dtype: list[tf.Tensor]) -> Any:
        if xla.compiling():
            names = [another(part, "reducescatter", str(place)) for place in range(len(of_one_dtype))]
            return [
                _scatter_in_xla(one, its, op, prescale, postscale, process_set_id)
                for one, its in zip(of_one_dtype, names, strict=True)
            ]
        return run(
            OPS.horovod_grouped_reducescatter,
            part,
            process_set_id,
            tensors=of_one_dtype,
            reduce_op=op,
            prescale_factor=repr(float(prescale)),
            postscale_factor=repr(float(postscale)),
        )

    return by_dtype(tensors, called, scatter_part)


def _check(op: int, tensor: tf.Tensor, process_set: ProcessSet) -> None:
    if tensor.shape.rank == 0:
        raise ValueError(
            coded(
                OperationCode.NO_ROWS,
                "Reducescatter: the tensor is a scalar, which has no rows to scatter. Use hvd.allreduce, or give it a "
                "dimension with tf.reshape(tensor, [1]).",
            )
        )
    if op == Adasum:
        raise NotImplementedError(
            coded(
                OperationCode.UNDEFINED_REDUCTION,
                "Reducescatter does not support op=hvd.Adasum. Use hvd.Average or hvd.Sum.",
            )
        )
    if op in (Min, Max, Product):
        raise tf.errors.AbortedError(
            None,
            None,
            coded(OperationCode.UNDEFINED_REDUCTION, "Reducescatter supports op=hvd.Average and op=hvd.Sum only."),
        )
    check_op(op, tensor, process_set, "Reducescatter")


# -- gradients ---------------------------------------------------------------------------------------------------------
def _scaled(gradient: Any, op: int, prescale: float, postscale: float, process_set_id: int) -> tf.Tensor:
    """What the backward pass gathers. Losses are averaged, so Sum counts once for every rank."""
    tensor = tf.convert_to_tensor(gradient)
    factor = prescale * postscale
    if factor != 1.0:
        tensor *= tf.constant(factor, tensor.dtype)
    if op == Sum:
        tensor *= tf.cast(size_op(process_set_id), tensor.dtype)
    return tensor


def _gathered(gradient: Any, operation: Any, called: Named) -> tf.Tensor:
    """The backward pass: the gradients of all ranks' rows."""
    op, prescale, postscale, process_set_id = reduction_of(operation)
    tensor = _scaled(gradient, op, prescale, postscale, process_set_id)
    return gather(tensor, called.as_kind("allgather"), process_set_id)


def _scatter_in_xla(
    tensor: tf.Tensor, called: Named, op: int, prescale: float, postscale: float, process_set_id: int
) -> tf.Tensor:
    place, size = xla.members(process_set_id)
    options: Any = {"reduce_op": op, "prescale": prescale, "postscale": postscale}

    @tf.custom_gradient
    def scatter(tensor: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            rows, again = tensor.shape[0], called.of_gradient().as_kind("allgather")
            scaled = _scaled(upstream, op, prescale, postscale, process_set_id)
            return xla.collective(OpType.ALLGATHER, [scaled], again, process_set_id, rows=lambda _: rows)[0]

        def own_rows(rows: int) -> int:
            return rows // size + (place < rows % size)

        return xla.collective(OpType.REDUCESCATTER, [tensor], called, process_set_id, rows=own_rows, **options)[
            0
        ], gradient

    return scatter(tensor)


@tf.RegisterGradient("HorovodReducescatter")
def _gradient(operation: Any, gradient: Any) -> list[Any]:
    return for_inputs(operation, _gathered(gradient, operation, of_gradient(operation)))


@tf.RegisterGradient("HorovodGroupedReducescatter")
def _grouped_gradient(operation: Any, *gradients: Any) -> list[Any]:
    called = of_gradient(operation)
    gathered = [
        _gathered(gradient, operation, another(called, "allgather", str(place)))
        for place, gradient in enumerate(gradients)
    ]
    return for_inputs(operation, *gathered)
