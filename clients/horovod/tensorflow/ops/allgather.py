"""hvd.allgather and its grouped form: the rows of all ranks, one after the other in rank order.

Ranks may contribute different numbers of rows (also none); all other dimensions must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._core import OpType
from horovod.common.basics import Average
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import xla
from horovod.tensorflow.library import OPS, process_set_of
from horovod.tensorflow.ops.calls import by_dtype, dense, for_inputs, id_of, run
from horovod.tensorflow.ops.reductions import reduce
from horovod.tensorflow.ops.world import rank_op
from horovod.tensorflow.order.names import Named, another, named, of_gradient


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The concatenation of every rank's `tensor` along the first dimension, in rank order. Differentiable.

    The gradient is the average over the ranks of the result's gradient, cut to this rank's rows. Example, on ranks 0
    and 1:

        >>> hvd.allgather(tf.fill([hvd.rank() + 1, 2], hvd.rank())).numpy().tolist()
        [[0, 0], [1, 1], [1, 1]]
    """
    tensor = dense(tensor, "allgather", name)
    called = named("allgather", "HorovodAllgather", name, tensor, ignore_name_scope)
    return gather(tensor, called, id_of(process_set, "Allgather"))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """`allgather` of several tensors as one operation; a list of new tensors in the order given. Differentiable.

    Example, on ranks 0 and 1:

        >>> [one.numpy().tolist() for one in hvd.grouped_allgather([tf.constant([hvd.rank()]), tf.ones(hvd.rank())])]
        [[0, 1], [1.0]]
    """
    made = [dense(tensor, "grouped_allgather", name) for tensor in tensors]
    if not made:
        return made
    called = named("grouped_allgather", "HorovodGroupedAllgather", name, made[0], ignore_name_scope)
    process_set_id = id_of(process_set, "Allgather")

    def gather_part(part: Named, of_one_dtype: list[tf.Tensor]) -> Any:
        if xla.compiling():
            return [_gather_in_xla(one, another(part, "allgather", "row"), process_set_id) for one in of_one_dtype]
        return run(OPS.horovod_grouped_allgather, part, process_set_id, tensors=of_one_dtype)

    return by_dtype(made, called, gather_part)


# -- the nodes and their gradients -------------------------------------------------------------------------------------
def gather(tensor: tf.Tensor, called: Named, process_set_id: int) -> tf.Tensor:
    if xla.compiling():
        return _gather_in_xla(tensor, called, process_set_id)
    return run(OPS.horovod_allgather, called, process_set_id, tensor=tensor)


def _gather_in_xla(tensor: tf.Tensor, called: Named, process_set_id: int) -> tf.Tensor:
    place, size = xla.members(process_set_id)

    @tf.custom_gradient
    def call(tensor: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            as_allreduce = called.of_gradient().as_kind("allreduce")
            reduced = reduce(upstream, as_allreduce, Average, 1.0, 1.0, process_set_id)
            rows = tensor.shape[0]
            return reduced[place * rows : (place + 1) * rows]

        options: Any = {"rows": lambda rows: rows * size}
        return xla.collective(OpType.ALLGATHER, [tensor], called, process_set_id, **options)[0], gradient

    return call(tensor)


def _own_rows(gradient: Any, tensor: tf.Tensor, called: Named, process_set_id: int) -> tf.Tensor:
    """The backward pass: the average of the gradient over the ranks, cut to the rows that this rank contributed."""
    reduced = reduce(tf.convert_to_tensor(gradient), called.as_kind("allreduce"), Average, 1.0, 1.0, process_set_id)
    rows = tf.shape(tensor)[:1]
    counts = gather(rows, another(called, "allgather", "rows"), process_set_id)
    # A function may outlive a world, in which a rank has another number; a process set does not.
    place = rank_op() if process_set_id == 0 else process_set_of(process_set_id).rank()
    first = tf.reduce_sum(counts[:place])
    return reduced[first : first + rows[0]]


@tf.RegisterGradient("HorovodAllgather")
def _gradient(operation: Any, gradient: Any) -> list[Any]:
    process_set_id = operation.get_attr("process_set_id")
    return for_inputs(operation, _own_rows(gradient, operation.inputs[0], of_gradient(operation), process_set_id))


@tf.RegisterGradient("HorovodGroupedAllgather")
def _grouped_gradient(operation: Any, *gradients: Any) -> list[Any]:
    called, process_set_id = of_gradient(operation), operation.get_attr("process_set_id")
    rows = [
        _own_rows(gradient, operation.inputs[place], another(called, "allgather", str(place)), process_set_id)
        for place, gradient in enumerate(gradients)
    ]
    return for_inputs(operation, *rows)
