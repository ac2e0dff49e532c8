"""The sum or average of tf.IndexedSlices, by gathering rows and their indices."""

from __future__ import annotations

import tensorflow as tf

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common.basics import Average, Sum
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow.compression import Compressor
from horovod.tensorflow.ops.allgather import gather
from horovod.tensorflow.ops.calls import dense, id_of
from horovod.tensorflow.ops.world import size_op
from horovod.tensorflow.order.names import another, named


def sparse_allreduce(
    slices: tf.IndexedSlices,
    op: int,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    compression: type[Compressor],
) -> tf.IndexedSlices:
    """The rows of all ranks with their indices, of which the same may come several times: they add up."""
    if op not in (Average, Sum):
        raise NotImplementedError(
            coded(
                OperationCode.UNDEFINED_REDUCTION,
                "An allreduce of tf.IndexedSlices supports op=hvd.Average and op=hvd.Sum only. Make them dense with "
                "tf.convert_to_tensor, or use sparse_as_dense=True.",
            )
        )
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError(
            coded(
                TrainingCode.CONTRADICTORY_ARGUMENTS,
                "An allreduce of tf.IndexedSlices supports no prescale_factor and postscale_factor.",
            )
        )
    process_set_id = id_of(process_set, "Allreduce")
    values = dense(slices.values, "allreduce", name)
    called = named("allgather", "HorovodAllreduce", name, values, ignore_name_scope)
    small, context = compression.compress(values)

    indices = gather(slices.indices, another(called, "allgather", "indices"), process_set_id)
    rows = compression.decompress(gather(small, another(called, "allgather", "values"), process_set_id), context)
    if op == Average:
        rows = rows / tf.cast(size_op(process_set_id), rows.dtype)
    return tf.IndexedSlices(rows, indices, slices.dense_shape)
