"""Notices an optimizer of PyTorch that was never given to hvd.DistributedOptimizer (common/unreduced.py)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from horovod.common import unreduced
from horovod.common.unreduced import Steps, Trained
from horovod.torch.internals import is_compiling
from horovod.worker.runtime.context import is_member


class Unreduced:
    """Of a process. `over` ends the watch: something in it reduces."""

    def __init__(self) -> None:
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)
        self._optimizer: Callable[[], Any] = lambda: None  # whose steps are counted: the first that took one
        self._steps: Any = None

    def over(self) -> None:
        unreduced.watch.over()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if is_compiling() or not is_member():
            return
        counted = self._optimizer()
        if counted is None:
            self._optimizer = reference = weakref.ref(optimizer)
            self._steps = Steps(lambda: _trained(reference()))
        if counted is None or counted is optimizer:
            self._steps.add()
        if unreduced.watch.is_over:
            self.over()


def _trained(optimizer: torch.optim.Optimizer | None) -> Trained | None:
    if optimizer is None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    return Trained(
        type(optimizer).__name__,
        sum(one.nbytes // len(one) if one.grad.is_sparse else one.nbytes for one in parameters),  # one row of these
        "Write optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()).",
    )


watch: Final = Unreduced()
