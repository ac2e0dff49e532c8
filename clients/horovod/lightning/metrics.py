"""Metrics of torchmetrics, which by themselves gather over torch.distributed, and do nothing where that is not used."""

from __future__ import annotations

from typing import Any

import torch

from horovod.common import basics as hvd
from horovod.common.ops.objects import allgather_object
from horovod.torch.ops import allgather


def gather_over_ranks(model: torch.nn.Module) -> None:
    """The metrics in `model` compute over all ranks, but for those that were told how to gather."""
    from torchmetrics import Metric
    from torchmetrics.metric import jit_distributed_available

    for metric in model.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            if metric.distributed_available_fn is jit_distributed_available:
                metric.distributed_available_fn = _are_many
            metric.dist_sync_fn = gather_all


def gather_all(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, whose shapes may differ."""
    shapes = allgather_object(tuple(tensor.shape), "torchmetrics.shapes")
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split(allgather(tensor.reshape(-1), "torchmetrics.states"), sizes)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _are_many() -> bool:
    return hvd.is_initialized() and hvd.size() > 1
