"""The collectives on MXNet's arrays.

    result = postscale_factor * REDUCE(prescale_factor * tensor)      element by element over the ranks

A call returns when its result is there, after what MXNet still had to do with the array. So all ranks must make their
calls in one order, names or not; what should travel together is given to a grouped call. No gradient is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from horovod.common.basics import Average
from horovod.common.ops import collectives
from horovod.common.ops.compression import compressed, compressed_group
from horovod.common.ops.specs import reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.mxnet.arrays import COLLECTIVES, counts
from horovod.mxnet.compression import Compression, Compressor
from horovod.mxnet.errors import mxnet_errors

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]


@mxnet_errors
def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """The reduction of `tensor` over all ranks, as a new array. Example, on ranks 0 and 1:

    >>> hvd.allreduce(mx.nd.array([1, hvd.rank()])).asnumpy()
    array([1. , 0.5], dtype=float32)
    """
    op = reduce_op(op, average)
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    return compressed(compression, tensor, COLLECTIVES.allreduce, *arguments)


@mxnet_errors
def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """`allreduce` in place: the result replaces `tensor`, which is returned.

    >>> gradient = mx.nd.ones(2)
    >>> hvd.allreduce_(gradient, op=hvd.Sum) is gradient
    True
    """
    op = reduce_op(op, average)
    return COLLECTIVES.allreduce_(tensor, op, name, prescale_factor, postscale_factor, process_set)


@mxnet_errors
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
) -> list[Any]:
    """`allreduce` of several arrays as one operation: none is reduced before all are ready on all ranks.

    Returns new arrays in the order given.

    >>> one, other = hvd.grouped_allreduce([mx.nd.ones(1), mx.nd.ones(2)], op=hvd.Sum)
    >>> other.asnumpy()
    array([2., 2.], dtype=float32)
    """
    op = reduce_op(op, average)
    arguments = (False, op, name, prescale_factor, postscale_factor, process_set)
    start = functools.partial(COLLECTIVES.wait, COLLECTIVES.start_allreduces)
    return compressed_group(compression, tensors, start, *arguments)


@mxnet_errors
def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Any]:
    """`grouped_allreduce` in place: the results replace the arrays, which are returned.

    >>> gradients = [mx.nd.ones(1), mx.nd.ones(2)]
    >>> hvd.grouped_allreduce_(gradients, op=hvd.Sum)[1] is gradients[1]
    True
    """
    op = reduce_op(op, average)
    arguments = (tensors, True, op, name, prescale_factor, postscale_factor, process_set)
    return list(COLLECTIVES.wait(COLLECTIVES.start_allreduces, *arguments))


@mxnet_errors
def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """The concatenation of every rank's `tensor` along the first dimension, in rank order, which may differ in length.

    >>> hvd.allgather(mx.nd.array([hvd.rank()])).asnumpy()
    array([0., 1.], dtype=float32)
    """
    return COLLECTIVES.allgather(tensor, name, process_set)


@mxnet_errors
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """`allgather` of several arrays as one operation; new arrays in the order given.

    >>> one, other = hvd.grouped_allgather([mx.nd.ones(1), mx.nd.ones((2, 3))])
    >>> other.shape
    (4, 3)
    """
    return list(COLLECTIVES.wait(COLLECTIVES.start_allgathers, tensors, name, process_set))


@mxnet_errors
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The array of `root_rank`, a global rank of the process set, on every rank, as a new array.

    >>> hvd.broadcast(mx.nd.array([hvd.rank()]), root_rank=1).asnumpy()
    array([1.], dtype=float32)
    """
    return COLLECTIVES.broadcast(tensor, root_rank, name, process_set)


@mxnet_errors
def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`broadcast` in place: the root's values replace those of `tensor`, which is returned.

    >>> weights = mx.nd.array([hvd.rank()])
    >>> hvd.broadcast_(weights, root_rank=1) is weights
    True
    """
    return COLLECTIVES.broadcast_(tensor, root_rank, name, process_set)


@mxnet_errors
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of `tensor` to every rank, and returns the rows that came from each, in rank order.

    Without `splits` the rows are sent in equal parts. With them, whole numbers in a list or an array, the result is the
    array and how many rows came from each rank, as an array of int32. All dimensions but the first are the same on all
    ranks.

    >>> rows, received = hvd.alltoall(mx.nd.array([10, 20, 30]), splits=[1, 2])
    >>> received.asnumpy()
    array([1, 1], dtype=int32)  # on rank 0; array([2, 2], dtype=int32) on rank 1
    """
    given = splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else splits
    rows, received = COLLECTIVES.alltoall(tensor, given, name, process_set)
    return rows if splits is None else (rows, counts(received))


@mxnet_errors
def reducescatter(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """The reduction of `tensor` over all ranks, by hvd.Average or hvd.Sum, of which each rank gets its share of rows.

    Rows are shared out evenly. If they can't be, the first ranks get one row more.

    >>> hvd.reducescatter(mx.nd.array([1, 2]), op=hvd.Sum).asnumpy()
    array([2.], dtype=float32)  # on rank 0; array([4.], dtype=float32) on rank 1
    """
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    return compressed(compression, tensor, COLLECTIVES.reducescatter, *arguments)


@mxnet_errors
def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: type[Compressor] = Compression.none,
) -> list[Any]:
    """`reducescatter` of several arrays as one operation; new arrays in the order given.

    >>> one, other = hvd.grouped_reducescatter([mx.nd.ones(2), mx.nd.ones((4, 3))])
    >>> other.shape
    (2, 3)
    """
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    start = functools.partial(COLLECTIVES.wait, COLLECTIVES.start_reducescatters)
    return compressed_group(compression, tensors, start, *arguments)


@mxnet_errors
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until every rank of `process_set` has called it.

    >>> hvd.barrier()
    """
    collectives.barrier(process_set)


@mxnet_errors
def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and blocks until all ranks have called it; returns the last of them.

    Meanwhile it contributes zeros to every allreduce of the others in the global process set; Average still divides by
    the number of all ranks. Any other operation there fails on the ranks that call it.

    >>> hvd.broadcast_parameters(model.collect_params(), root_rank=hvd.join())
    """
    return collectives.join(device)
