"""hvd.allgather and its asynchronous and grouped forms: the rows of all ranks, one after the other in rank order.

Ranks may contribute different numbers of rows (also none); all other dimensions must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.basics import Average
from horovod.common.ops.handles import AnyHandle
from horovod.common.ops.specs import gradient_name, position
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops.allreduce import differentiable as reduce_differentiable
from horovod.torch.ops.gradients import needs_gradient
from horovod.torch.tensors import COLLECTIVES


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The concatenation of every rank's `tensor` along the first dimension, in rank order. Differentiable.

    The gradient is the average over the ranks of the result's gradient, cut to this rank's rows. Example, on ranks 0
    and 1:

        >>> hvd.allgather(torch.full((hvd.rank() + 1, 2), hvd.rank()))
        tensor([[0, 0],
                [1, 1],
                [1, 1]])

    On a GPU the result is memory of Horovod's own, not of PyTorch's allocator, for the stream that is current when it
    is handed over. `record_stream` does not know it: to use the result on another stream, `clone()` it, or let that
    stream wait for this one first (`other.wait_stream(current)`) and this one for that before the last reference goes.
    """
    if needs_gradient(tensor):
        result: torch.Tensor = _Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
        return result
    return COLLECTIVES.allgather(tensor, name, process_set)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Starts `allgather` and returns a handle; `synchronize(handle)` gives the new tensor. Not differentiable.

    Example, on ranks 0 and 1:

        >>> handle = hvd.allgather_async(torch.tensor([hvd.rank()]))
        >>> hvd.synchronize(handle)
        tensor([0, 1])
    """
    return COLLECTIVES.allgather_async(tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """`allgather` of several tensors as one operation; a tuple of new tensors in the order given. Differentiable.

    Example, on ranks 0 and 1:

        >>> hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.ones(hvd.rank())])
        (tensor([0, 1]), tensor([1.]))
    """
    tensors = tuple(tensors)
    if needs_gradient(*tensors):
        result: tuple[torch.Tensor, ...] = _GroupedAllgather.apply(name, process_set, *tensors)  # type: ignore[no-untyped-call]
        return result
    return COLLECTIVES.wait(COLLECTIVES.start_allgathers, tensors, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Starts `grouped_allgather` and returns a handle; `synchronize(handle)` gives a tuple of new tensors.

    Not differentiable. Example, on ranks 0 and 1:

        >>> handle = hvd.grouped_allgather_async([torch.tensor([hvd.rank()])])
        >>> hvd.synchronize(handle)
        (tensor([0, 1]),)
    """
    return COLLECTIVES.start_allgathers(tensors, name, process_set)


def _own_rows(gradient: torch.Tensor, rows: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """The backward pass: the average of the gradient over the ranks, cut to the rows that this rank contributed."""
    name = gradient_name(name)
    reduced = reduce_differentiable(gradient.contiguous(), Average, name, 1.0, 1.0, process_set)
    counts = COLLECTIVES.allgather(torch.tensor([rows]), None if name is None else name + ".rows", process_set)
    first = int(counts[: position(process_set)].sum())
    return reduced[first : first + rows]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        result = COLLECTIVES.allgather(tensor, name, process_set)
        ctx.arguments = (tensor.shape[0], name, process_set)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _own_rows(gradients[0], *ctx.arguments), None, None


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = COLLECTIVES.wait(COLLECTIVES.start_allgathers, tensors, name, process_set)
        ctx.arguments = ([tensor.shape[0] for tensor in tensors], name, process_set)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows, name, process_set = ctx.arguments
        return (
            None,
            None,
            *(
                _own_rows(gradient, count, None if name is None else f"{name}.{index}", process_set)
                for index, (gradient, count) in enumerate(zip(gradients, rows, strict=True))
            ),
        )
