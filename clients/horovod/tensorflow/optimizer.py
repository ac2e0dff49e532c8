"""hvd.DistributedOptimizer of horovod.tensorflow: for optimizers of Keras 3, tf_keras and tf.compat.v1.train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._keras.kinds import distributed_keras
from horovod.common.basics import Average
from horovod.common.gradients import Reduction, check_passes, groups_of
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.v1_optimizer import distributed_v1

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that reduces gradients over all ranks before it applies them. Example:

        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))

    `optimizer.register_local_var(variable)` says that the gradient of a variable stays that of its rank.

    Args:
        optimizer: of Keras, which becomes the distributed one, with its state; or of tf.compat.v1.train.
        name, use_locking: of an optimizer of tf.compat.v1.train.
        device_dense, device_sparse: of the operations for dense gradients and tf.IndexedSlices.
        compression: how gradients travel, for example Compression.fp16.
        sparse_as_dense: make tf.IndexedSlices, as embeddings have, dense before they are reduced.
        backward_passes_per_step: sum up the gradients of so many passes before they are reduced and applied. In other
            passes only the step is counted.
        op: hvd.Average or hvd.Sum; with tf.compat.v1.train also hvd.Adasum: each rank takes a step of its own, and the
            changes of the variables are combined.
        gradient_predivide_factor: with Average, divides by this before and by size / this after the sum.
        average_aggregated_gradients: divide the sum of several passes by their number.
        num_groups: deprecated, use groups.
        groups: reduce gradients together: a number of groups of equal length, or lists of variables.
        process_set: the ranks that take part. On other ranks gradients are what they were.
        scale_local_gradients: divide gradients of variables that stay by the number of ranks.

    Raises:
        ValueError, NotImplementedError: arguments that contradict each other or the optimizer, an optimizer of no kind
            that is known.
        tf.errors.OpError: what hvd.allreduce raises, when gradients are applied.
    """
    reduction = Reduction(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
    )
    check_passes(backward_passes_per_step)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return distributed_v1(
            optimizer, reduction, backward_passes_per_step, average_aggregated_gradients, name, use_locking
        )
    return distributed_keras(optimizer, reduction, backward_passes_per_step, average_aggregated_gradients, name)
