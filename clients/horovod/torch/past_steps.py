"""Steps that a script takes past the distributed optimizer, which do not wait for the other ranks.

The optimizer that hvd.DistributedOptimizer was given has the same parameters and state, so its step() works, and so
does torch.optim.SGD.step(optimizer), or a wrapper or GradScaler that was given the original. With averages that
backward() has waited for, such a step is the same on all ranks; with anything else each rank would train a model of its
own. The two optimizers share their hooks, so one before each step sees all of them, but for steps that torch.compile
has compiled, in which no hook runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from horovod.base.errors import TrainingCode, coded
from horovod.torch.untraced import is_compiling
from horovod.worker.runtime.context import current, is_member


class _Guard:
    """A hook before each step. `check` is a method, whose object is not kept alive."""

    def __init__(self, check: Callable[[], None] | None) -> None:
        self._check = (lambda: None) if check is None else weakref.WeakMethod(check)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Guard, (None,)  # a copied optimizer that takes its hooks along gets a guard of its own

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        # Another distributed optimizer may have been made of the same one.
        if is_compiling() or getattr(optimizer, "_hvd_stepping", False):
            return None
        check = self._check()
        if check is None or not is_member() or current().settings.different_weights == "ignore":
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            check()
            return None

        def checked() -> Any:
            loss = closure()
            check()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked}
        return (args[0], checked, *args[2:]), kwargs


def guard(original: torch.optim.Optimizer, check: Callable[[], None]) -> None:
    """Calls `check` before each step of `original`, or after each call of its closure, as long as its object lives.

    check: a method. AssertionError: the step that begins now would not be the same on all ranks.
    """
    # The user's class does not call torch.optim.Optimizer.__init__, so the object has no hooks.
    if "_optimizer_step_pre_hooks" not in original.__dict__:
        return
    handle = original.register_step_pre_hook(_Guard(check))
    weakref.finalize(check.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]


def is_guard(hook: object) -> bool:
    return isinstance(hook, _Guard)


def not_reduced(why: str) -> AssertionError:
    return AssertionError(
        coded(
            TrainingCode.NOT_REDUCED,
            "A step was taken past the optimizer that hvd.DistributedOptimizer returned (with the original optimizer, "
            f"or as torch.optim.SGD.step(optimizer)), {why}, so each rank would train a model of its own. Call "
            "optimizer.step() of the distributed optimizer, and give that to GradScaler and other wrappers. If steps "
            "of each rank's own are meant, set HOROVOD_DIFFERENT_WEIGHTS=ignore.",
        )
    )
