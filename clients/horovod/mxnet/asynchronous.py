"""The collectives as calls that return a handle; `poll` and `synchronize` take it.

An array that is given must not be used before `synchronize`: MXNet does not know that it is being read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

from horovod.common.basics import Average
from horovod.common.ops import handles
from horovod.common.ops.handles import AnyHandle
from horovod.common.ops.specs import reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.mxnet import sparse
from horovod.mxnet.arrays import COLLECTIVES, MXNetFramework, counts
from horovod.mxnet.errors import mxnet_errors

__all__ = [
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


@mxnet_errors
def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> AnyHandle:
    """Starts `allreduce`; `synchronize` gives the new array.

    >>> handle = hvd.allreduce_async(mx.nd.ones(2), op=hvd.Sum)
    >>> hvd.synchronize(handle).asnumpy()
    array([2., 2.], dtype=float32)
    """
    op = reduce_op(op, average)
    return COLLECTIVES.allreduce_async(tensor, op, name, prescale_factor, postscale_factor, process_set)


@mxnet_errors
def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> AnyHandle:
    """Starts `allreduce_`; `synchronize` gives `tensor`.

    >>> tensor = mx.nd.ones(2)
    >>> hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum)) is tensor
    True
    """
    op = reduce_op(op, average)
    return COLLECTIVES.allreduce_async_(tensor, op, name, prescale_factor, postscale_factor, process_set)


@mxnet_errors
def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> AnyHandle:
    """Starts `grouped_allreduce`; `synchronize` gives a tuple of the new arrays.

    >>> handle = hvd.grouped_allreduce_async([mx.nd.ones(2), mx.nd.zeros(3)], op=hvd.Sum)
    >>> first, second = hvd.synchronize(handle)
    >>> second.shape
    (3,)
    """
    op = reduce_op(op, average)
    return COLLECTIVES.start_allreduces(tensors, False, op, name, prescale_factor, postscale_factor, process_set)


@mxnet_errors
def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> AnyHandle:
    """Starts `grouped_allreduce_`; `synchronize` gives a tuple of the arrays.

    >>> arrays = [mx.nd.ones(2), mx.nd.zeros(3)]
    >>> results = hvd.synchronize(hvd.grouped_allreduce_async_(arrays, op=hvd.Sum))
    >>> results[0] is arrays[0]
    True
    """
    op = reduce_op(op, average)
    return COLLECTIVES.start_allreduces(tensors, True, op, name, prescale_factor, postscale_factor, process_set)


@mxnet_errors
def sparse_allreduce_async(
    tensor: Any, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Any]:
    """Starts the sum or average of arrays of the storage type row_sparse; the function that it returns waits for it.

    Each rank may have other rows, or none. Rows that several ranks have are added up.

    >>> hvd.sparse_allreduce_async(gradient, name="embedding", op=hvd.Average)()
    """
    return sparse.start(tensor, name, op, process_set)


@mxnet_errors
def allgather_async(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Starts `allgather`; `synchronize` gives the new array.

    >>> handle = hvd.allgather_async(mx.nd.ones((1 + hvd.rank(), 2)))
    >>> hvd.synchronize(handle).shape
    (3, 2)
    """
    return COLLECTIVES.allgather_async(tensor, name, process_set)


@mxnet_errors
def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Starts `grouped_allgather`; `synchronize` gives a tuple of new arrays.

    >>> handle = hvd.grouped_allgather_async([mx.nd.ones(1), mx.nd.zeros((2, 3))])
    >>> first, second = hvd.synchronize(handle)
    >>> second.shape
    (4, 3)
    """
    return COLLECTIVES.start_allgathers(tensors, name, process_set)


@mxnet_errors
def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `broadcast`; `synchronize` gives the new array.

    >>> handle = hvd.broadcast_async(mx.nd.array([hvd.rank()]), root_rank=1)
    >>> hvd.synchronize(handle).asnumpy()
    array([1.], dtype=float32)
    """
    return COLLECTIVES.broadcast_async(tensor, root_rank, name, process_set)


@mxnet_errors
def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `broadcast_`; `synchronize` gives `tensor`.

    >>> tensor = mx.nd.array([hvd.rank()])
    >>> hvd.synchronize(hvd.broadcast_async_(tensor, root_rank=1)) is tensor
    True
    """
    return COLLECTIVES.broadcast_async_(tensor, root_rank, name, process_set)


@mxnet_errors
def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `alltoall`; `synchronize` gives the new array and how many rows came from each rank.

    >>> handle = hvd.alltoall_async(mx.nd.array([10, 20, 30]), splits=[1, 2])
    >>> hvd.synchronize(handle)[1].asnumpy()
    array([1, 1], dtype=int32)  # on rank 0; array([2, 2], dtype=int32) on rank 1
    """
    given = splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else splits
    return COLLECTIVES.alltoall_async(tensor, given, name, process_set, counts)


@mxnet_errors
def reducescatter_async(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Starts `reducescatter`; `synchronize` gives the new array.

    >>> handle = hvd.reducescatter_async(mx.nd.array([1, 2, 3]), op=hvd.Sum)
    >>> hvd.synchronize(handle).asnumpy()
    array([2., 4.], dtype=float32)  # on rank 0; array([6.], dtype=float32) on rank 1
    """
    return COLLECTIVES.reducescatter_async(tensor, op, name, prescale_factor, postscale_factor, process_set)


@mxnet_errors
def grouped_reducescatter_async(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Starts `grouped_reducescatter`; `synchronize` gives a tuple of new arrays.

    >>> handle = hvd.grouped_reducescatter_async([mx.nd.ones(2), mx.nd.ones((4, 3))])
    >>> first, second = hvd.synchronize(handle)
    >>> second.shape
    (2, 3)
    """
    return COLLECTIVES.start_reducescatters(tensors, op, name, prescale_factor, postscale_factor, process_set)


@mxnet_errors
def poll(handle: Any) -> bool:
    """True when `synchronize(handle)` would return at once.

    >>> handle = hvd.allreduce_async(mx.nd.ones(2))
    >>> if not hvd.poll(handle):
    ...     pass  # do something else meanwhile
    >>> hvd.synchronize(handle).asnumpy()
    array([1., 1.], dtype=float32)

    Raises ValueError if `handle` is no handle, or one that was synchronized.
    """
    return handles.poll(handle)


@mxnet_errors
def synchronize(handle: Any) -> Any:
    """Waits for an operation and returns its result; None for an unknown handle or one that was synchronized before.

    >>> handle = hvd.allreduce_async(mx.nd.array([hvd.rank()]), op=hvd.Sum)
    >>> hvd.synchronize(handle).asnumpy()
    array([1.], dtype=float32)

    `handle` is what a function ..._async returned. Raises HorovodInternalError if the operation failed: a rank was
    lost, or the ranks do not agree on it.
    """
    return handles.synchronize(handle, MXNetFramework.current_stream)
