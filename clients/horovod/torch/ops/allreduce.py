"""hvd.allreduce and its asynchronous, in-place and grouped forms.

    result = postscale_factor * REDUCE(prescale_factor * tensor)      element by element over the ranks

REDUCE is `op`: Average (the default; the sum divided by the number of ranks), Sum, Min, Max or Product. For integers
each multiplication by a factor is done in double precision and truncated toward zero, and Sum wraps around. Average of
integers is exact: no sum is too large, and the quotient is truncated toward zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.basics import Average, Sum
from horovod.common.ops.collectives import AVERAGE_OF_ALL, SUM_OF_ALL
from horovod.common.ops.compression import compressed, compressed_group
from horovod.common.ops.framework import Indirect
from horovod.common.ops.handles import AnyHandle
from horovod.common.ops.specs import gradient_name, reduce_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.compression import Compression, Compressor
from horovod.torch.ops.gradients import needs_gradient
from horovod.torch.tensors import COLLECTIVES, READER
from horovod.worker.runtime.context import current


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of `tensor` over all ranks, as a new tensor of the same shape and dtype. Differentiable.

    Every rank of `process_set` must call it with the same shape, dtype and op. Its gradient is the same allreduce of
    the gradient. Example, on ranks 0 and 1:

        >>> hvd.allreduce(torch.tensor([1.0, hvd.rank()]))
        tensor([1.0000, 0.5000])
    """
    op = reduce_op(op, average)
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    if compression is Compression.none:
        return differentiable(tensor, *arguments)
    return compressed(compression, tensor, differentiable, *arguments)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `allreduce` and returns a handle; `synchronize(handle)` gives the new tensor. Not differentiable.

    Example, on two ranks:

        >>> handle = hvd.allreduce_async(torch.ones(3), name="loss", op=hvd.Sum)
        >>> hvd.synchronize(handle)
        tensor([2., 2., 2.])
    """
    op = reduce_op(op, average)
    return COLLECTIVES.allreduce_async(tensor, op, name, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`allreduce` into `tensor` itself, which is returned. The fastest form; not differentiable.

    Example, on two ranks:

        >>> counts = torch.tensor([1, hvd.rank()])
        >>> hvd.allreduce_(counts, op=hvd.Sum)
        tensor([2, 1])
        >>> counts
        tensor([2, 1])
    """
    if average is not None:
        op = reduce_op(op, average)
    elif op is None:
        op = Average
    usual = process_set is global_process_set and prescale_factor == 1.0 and postscale_factor == 1.0
    if usual and (op == Average or op == Sum):  # noqa: SIM109  (a tuple takes longer)
        # What Collectives.allreduce_ does then, without the calls, which a small tensor notices.
        made = SUM_OF_ALL if op == Sum else AVERAGE_OF_ALL
        wire = "allreduce.noname" if name is None else "allreduce." + name
        try:
            current().engine.run(made, wire, (tensor,), tensor, READER)
        except Indirect:
            pass
        else:
            return tensor
    return COLLECTIVES.allreduce_(tensor, op, name, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `allreduce_` and returns a handle; `synchronize(handle)` gives `tensor` with the result in it.

    Example, on two ranks:

        >>> tensor = torch.ones(2)
        >>> handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
        >>> hvd.synchronize(handle) is tensor
        True
    """
    op = reduce_op(op, average)
    return COLLECTIVES.allreduce_async_(tensor, op, name, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors as one operation: none is reduced before all are ready on all ranks.

    Returns a list of new tensors in the order given. Differentiable. Example, on ranks 0 and 1:

        >>> hvd.grouped_allreduce([torch.ones(2), torch.tensor(hvd.rank())], op=hvd.Sum)
        [tensor([2., 2.]), tensor(1)]
    """
    op = reduce_op(op, average)
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    return compressed_group(compression, tensors, _grouped_differentiable, *arguments)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `grouped_allreduce` and returns a handle; `synchronize(handle)` gives a tuple of new tensors.

    Not differentiable. Example, on two ranks:

        >>> handle = hvd.grouped_allreduce_async([torch.ones(2), torch.ones(1)], op=hvd.Sum)
        >>> hvd.synchronize(handle)
        (tensor([2., 2.]), tensor([2.]))
    """
    op = reduce_op(op, average)
    return COLLECTIVES.start_allreduces(tensors, False, op, name, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """`grouped_allreduce` into the tensors themselves, which are returned as a tuple. Not differentiable.

    Example, on two ranks:

        >>> gradients = [torch.ones(2), torch.ones(1)]
        >>> _ = hvd.grouped_allreduce_(gradients, op=hvd.Sum)
        >>> gradients
        [tensor([2., 2.]), tensor([2.])]
    """
    op = reduce_op(op, average)
    arguments = (tensors, True, op, name, prescale_factor, postscale_factor, process_set)
    return COLLECTIVES.wait(COLLECTIVES.start_allreduces, *arguments)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `grouped_allreduce_` and returns a handle; `synchronize(handle)` gives the tuple of `tensors`.

    Example, on two ranks:

        >>> gradients = [torch.ones(2), torch.ones(1)]
        >>> handle = hvd.grouped_allreduce_async_(gradients, op=hvd.Sum)
        >>> hvd.synchronize(handle)[0] is gradients[0]
        True
    """
    op = reduce_op(op, average)
    return COLLECTIVES.start_allreduces(tensors, True, op, name, prescale_factor, postscale_factor, process_set)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return COLLECTIVES.allreduce(tensor, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, name, *rest = ctx.arguments
        return differentiable(gradients[0].contiguous(), op, gradient_name(name), *rest), None, None, None, None, None


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        return COLLECTIVES.wait(COLLECTIVES.start_allreduces, tensors, False, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, name, *rest = ctx.arguments
        return None, *_grouped_differentiable([g.contiguous() for g in gradients], op, gradient_name(name), *rest)


def differentiable(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Collectives.allreduce, with a gradient where autograd asks for one."""
    if needs_gradient(tensor):
        result: torch.Tensor = _Allreduce.apply(tensor, *arguments)  # type: ignore[no-untyped-call]
        return result
    return COLLECTIVES.allreduce(tensor, *arguments)


def _grouped_differentiable(tensors: Sequence[torch.Tensor], *arguments: Any) -> tuple[torch.Tensor, ...]:
    if needs_gradient(*tensors):
        result: tuple[torch.Tensor, ...] = _GroupedAllreduce.apply(arguments, *tensors)  # type: ignore[no-untyped-call]
        return result
    return COLLECTIVES.wait(COLLECTIVES.start_allreduces, tensors, False, *arguments)
