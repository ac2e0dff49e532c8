"""hvd.broadcast and its asynchronous and in-place forms: root's values on every rank.

The engine always broadcasts in place; the forms that return a new tensor give it a copy (on the root) or fresh memory.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common.basics import Average
from horovod.common.ops.handles import AnyHandle
from horovod.common.ops.specs import gradient_name
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops.allreduce import differentiable as reduce_differentiable
from horovod.torch.ops.gradients import needs_gradient
from horovod.torch.tensors import COLLECTIVES
from horovod.worker.runtime.context import current


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor with the values that `tensor` has on rank `root_rank`. Differentiable.

    The gradient is the average over the ranks on the root, zeros elsewhere. Example, on ranks 0 and 1:

        >>> hvd.broadcast(torch.tensor(hvd.rank()), root_rank=1)
        tensor(1)
    """
    if needs_gradient(tensor):
        result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
        return result
    return COLLECTIVES.broadcast(tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Starts `broadcast` and returns a handle; `synchronize(handle)` gives the new tensor. Not differentiable.

    Example, on ranks 0 and 1:

        >>> handle = hvd.broadcast_async(torch.tensor([hvd.rank()]), root_rank=1)
        >>> hvd.synchronize(handle)
        tensor([1])
    """
    return COLLECTIVES.broadcast_async(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """`broadcast` into `tensor` itself, which is returned. Not differentiable.

    Example, on ranks 0 and 1:

        >>> tensor = torch.tensor([hvd.rank()])
        >>> hvd.broadcast_(tensor, root_rank=1) is tensor
        True
        >>> tensor
        tensor([1])
    """
    return COLLECTIVES.broadcast_(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Starts `broadcast_` and returns a handle; `synchronize(handle)` gives `tensor` with root's values in it.

    Example, on ranks 0 and 1:

        >>> tensor = torch.tensor([hvd.rank()])
        >>> handle = hvd.broadcast_async_(tensor, root_rank=1)
        >>> hvd.synchronize(handle) is tensor
        True
    """
    return COLLECTIVES.broadcast_async_(tensor, root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.arguments = (root_rank, name, process_set)
        return COLLECTIVES.broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        root_rank, name, process_set = ctx.arguments
        reduced = reduce_differentiable(gradients[0].contiguous(), Average, gradient_name(name), 1.0, 1.0, process_set)
        if current().world.rank != root_rank:
            # Zeros that stay part of the graph, so that a double backward meets the root's.
            reduced = reduced.masked_fill(reduced.new_ones((), dtype=torch.bool), 0)
        return reduced, None, None, None
