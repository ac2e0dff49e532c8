"""Notices an optimizer that was never made distributed, though hvd.init() was called, in any framework.

Its ranks run no operation together, so only its steps show it. Each of these shows the contrary: a distributed
optimizer or tape in this process, which may train another optimizer locally by intent; or tensors that go through
Horovod meanwhile, as in scripts that average gradients or weights by hand. A warning comes after some steps, if none of
these was there.

Each framework has its own hook that sees steps of plain optimizers. It adds them to a Steps, and goes away when `watch`
is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

from horovod.base.errors import TrainingCode, coded
from horovod.common.script import warn_the_script
from horovod.worker.runtime.context import Context, current, is_member

STEPS: Final = 100  # of one optimizer, before anything is said: scripts may average weights every so many steps
_FIRST: Final = 2  # calls that do not count: old scripts broadcast after their first step


class Watch:
    """Of a process."""

    def __init__(self) -> None:
        self.is_over = False

    def over(self) -> None:
        """Something in this process reduces gradients, or it was told that nothing does."""
        self.is_over = True


watch = Watch()


class Trained(NamedTuple):
    """What a plain optimizer trains."""

    optimizer: str  # its class
    nbytes: int  # of the parameters
    remedy: str  # a sentence


class Steps:
    """Those of a plain optimizer. trained: what it trains, or None if something else than Horovod reduces it."""

    def __init__(self, trained: Callable[[], Trained | None]) -> None:
        self._trained = trained
        self._world: weakref.ref[Context] | None = None  # in which these count
        self._calls = self._steps = 0
        self._bytes = 0  # that had gone through Horovod before these steps

    def add(self, steps: int = 1) -> None:
        """After a step, or several that a call has taken. Ends the watch when there are enough of them."""
        if watch.is_over or not is_member():
            return
        context = current()
        if context.world.size == 1 or context.settings.different_weights == "ignore":
            return
        if self._world is None or self._world() is not context:
            self._world, self._calls, self._steps = weakref.ref(context), 0, 0
        self._calls += 1
        if self._calls <= _FIRST:
            self._bytes = context.engine.counters()["bytes"]
            return
        self._steps += steps
        if self._steps < STEPS:
            return
        watch.over()
        trained = self._trained()
        if trained is None or context.engine.counters()["bytes"] - self._bytes >= trained.nbytes:
            return
        if context.world.rank == 0:
            _warn(trained, self._steps)


def _warn(trained: Trained, steps: int) -> None:
    sentence = (
        f"{steps} steps of {trained.optimizer} on this rank, and hvd.init() was called, but nothing reduces its "
        "gradients: nothing was made distributed in this process, and fewer bytes than the parameters have went "
        f"through Horovod. Each rank seems to train a model of its own. {trained.remedy} If that is meant, set "
        "HOROVOD_DIFFERENT_WEIGHTS=ignore."
    )
    warn_the_script(coded(TrainingCode.NOT_DISTRIBUTED, sentence))


# -- hooks -------------------------------------------------------------------------------------------------------------
_installers: Final[list[Callable[[], None]]] = []


def when_in_a_world(install: Callable[[], None]) -> None:
    """hvd.init() calls `install`, so that a program without it runs the framework as it is."""
    _installers.append(install)
    if is_member():
        world_begins()


def world_begins() -> None:
    """In a world that has, or may come to have, several ranks."""
    context = current()
    if watch.is_over or (context.world.size == 1 and not context.settings.may_grow):
        return
    for install in _installers:
        install()
