"""hvd.reducescatter and its asynchronous and grouped forms: each rank gets its rows of the reduction.

With n rows and s ranks, the first n % s ranks get n // s + 1 rows and the others n // s (possibly none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.basics import Average
from horovod.common.ops.compression import compressed, compressed_group
from horovod.common.ops.handles import AnyHandle
from horovod.common.ops.specs import gradient_name, scatter_gradient_factor
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.compression import Compression, Compressor
from horovod.torch.ops.allgather import allgather, grouped_allgather
from horovod.torch.ops.gradients import needs_gradient
from horovod.torch.tensors import COLLECTIVES


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of `tensor` over all ranks, as a new tensor. Differentiable.

    Note the order: the second argument is `name`, not `average`. Example, on ranks 0 and 1:

        >>> hvd.reducescatter(torch.arange(4.0), op=hvd.Sum)
        tensor([0., 2.])  # on rank 0; tensor([4., 6.]) on rank 1

    On a GPU the same holds for results as in `allgather`.
    """
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    if compression is Compression.none:
        return _differentiable(tensor, *arguments)
    return compressed(compression, tensor, _differentiable, *arguments)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Starts `reducescatter` and returns a handle; `synchronize(handle)` gives the new tensor. Not differentiable.

    Example, on ranks 0 and 1:

        >>> handle = hvd.reducescatter_async(torch.arange(3.0), op=hvd.Sum)
        >>> hvd.synchronize(handle)
        tensor([0., 2.])  # on rank 0; tensor([4.]) on rank 1
    """
    return COLLECTIVES.reducescatter_async(tensor, op, name, prescale_factor, postscale_factor, process_set)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors as one operation; a list of new tensors in the order given. Differentiable.

    Example, on ranks 0 and 1:

        >>> hvd.grouped_reducescatter([torch.arange(2.0), torch.ones(1)], op=hvd.Sum)
        [tensor([0.]), tensor([2.])]  # on rank 0; [tensor([2.]), tensor([])] on rank 1
    """
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    return compressed_group(compression, tensors, _grouped_differentiable, *arguments)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Starts `grouped_reducescatter`; `synchronize(handle)` gives a tuple of new tensors. Not differentiable.

    Example, on ranks 0 and 1:

        >>> handle = hvd.grouped_reducescatter_async([torch.arange(2.0)], op=hvd.Sum)
        >>> hvd.synchronize(handle)
        (tensor([0.]),)  # on rank 0; (tensor([2.]),) on rank 1
    """
    return COLLECTIVES.start_reducescatters(tensors, op, name, prescale_factor, postscale_factor, process_set)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return COLLECTIVES.reducescatter(tensor, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, name, _, _, process_set = ctx.arguments
        scaled = _scaled(gradients[0], *ctx.arguments)
        return allgather(scaled, gradient_name(name), process_set), None, None, None, None, None


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        return COLLECTIVES.wait(COLLECTIVES.start_reducescatters, tensors, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, name, _, _, process_set = ctx.arguments
        scaled = [_scaled(gradient, *ctx.arguments) for gradient in gradients]
        return None, *grouped_allgather(scaled, gradient_name(name), process_set)


def _scaled(
    gradient: torch.Tensor, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
) -> torch.Tensor:
    factor = scatter_gradient_factor(op, prescale, postscale, process_set)
    return gradient.contiguous() if factor == 1 else (gradient * factor).contiguous()


def _differentiable(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if needs_gradient(tensor):
        result: torch.Tensor = _Reducescatter.apply(tensor, *arguments)  # type: ignore[no-untyped-call]
        return result
    return COLLECTIVES.reducescatter(tensor, *arguments)


def _grouped_differentiable(tensors: Sequence[torch.Tensor], *arguments: Any) -> tuple[torch.Tensor, ...]:
    if needs_gradient(*tensors):
        result: tuple[torch.Tensor, ...] = _GroupedReducescatter.apply(arguments, *tensors)  # type: ignore[no-untyped-call]
        return result
    return COLLECTIVES.wait(COLLECTIVES.start_reducescatters, tensors, *arguments)
