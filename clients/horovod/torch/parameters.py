"""broadcast_parameters: every rank starts from root's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common.broadcast_order import check_broadcast
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.handles import synchronize
from horovod.torch.ops.broadcast import broadcast_async_
from horovod.torch.tensors import device_obstacle


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites tensors in place with their values on rank `root_rank`.

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, hvd.rank())
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        >>> model.weight.item()
        1.0

    Args:
        params: `model.state_dict()` (sent in sorted key order), `model.named_parameters()`, or tensors in the same
            order on every rank; dense, of the dtypes of `broadcast`, of the same shapes and dtypes on all ranks.
        root_rank: the rank whose values count; a global rank of the process set.
        process_set: the ranks that take part.

    Raises:
        ValueError: params of another kind, an entry that is not a tensor or can't be sent (the message names it), a bad
            root or process set.
        HorovodInternalError: shapes or dtypes differ between ranks, or a rank was lost.
    """
    named = _named(params)
    check_broadcast("broadcast_parameters", (str(name) for name, _ in named), process_set)
    broadcast_tensors(named, root_rank, process_set)


def broadcast_tensors(
    named: Iterable[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Starts all broadcasts, then waits for all: they travel together."""
    pending = [broadcast_async_(tensor.detach(), root_rank, name, process_set) for name, tensor in named]
    for handle in pending:
        synchronize(handle)


def _named(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor, torch.nn.Module)):
        entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                f"invalid params of type: {type(params).__name__}. Pass a state_dict, model.named_parameters() or a "
                "list of tensors.",
            )
        )
    for name, tensor in entries:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                coded(
                    OperationCode.NOT_A_TENSOR,
                    f"broadcast_parameters: entry {name!r} is a {type(tensor).__name__}, not a tensor. "
                    "Send such values with hvd.broadcast_object.",
                )
            )
        if (obstacle := device_obstacle(tensor.device)) is not None:
            raise ValueError(
                coded(
                    OperationCode.UNSUPPORTED_DEVICE,
                    f"broadcast_parameters: entry {name!r} is on device {tensor.device}, {obstacle}",
                )
            )
    return entries
