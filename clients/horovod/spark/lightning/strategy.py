"""The strategy of an estimator's Trainer: that of horovod.lightning, on the device that the rank has been given."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from horovod.common import basics as hvd
from horovod.lightning import HorovodStrategy
from horovod.torch.compression import Compression


class EstimatorStrategy(HorovodStrategy):
    """`scale` is what the loss of the next batch is multiplied by (common/steps.py).

    package: "lightning" or "pytorch_lightning".
    """

    scale = 1.0

    def __init__(self, device: torch.device, compression: Any, package: str) -> None:
        super().__init__(compression=compression or Compression.none, package=package)
        self._device = device

    def set_world_ranks(self) -> None:
        """Spark says which GPU is whose, and not the number of the rank on its host."""
        rank_zero_only.rank = hvd.rank()

    @property
    def root_device(self) -> torch.device:
        return self._device

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.scale != 1.0:
            closure_loss = closure_loss * self.scale
        return super().backward(closure_loss, *args, **kwargs)
