"""The collectives on torch tensors, one module for each."""

from horovod.common.ops.faces import TORCH, complete
from horovod.torch.ops.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from horovod.torch.ops.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from horovod.torch.ops.alltoall import alltoall, alltoall_async
from horovod.torch.ops.barrier import barrier
from horovod.torch.ops.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from horovod.torch.ops.join import join
from horovod.torch.ops.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch.ops.sparse import sparse_allreduce_async

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]

complete(TORCH, globals())
