"""Notices that all ranks train on the same data, which a forgotten DistributedSampler causes.

It needs no communication: when the average over the ranks equals what a rank computed itself, step after step, then all
ranks have computed the same, and all of them but one for nothing. The gradient of one parameter is compared in the
first steps. On a GPU that is only queued: the outcome goes to the host by itself, and a later step looks at it when it
is there.
"""

from __future__ import annotations

import warnings

import torch

from horovod.common.basics import rank, size
from horovod.common.script import level_of_the_script

STEPS = 3  # in a row, before anything is said
_MAX_ELEMENTS = 1 << 22  # of the gradient that is compared: a copy of it is made
_RTOL = 1e-5


class SameGradients:
    """`before` a gradient is reduced, `after` all are; `over` when there is nothing more to find out."""

    def __init__(self) -> None:
        self.over = False
        self._watched: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._steps = 0
        # On a GPU: whether all steps so far were the same; after the last one on its way to the host, until `_arrived`.
        self._outcome: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def before(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._arrived is not None or size() == 1:  # an elastic world may have lost all other ranks
            return
        # Of a matrix, because the gradient of a bias may say more about the loss than about the data.
        dense = gradient.layout is torch.strided
        if self._watched is None and dense and gradient.dim() >= 2 and 1 < gradient.numel() <= _MAX_ELEMENTS:
            self._watched = parameter
        if parameter is self._watched:
            self._own = gradient.detach().clone()

    def after(self) -> None:
        if self._arrived is not None:
            if self._arrived.query():  # type: ignore[no-untyped-call]
                self._end(bool(self._outcome))
            return
        own, self._own = self._own, None
        if self._watched is None or own is None:
            return  # nothing of it travelled in this step
        reduced = self._watched.grad
        self._steps += 1
        if reduced is None:
            self._end(False)
        elif own.is_cuda:
            self._compare_there(reduced, own)
        else:
            with torch.no_grad():
                same = bool(own.any()) and torch.allclose(reduced, own, rtol=_RTOL, atol=0.0)
            if not same or self._steps == STEPS:
                self._end(same)

    def _compare_there(self, reduced: torch.Tensor, own: torch.Tensor) -> None:
        """The same on a GPU, for which this thread does not wait: not even to end early."""
        with torch.no_grad():
            same = own.any() & torch.isclose(reduced, own, rtol=_RTOL, atol=0.0).all()
            self._outcome = same if self._outcome is None else self._outcome & same
            if self._steps == STEPS:
                self._outcome = self._outcome.to("cpu", non_blocking=True)  # to page-locked memory
                self._arrived = torch.cuda.current_stream(own.device).record_event()

    def _end(self, same: bool) -> None:
        self.over = True
        self._watched = None
        if same and rank() == 0:
            warnings.warn(
                f"In the first {STEPS} steps every rank computed the same gradients, so all of them seem to train on "
                "the same data. Give each rank its part, for example with DataLoader(sampler=DistributedSampler("
                "dataset, hvd.size(), hvd.rank())).",
                stacklevel=level_of_the_script(),
            )
