"""hvd.alltoall: every rank sends a part of its rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.base.errors import OperationCode, coded
from horovod.common.ops.handles import AnyHandle
from horovod.common.ops.specs import gradient_name
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops.gradients import needs_gradient
from horovod.torch.tensors import COLLECTIVES


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends `splits[r]` rows of `tensor` to rank r of the set, and returns the rows received, ordered by their source.

    Without `splits` the rows are cut into equal parts and the result is the tensor alone; with it, the result is the
    pair `(output, received_splits)`, where received_splits[r] rows came from rank r. Rows beyond sum(splits) are not
    sent. Differentiable: the gradient travels back the way the rows came. Example, on ranks 0 and 1:

        >>> hvd.alltoall(torch.tensor([10, 11]) + 100 * hvd.rank())
        tensor([ 10, 110])  # on rank 0; tensor([ 11, 111]) on rank 1

    Returns:
        The rows that this rank got, sum(received_splits) of them; with `splits` also received_splits, int32, on the
        device of `splits` if that is a tensor. On a GPU the same holds for results as in `allgather`.
    """
    if needs_gradient(tensor):
        output, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
        return output if splits is None else (output, received)
    numbers = None if splits is None else _numbers(splits)
    output, counts = COLLECTIVES.alltoall(tensor, numbers, name, process_set)
    return output if splits is None else (output, _received(counts, splits))  # making a tensor costs more than the call


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Starts `alltoall`; `synchronize(handle)` always gives `(output, received_splits)`. Not differentiable.

    Example, on ranks 0 and 1:

        >>> handle = hvd.alltoall_async(torch.tensor([10, 11]), splits=[0, 2])
        >>> hvd.synchronize(handle)[1]
        tensor([0, 0], dtype=torch.int32)  # on rank 0; tensor([2, 2], dtype=torch.int32) on rank 1
    """
    return COLLECTIVES.alltoall_async(
        tensor, _numbers(splits), name, process_set, lambda counts: _received(counts, splits)
    )


def _numbers(splits: Sequence[int] | torch.Tensor | None) -> Sequence[int] | None:
    if not isinstance(splits, torch.Tensor):
        return splits
    if splits.dtype != torch.int32 or splits.dim() != 1:
        raise ValueError(
            coded(
                OperationCode.WRONG_SPLITS,
                f"Alltoall: splits must be a one-dimensional tensor of torch.int32, not {splits.dim()}-dimensional "
                f"of {splits.dtype}.",
            )
        )
    numbers: list[int] = splits.cpu().tolist()
    return numbers


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
        output, counts = COLLECTIVES.alltoall(tensor, _numbers(splits), name, process_set)
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
