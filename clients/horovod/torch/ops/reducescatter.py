"""hvd.reducescatter and its asynchronous and grouped forms: each rank gets its rows of the reduction.

With n rows and s ranks, the first n % s ranks get n // s + 1 rows and the others n // s (possibly none).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horovod._core import Handle
from horovod.common.basics import Adasum, Average, Max, Min, Product, Sum
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.compression import Compression, Compressor
from horovod.torch.handles import AnyHandle
from horovod.torch.ops.allgather import allgather, grouped_allgather
from horovod.torch.ops.allreduce import gradient_name
from horovod.torch.ops.submit import (
    REDUCESCATTER,
    check_reduction,
    needs_gradient,
    run,
    set_id,
    set_size,
    start,
    start_parts,
)
from horovod.torch.tensors import adopt, by_dtype, check_one_device, check_tensor, in_place_span, named
from horovod.torch.undecided import UNDECIDED, before_waiting

_UNNAMED = "reducescatter.noname"
_UNNAMED_GROUP = "grouped_reducescatter.noname"


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

    What `allgather` says of results on a GPU holds here as well.

    Args:
        tensor: contiguous and dense, with at least one dimension, of the same shape and dtype on all ranks; integers
            of 8 to 64 bits, signed or not, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64 or (but
            for Average) bool.
        name: matches the call across ranks; without one, calls match by their order.
        compression: how the tensor travels, for example Compression.fp16.
        op: hvd.Average or hvd.Sum.
        process_set: the ranks that take part.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Raises:
        ValueError: a scalar or another tensor that can't be reduced, a name that is in flight already.
        NotImplementedError: hvd.Adasum.
        HorovodInternalError: another op, ranks that do not agree, or a lost rank.
    """
    small, context = compression.compress(tensor)
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    if needs_gradient(small):
        result: torch.Tensor = _Reducescatter.apply(small, *arguments)  # type: ignore[no-untyped-call]
    else:
        result = _plain(small, *arguments)
    return compression.decompress(result, context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Starts `reducescatter` and returns a handle; `synchronize(handle)` gives the new tensor. Not differentiable.

    `tensor` has a shape and dtype as for `reducescatter`, and must not be changed until then. Example, on ranks 0 and
    1:

        >>> handle = hvd.reducescatter_async(torch.arange(3.0), op=hvd.Sum)
        >>> hvd.synchronize(handle)
        tensor([0., 2.])  # on rank 0; tensor([4.]) on rank 1

    Raises what `reducescatter` does; what goes wrong after the start is raised by `synchronize`.
    """
    op = _checked(tensor, op, process_set)
    wire = _UNNAMED if name is None else "reducescatter." + name
    number = set_id(process_set, "Reducescatter")
    return start(
        tensor,
        REDUCESCATTER,
        wire,
        ((tensor, None),),
        op,
        prescale_factor,
        postscale_factor,
        0,
        None,
        number,
        lambda outputs: adopt(outputs[0]),
    )


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

    Each tensor has a shape and dtype as for `reducescatter`; they may differ within the list, which may be empty.
    Example, on ranks 0 and 1:

        >>> hvd.grouped_reducescatter([torch.arange(2.0), torch.ones(1)], op=hvd.Sum)
        [tensor([0.]), tensor([2.])]  # on rank 0; [tensor([2.]), tensor([])] on rank 1

    Raises what `reducescatter` does, and HorovodInternalError for tensors on several devices.
    """
    packed = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in packed]
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    if needs_gradient(*small):
        results = _GroupedReducescatter.apply(arguments, *small)  # type: ignore[no-untyped-call]
    else:
        if UNDECIDED:
            before_waiting()
        results = _start_group(small, op, name, prescale_factor, postscale_factor, process_set, True).result()
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Starts `grouped_reducescatter`; `synchronize(handle)` gives a tuple of new tensors. Not differentiable.

    Shapes and dtypes are those of `grouped_reducescatter`. Example, on ranks 0 and 1:

        >>> handle = hvd.grouped_reducescatter_async([torch.arange(2.0)], op=hvd.Sum)
        >>> hvd.synchronize(handle)
        (tensor([0.]),)  # on rank 0; (tensor([2.]),) on rank 1

    Raises what `grouped_reducescatter` does; what goes wrong after the start is raised by `synchronize`.
    """
    return _start_group(tensors, op, name, prescale_factor, postscale_factor, process_set)


def _checked(tensor: torch.Tensor, op: int, process_set: ProcessSet) -> int:
    check_tensor(tensor)
    if not tensor.shape:
        raise ValueError(
            "Reducescatter: the tensor is a scalar, which has no rows to scatter. Use hvd.allreduce, or give it a "
            "dimension with tensor.reshape(1)."
        )
    if op == Adasum:
        raise NotImplementedError("Reducescatter does not support op=hvd.Adasum. Use hvd.Average or hvd.Sum.")
    if op in (Min, Max, Product):
        raise HorovodInternalError("Reducescatter supports op=hvd.Average and op=hvd.Sum only.")
    return check_reduction(op, tensor, process_set, "Reducescatter")


def _plain(
    tensor: torch.Tensor, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
) -> torch.Tensor:
    op = _checked(tensor, op, process_set)
    wire = _UNNAMED if name is None else "reducescatter." + name
    number = set_id(process_set, "Reducescatter")
    outputs = run(tensor, REDUCESCATTER, wire, ((tensor, None),), op, prescale, postscale, 0, None, number)
    return adopt(outputs[0])


def _start_group(
    tensors: Iterable[torch.Tensor],
    op: int,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    wait_follows: bool = False,
) -> AnyHandle:
    tensors = tuple(tensors)
    check_one_device(tensors)
    codes = [_checked(tensor, op, process_set) for tensor in tensors]
    try:
        for tensor in tensors:
            in_place_span(tensor)  # refuses what can't travel before any part is on its way
    except ValueError as refusal:
        raise named(refusal, "grouped_reducescatter", name) from None
    number = set_id(process_set, "Reducescatter")

    def start_part(wire: str, indices: Sequence[int]) -> Handle:
        return start(
            tensors,
            REDUCESCATTER,
            wire,
            [(tensors[index], None) for index in indices],
            codes[indices[0]],
            prescale,
            postscale,
            0,
            None,
            number,
            lambda outputs: tuple(adopt(output) for output in outputs),
            wait_follows,
        )

    return start_parts(
        by_dtype(tensors), _UNNAMED_GROUP if name is None else "grouped_reducescatter." + name, start_part
    )


def _scaled(
    gradient: torch.Tensor, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> torch.Tensor:
    """What one rank's rows contribute to the gradient: Horovod averages losses, so Sum counts once for every rank."""
    factor = prescale * postscale * (set_size(process_set) if op == Sum else 1)
    return gradient.contiguous() if factor == 1 else (gradient * factor).contiguous()


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return _plain(tensor, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, name, prescale, postscale, process_set = ctx.arguments
        scaled = _scaled(gradients[0], op, prescale, postscale, process_set)
        return allgather(scaled, gradient_name(name), process_set), None, None, None, None, None


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        op, name, prescale, postscale, process_set = arguments
        if UNDECIDED:
            before_waiting()
        result: tuple[torch.Tensor, ...] = _start_group(
            tensors, op, name, prescale, postscale, process_set, True
        ).result()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, name, prescale, postscale, process_set = ctx.arguments
        scaled = [_scaled(gradient, op, prescale, postscale, process_set) for gradient in gradients]
        return None, *grouped_allgather(scaled, gradient_name(name), process_set)
