"""Trainer(sync_batchnorm=True): batch normalization over the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.torch.sync_batch_norm import SyncBatchNorm


def synchronize_batch_norms(model: torch.nn.Module) -> None:
    """Replaces each batch normalization inside of `model` by a hvd.SyncBatchNorm of the same tensors."""
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
            setattr(model, name, _synchronized(child))
        else:
            synchronize_batch_norms(child)


def _synchronized(layer: _BatchNorm) -> SyncBatchNorm:
    made = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
    )
    # The tensors themselves and no copies: an optimizer may have them already.
    made._parameters = layer._parameters
    made._buffers = layer._buffers
    return made.train(layer.training)
