"""hvd.alltoall: every rank sends a part of its rows to every rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.basics import Sum
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.handles import AnyHandle
from horovod.torch.ops.allreduce import gradient_name
from horovod.torch.ops.submit import ALLTOALL, needs_gradient, run, set_id, set_size, start
from horovod.torch.tensors import adopt, check_tensor

_UNNAMED = "alltoall.noname"


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends `splits[r]` rows of `tensor` to rank r of the set, and returns the rows received, ordered by their source.

    Without `splits` the rows are cut into equal parts and the result is the tensor alone; with it, the result is
    the pair `(output, received_splits)`, where received_splits[r] rows came from rank r. Rows beyond sum(splits) are
    not sent. Differentiable: the gradient travels back the way the rows came. Example, on ranks 0 and 1:

        >>> hvd.alltoall(torch.tensor([10, 11]) + 100 * hvd.rank())
        tensor([ 10, 110])  # on rank 0; tensor([ 11, 111]) on rank 1

    Args:
        tensor: contiguous and dense, of a shape in which all dimensions but the first agree across ranks;
            integers of 8 to 64 bits, signed or not, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32, float64
            or bool.
        splits: as many whole numbers as the set has members, or an int32 tensor of them.
        name: matches the call across ranks; without one, calls match by their order.
        process_set: the ranks that take part.

    Returns:
        The rows that this rank got, sum(received_splits) of them; with `splits` also received_splits, int32, on the
        device of `splits` if that is a tensor. What `allgather` says of results on a GPU holds here as well.

    Raises:
        ValueError: splits that do not fit, a tensor that can't be sent, a name that is in flight already.
        HorovodInternalError: the ranks do not agree, the tensor is a scalar, or a rank was lost.
    """
    if needs_gradient(tensor):
        output, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
        return output if splits is None else (output, received)
    output, counts = _exchange(tensor, splits, name, process_set)
    return output if splits is None else (output, _received(counts, splits))  # making a tensor costs more than the call


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `alltoall`; `synchronize(handle)` always gives `(output, received_splits)`. Not differentiable.

    `tensor` has a shape and dtype as for `alltoall`, and must not be changed until then. Example, on ranks 0 and 1:

        >>> handle = hvd.alltoall_async(torch.tensor([10, 11]), splits=[0, 2])
        >>> hvd.synchronize(handle)[1]
        tensor([0, 0], dtype=torch.int32)  # on rank 0; tensor([2, 2], dtype=torch.int32) on rank 1

    Raises:
        ValueError: as `alltoall`. HorovodInternalError is raised by `synchronize`.
    """
    number = set_id(process_set, "Alltoall")
    parts = _checked(tensor, splits, process_set)
    wire = _UNNAMED if name is None else "alltoall." + name
    return start(
        tensor,
        ALLTOALL,
        wire,
        ((tensor, None),),
        Sum,
        1.0,
        1.0,
        0,
        parts,
        number,
        lambda answer: (adopt(answer[0][0]), _received(answer[1], splits)),
    )


def _checked(
    tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, process_set: ProcessSet
) -> list[int] | None:
    check_tensor(tensor)
    shape = tensor.shape
    size = set_size(process_set)
    if not shape:
        return None  # the ranks are told together that a scalar has no rows
    if splits is None:
        if shape[0] % size:
            raise ValueError(
                f"Alltoall: the first dimension of the tensor ({shape[0]}) is not divisible by the number of ranks "
                f"({size}). Pass splits to send unequal parts."
            )
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError(
                f"Alltoall: splits must be a one-dimensional tensor of torch.int32, not {splits.dim()}-dimensional "
                f"of {splits.dtype}."
            )
        parts = splits.cpu().tolist()
    else:
        try:
            parts = [operator.index(part) for part in splits]
        except TypeError:
            raise ValueError(f"Alltoall: splits must be whole numbers, not {splits!r}.") from None
    if len(parts) != size:
        raise ValueError(f"Alltoall: splits has {len(parts)} entries, but {size} ranks take part.")
    if min(parts) < 0:
        raise ValueError(f"Alltoall: splits must not be negative, but they are {parts}.")
    if sum(parts) > shape[0]:
        raise ValueError(
            f"Alltoall: splits sum to {sum(parts)}, which is more than the first dimension of the tensor ({shape[0]})."
        )
    return parts


def _exchange(
    tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, list[int]]:
    number = set_id(process_set, "Alltoall")
    parts = _checked(tensor, splits, process_set)
    wire = _UNNAMED if name is None else "alltoall." + name
    outputs, received = run(tensor, ALLTOALL, wire, ((tensor, None),), Sum, 1.0, 1.0, 0, parts, number)
    return adopt(outputs[0]), received


def _received(counts: list[int], splits: Sequence[int] | torch.Tensor | None) -> torch.Tensor:
    """received_splits, on the device of `splits`."""
    received = torch.tensor(counts, dtype=torch.int32, device="cpu")
    if isinstance(splits, torch.Tensor) and not splits.is_cpu:
        return splits.new_empty(len(counts)).copy_(received)
    return received


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: Sequence[int] | torch.Tensor | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, counts = _exchange(tensor, splits, name, process_set)
        received = _received(counts, splits)
        ctx.mark_non_differentiable(received)
        ctx.arguments = (tensor.shape[0], counts, name, process_set)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows, counts, name, process_set = ctx.arguments
        returned = alltoall(gradients[0].contiguous(), counts, gradient_name(name), process_set)[0]
        unsent = rows - returned.shape[0]
        if unsent:
            returned = torch.cat([returned, returned.new_zeros((unsent, *returned.shape[1:]))])
        return returned, None, None, None
