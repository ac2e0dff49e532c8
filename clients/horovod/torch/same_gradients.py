"""Notices that all ranks train on the same data, which a forgotten DistributedSampler causes.

It needs no communication: when the average over the ranks equals what a rank computed itself, step after step, then all
ranks have computed the same, and all of them but one for nothing. The gradient of one parameter is compared in the
first steps.
"""

from __future__ import annotations

import warnings

import torch

from horovod.common.basics import rank

STEPS = 3  # in a row, before anything is said
_MAX_ELEMENTS = 1 << 22  # of the gradient that is compared: a copy of it is made


class SameGradients:
    """`before` a gradient is reduced, `after` all are; `over` when there is nothing more to find out."""

    def __init__(self) -> None:
        self.over = False
        self._watched: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._equal = 0

    def before(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        # Of a matrix, because the gradient of a bias may say more about the loss than about the data.
        dense = gradient.layout is torch.strided
        if self._watched is None and dense and gradient.dim() >= 2 and 1 < gradient.numel() <= _MAX_ELEMENTS:
            self._watched = parameter
        if parameter is self._watched:
            self._own = gradient.detach().clone()

    def after(self) -> None:
        own, self._own = self._own, None
        if self._watched is None or own is None:
            return  # nothing of it travelled in this step
        reduced = self._watched.grad
        with torch.no_grad():
            same = reduced is not None and bool(own.any()) and torch.allclose(reduced, own, rtol=1e-5, atol=0.0)
        self._equal += same
        if not same or self._equal == STEPS:
            self.over = True
            self._watched = None
        if same and self.over and rank() == 0:
            warnings.warn(
                f"In the first {STEPS} steps every rank computed the same gradients, so all of them seem to train on "
                "the same data. Give each rank its part, for example with DataLoader(sampler=DistributedSampler("
                "dataset, hvd.size(), hvd.rank())).",
                stacklevel=4,
            )
