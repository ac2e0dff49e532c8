"""hvd.alltoall: every rank sends some of its rows to every other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._core import OpType
from horovod.base.errors import OperationCode, coded
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import xla
from horovod.tensorflow.library import OPS
from horovod.tensorflow.ops.calls import dense, for_inputs, id_of, run
from horovod.tensorflow.order.names import Named, named, of_gradient


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of `tensor` to every rank and returns the rows received, in rank order. Differentiable.

    Example, on ranks 0 and 1:

        >>> rows, received = hvd.alltoall(tf.constant([10, 11, 12]) + 100 * hvd.rank(), splits=[1, 2])
        >>> rows.numpy().tolist(), received.numpy().tolist()
        ([10, 110], [1, 1])  # on rank 0; on rank 1 ([11, 12, 111, 112], [2, 2])

    Returns:
        The rows; with `splits` the rows and how many of them came from each rank, an int32 tensor.
    """
    tensor = dense(tensor, "alltoall", name)
    called = named("alltoall", "HorovodAlltoall", name, tensor, ignore_name_scope)
    process_set_id = id_of(process_set, "Alltoall")
    equal = splits is None
    if xla.compiling():
        if not equal:
            raise NotImplementedError(
                coded(
                    OperationCode.NOT_COMPILABLE, "hvd.alltoall with splits has no static shape: use jit_compile=False."
                )
            )
        return _exchange_in_xla(tensor, called, process_set_id)
    rows = tf.zeros([0], tf.int32) if equal else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    output, received = _exchange(tensor, rows, called, process_set_id)
    return output if equal else (output, received)


def _exchange(tensor: tf.Tensor, splits: tf.Tensor, called: Named, process_set_id: int) -> Any:
    return run(OPS.horovod_alltoall, called, process_set_id, tensor=tensor, splits=splits)


def _exchange_in_xla(tensor: tf.Tensor, called: Named, process_set_id: int) -> tf.Tensor:
    @tf.custom_gradient
    def exchange(tensor: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return _exchange_in_xla(upstream, called.of_gradient(), process_set_id)

        return xla.collective(OpType.ALLTOALL, [tensor], called, process_set_id)[0], gradient

    return exchange(tensor)


@tf.RegisterGradient("HorovodAlltoall")
def _gradient(operation: Any, gradient: Any, _: Any) -> Any:
    """Rows go back to where they came from; those that were sent nowhere have no gradient."""
    tensor, received = operation.inputs[0], operation.outputs[1]
    called, process_set_id = of_gradient(operation), operation.get_attr("process_set_id")
    returned, _ = _exchange(tf.convert_to_tensor(gradient), received, called, process_set_id)
    rest = tf.shape(tensor)[:1] - tf.shape(returned)[:1]
    zeros = tf.zeros(tf.concat([rest, tf.shape(tensor)[1:]], 0), returned.dtype)
    return for_inputs(operation, tf.ensure_shape(tf.concat([returned, zeros], 0), tensor.shape))
