"""The gradients of one optimizer: averages when `backward()` of a Trainer returns, whatever the model used.

The optimizer stays what it is. A Trainer wraps it in a class made of the optimizer's class, and asks its strategy at
each point where gradients have to be reduced: at the end of a backward pass, and before a step. So nothing is left
for a distributed optimizer to do, and checkpoints, schedulers and callbacks see the optimizer that the user has made.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from horovod.torch.closures import decides_by_loss, loss_of_all
from horovod.torch.optimizer import gradient_reducer
from horovod.torch.wrapping import Arguments


class Reduction:
    """A Trainer calls these methods from one thread, that of the backward passes or another."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, arguments: Arguments) -> None:
        """model: gives the parameters their names."""
        self._optimizer = optimizer
        self._model = model
        self._arguments = arguments
        self._reducer = gradient_reducer(optimizer, model.named_parameters(), arguments)
        self._known = _count(optimizer)
        self._is_reduced = False  # whether the gradients of the next step are averages

    def before_backward(self) -> None:
        """Parameters may have been added to the optimizer, as callbacks do that unfreeze some."""
        if not self._reducer.enabled or _count(self._optimizer) == self._known:
            return
        own = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        self._reducer.watch(pair for pair in self._model.named_parameters() if id(pair[1]) in own)
        self._known = _count(self._optimizer)

    def after_backward(self) -> None:
        """Waits for the averages, if the pass has made gradients of this optimizer, and was not `local`."""
        if self._reducer.has_made_any:
            self._synchronize()

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Backward passes add up gradients, and reduce none; the first one outside of this reduces the sum."""
        passes = self._reducer.passes
        self._reducer.set_passes(sys.maxsize)
        try:
            yield
        finally:
            self._reducer.set_passes(passes)

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure` of a step, after which the gradients are averages.

        They are as a rule. They are not where this rank alone had nothing to compute, so that the others wait for it.
        """

        def reduced() -> Any:
            loss = closure()
            if not self._is_reduced and self._reducer.enabled:
                self._synchronize()
            if decides_by_loss(self._optimizer) and self._reducer.enabled:
                return loss_of_all(loss, self._arguments, self._reducer.first_name())
            return loss

        return reduced

    def after_step(self) -> None:
        self._is_reduced = False
        self._reducer.steps += 1

    def close(self) -> None:
        """Reduces nothing any more."""
        self._reducer.close()

    def _synchronize(self) -> None:
        self._reducer.synchronize()
        self._is_reduced = True


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
