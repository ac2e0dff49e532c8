"""hvd.broadcast, and hvd.broadcast_ of variables: every rank gets the values of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._core import OpType
from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Average
from horovod.common.ops.collectives import check_root
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import xla
from horovod.tensorflow.library import OPS
from horovod.tensorflow.ops.calls import by_dtype, dense, for_inputs, id_of, invalid, run
from horovod.tensorflow.ops.reductions import reduce
from horovod.tensorflow.ops.world import rank_op
from horovod.tensorflow.order.names import Named, named, of_gradient
from horovod.worker.runtime.context import is_member


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Rank `root_rank`'s `tensor`, as a new tensor on every rank. Differentiable.

    Every rank must call it with the same shape and dtype. The gradient on the root is the average of the gradients of
    all ranks, elsewhere it is zero. Example, on ranks 0 and 1:

        >>> hvd.broadcast(tf.constant([hvd.rank()]), root_rank=1).numpy()
        array([1], dtype=int32)
    """
    tensor = dense(tensor, "broadcast", name)
    called = named("broadcast", "HorovodBroadcast", name, tensor, ignore_name_scope)
    process_set_id = id_of(process_set, "Broadcast")
    _check_root(root_rank, process_set)
    if xla.compiling():
        return _broadcast_in_xla(tensor, int(root_rank), called, process_set_id)
    return run(OPS.horovod_broadcast, called, process_set_id, tensor=tensor, root_rank=int(root_rank))


def _check_root(root_rank: int, process_set: ProcessSet) -> None:
    if is_member() and process_set.included():
        try:
            check_root(root_rank, process_set)
        except ValueError as error:
            raise invalid(str(error)) from None


@tf.RegisterGradient("HorovodBroadcast")
def _gradient(operation: Any, gradient: Any) -> list[Any]:
    process_set_id, root_rank = operation.get_attr("process_set_id"), operation.get_attr("root_rank")
    return for_inputs(operation, _to_the_root(gradient, root_rank, of_gradient(operation), process_set_id))


def _to_the_root(gradient: Any, root_rank: int, called: Named, process_set_id: int) -> tf.Tensor:
    as_allreduce = called.as_kind("allreduce")
    reduced = reduce(tf.convert_to_tensor(gradient), as_allreduce, Average, 1.0, 1.0, process_set_id)
    # `reduced` is used on every rank: v1 graphs run an operation only if its result is used. The rank is asked for when
    # the graph runs, because a function may outlive a world.
    return tf.where(tf.equal(rank_op(), root_rank), reduced, tf.zeros_like(reduced))


def _broadcast_in_xla(tensor: tf.Tensor, root_rank: int, called: Named, process_set_id: int) -> tf.Tensor:
    @tf.custom_gradient
    def send(tensor: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return _to_the_root(upstream, root_rank, called.of_gradient(), process_set_id)

        options: Any = {"root_rank": root_rank}
        return xla.collective(OpType.BROADCAST, [tensor], called, process_set_id, **options)[0], gradient

    return send(tensor)


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Gives the variables the values that they have on `root_rank`, as one operation. Not differentiable.

    Example, on ranks 0 and 1:

        >>> counts = tf.Variable([hvd.rank(), 5])
        >>> _ = hvd.broadcast_([counts], root_rank=1)
        >>> counts.numpy()
        array([1, 5], dtype=int32)

    Returns:
        The variables as a list; in a v1 graph what to run in the session.
    """
    variables = [_variable(one) for one in variables]
    kinds = {_is_resource(one) for one in variables}
    if len(kinds) > 1:
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                "hvd.broadcast_: all variables must be resource variables, or all reference variables.",
            )
        )
    if not variables:
        return []
    process_set_id = id_of(process_set, "Broadcast")
    _check_root(root_rank, process_set)
    values = [dense(one, "broadcast", name) for one in variables]
    called = named("broadcast", "HorovodBroadcastInplace", name or "broadcast_variables", values[0])

    def part(node: Named, of_one_dtype: list[tf.Tensor]) -> Any:
        return run(OPS.horovod_grouped_broadcast, node, process_set_id, tensors=of_one_dtype, root_rank=int(root_rank))

    received = by_dtype(values, called, part)
    # TensorFlow keeps the memory of the assigned value, so only the root copies.
    assigned = [one.assign(value) for one, value in zip(variables, received, strict=True)]
    return variables if tf.executing_eagerly() else assigned


def _variable(given: Any) -> Any:
    """The tf.Variable in a keras.Variable."""
    value = given if isinstance(given, tf.Variable) else getattr(given, "value", None)
    if not isinstance(value, tf.Variable):
        raise ValueError(
            coded(TrainingCode.INVALID_ARGUMENT, f"A tf.Variable is required, not {type(given).__name__}.")
        )
    return value


def _is_resource(variable: Any) -> bool:
    return getattr(variable, "handle", None) is not None
