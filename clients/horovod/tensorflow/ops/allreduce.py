"""hvd.allreduce and its grouped form.

    result = postscale_factor * REDUCE(prescale_factor * tensor)      element by element over the ranks

REDUCE is `op`: Average (the default; the sum divided by the number of ranks), Sum, Min, Max or Product. For integers
each multiplication by a factor is done in double precision and truncated toward zero, and Sum wraps around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.basics import Sum
from horovod.common.ops.compression import compressed, compressed_group
from horovod.common.ops.specs import reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.library import as_it_is
from horovod.tensorflow.once import mark
from horovod.tensorflow.ops.calls import check_op, dense, id_of
from horovod.tensorflow.ops.reductions import reduce, reduce_group
from horovod.tensorflow.ops.sparse import sparse_allreduce
from horovod.tensorflow.order.names import named


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction of `tensor` over all ranks, as a new tensor of the same shape and dtype. Differentiable.

    Every rank of `process_set` must call it with the same shape, dtype and op. Its gradient is the same allreduce of
    the gradient. Example, on ranks 0 and 1:

        >>> hvd.allreduce(tf.constant([1.0, hvd.rank()]))
        <tf.Tensor: shape=(2,), dtype=float32, numpy=array([1. , 0.5], dtype=float32)>
    """
    op = reduce_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse):
            slices = sparse_allreduce(
                tensor, op, prescale_factor, postscale_factor, name, process_set, ignore_name_scope, compression
            )
        mark([slices], op, process_set)
        return slices
    with tf.device(device_dense):
        tensor = dense(tensor, "allreduce", name)
        arguments = (name, op, prescale_factor, postscale_factor, ignore_name_scope, process_set)
        result = compressed(compression, tensor, _allreduce, *arguments)
    mark([result], op, process_set)
    return result


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """`allreduce` of a dense tensor as it is. Scripts of older releases call it as hvd.mpi_ops._allreduce."""
    tensor = dense(tensor, "allreduce", name)
    check_op(op, tensor, process_set, "Allreduce")
    called = named("allreduce", "HorovodAllreduce", name, tensor, ignore_name_scope)
    return reduce(tensor, called, op, prescale_factor, postscale_factor, id_of(process_set, "Allreduce"))


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of several tensors as one operation: none is reduced before all are ready on all ranks.

    Returns a list of new tensors in the order given. Differentiable. Example, on ranks 0 and 1:

        >>> [one.numpy() for one in hvd.grouped_allreduce([tf.ones(2), tf.constant(hvd.rank())], op=hvd.Sum)]
        [array([2., 2.], dtype=float32), 1]
    """
    op = reduce_op(op, average)
    tensors = list(tensors)
    sparse = [place for place, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    results: list[Any] = [None] * len(tensors)
    for place in sparse:
        with tf.device(device_sparse):
            of_its_own = None if name is None else f"{name}.{place}"
            results[place] = sparse_allreduce(
                tensors[place],
                op,
                prescale_factor,
                postscale_factor,
                of_its_own,
                process_set,
                ignore_name_scope,
                compression,
            )
    with tf.device(device_dense):
        places = [place for place in range(len(tensors)) if place not in sparse]
        group = [dense(tensors[place], "grouped_allreduce", name) for place in places]
        arguments = (name, op, prescale_factor, postscale_factor, ignore_name_scope, process_set)
        reduced = compressed_group(compression, group, _grouped_allreduce, *arguments)
        for place, result in zip(places, reduced, strict=True):
            results[place] = result
    mark(results, op, process_set)
    return results


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """`grouped_allreduce` of dense tensors as they are."""
    tensors = [dense(tensor, "grouped_allreduce", name) for tensor in tensors]
    if not tensors:
        return tensors
    for tensor in tensors:
        check_op(op, tensor, process_set, "Allreduce")
    called = named("grouped_allreduce", "HorovodGroupedAllreduce", name, tensors[0], ignore_name_scope)
    return reduce_group(tensors, called, op, prescale_factor, postscale_factor, id_of(process_set, "Allreduce"))


as_it_is(_allreduce, _grouped_allreduce)
