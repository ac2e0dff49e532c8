"""A torch.nn.Module with an optimizer and losses as a LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.spark.torch.losses import Losses
from horovod.spark.torch.remote import same_shapes


def lightning_module(
    pl: Any,
    model: torch.nn.Module,
    optimizer: Any,
    losses: Losses,
    features: Sequence[str],
    labels: Sequence[str],
    weight: str | None,
) -> Any:
    """Its batches are dicts of columns, and it logs train_loss and val_loss."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            return self.model(*inputs)

        def configure_optimizers(self) -> Any:
            return optimizer

        def _loss(self, batch: dict[str, Any]) -> Any:
            outputs, found = same_shapes(self(*(batch[name] for name in features)), [batch[name] for name in labels])
            return losses(outputs, found, batch[weight] if weight is not None else None)

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            loss = self._loss(batch)
            rows = len(batch[labels[0]])
            self.log("train_loss", loss.detach(), on_step=False, on_epoch=True, batch_size=rows, sync_dist=True)
            return loss

        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            rows = len(batch[labels[0]])
            self.log("val_loss", self._loss(batch), on_step=False, on_epoch=True, batch_size=rows, sync_dist=True)

    return Module()
