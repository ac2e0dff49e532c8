"""LightningModules: which of the two packages they are of, whose classes exist once for each, and one that is made of a
torch.nn.Module with an optimizer and losses (the name of this module is that of earlier releases, where it had these).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

import torch
from packaging.version import Version

from horovod.base.errors import DataCode, coded
from horovod.spark.torch.ranks import Losses, same_shapes

_PACKAGES: Final = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
MIN_PL_VERSION: Final = "2.0"  # the least release of either package


def package_of(model: Any) -> str | None:
    """The module that has the Trainer for a LightningModule; None for other objects."""
    for cls in type(model).__mro__:
        name = _PACKAGES.get(cls.__module__.partition(".")[0])
        if cls.__name__ == "LightningModule" and name is not None:
            return name
    return None


def import_lightning(name: str | None = None) -> Any:
    """The module, or the first one that is installed. RuntimeError for a Lightning that is too old."""
    for package in [name] if name is not None else _PACKAGES.values():
        try:
            pl = importlib.import_module(package)
        except ModuleNotFoundError:
            continue
        if Version(pl.__version__) < Version(MIN_PL_VERSION):
            sentence = (
                f"{package} {pl.__version__} is too old for the lightning TorchEstimator, which needs {MIN_PL_VERSION}."
            )
            raise RuntimeError(coded(DataCode.MISSING_DATA_PACKAGE, sentence))
        return pl
    sentence = f"{name or 'Lightning'} is not installed. Install it with: pip install 'horovod[lightning]'"
    raise ImportError(coded(DataCode.MISSING_DATA_PACKAGE, sentence))


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
