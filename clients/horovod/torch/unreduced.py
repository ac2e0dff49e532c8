"""Notices an optimizer that was never given to hvd.DistributedOptimizer, though hvd.init() was called.

Its ranks run no operation together, so only its steps show it. Each of these shows the contrary: a distributed
optimizer or the reducer of a Trainer in this process, torch.distributed, or tensors that go through Horovod meanwhile,
as in scripts that average gradients or weights by hand. A warning comes after some steps, if none of these was there.
The hook on all optimizers is removed when that is known.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from horovod.common.script import level_of_the_script
from horovod.torch.untraced import is_compiling
from horovod.worker.runtime.context import current, is_member

STEPS: Final = 100  # of one optimizer, before anything is said: scripts may average weights every so many steps


class Unreduced:
    """Of a process. `over` ends the watch: something in it reduces."""

    def __init__(self) -> None:
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)
        self._steps = 0
        self._optimizer: int | None = None  # id of the one whose steps are counted, the first that took one
        self._world: int | None = None
        self._bytes = 0  # that had gone through Horovod before these steps

    def over(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if is_compiling() or not is_member():
            return
        context = current()
        if context.world.size == 1 or context.settings.different_weights == "ignore":
            return
        if self._world != id(context):
            self._optimizer, self._world, self._steps = id(optimizer), id(context), 0
            self._bytes = context.engine.counters()["bytes"]
        if self._optimizer != id(optimizer):
            return
        self._steps += 1
        if self._steps < STEPS:
            return
        self.over()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return
        trained = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        few = context.engine.counters()["bytes"] - self._bytes < sum(one.nbytes for one in trained)
        if few and context.world.rank == 0:
            _warn(type(optimizer).__name__)


def _warn(kind: str) -> None:
    warnings.warn(
        f"{STEPS} steps of {kind} on this rank, and hvd.init() was called, but nothing reduces its gradients: no "
        "hvd.DistributedOptimizer was made, and fewer bytes than the parameters have went through Horovod. Each rank "
        "seems to train a model of its own. Write optimizer = hvd.DistributedOptimizer(optimizer, "
        "named_parameters=model.named_parameters()). If that is meant, set HOROVOD_DIFFERENT_WEIGHTS=ignore.",
        stacklevel=level_of_the_script(),
    )


watch: Final = Unreduced()
