"""Notices an optimizer that was never made distributed, though hvd.init() was called, in any framework.

Its ranks run no operation together, so only its steps show it. Each of these shows the contrary: a distributed
optimizer or tape in this process, which may train another optimizer locally by intent; or tensors that go through
Horovod meanwhile, as in scripts that average gradients or weights by hand. A warning comes after some steps, if none of
these was there.

Each framework has its own hook that sees steps of plain optimizers. It adds them to a Steps, and goes away when `watch`
is over.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NamedTuple

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
        while _when_over:
            _when_over.pop()()


_when_over: Final[list[Callable[[], None]]] = []  # take hooks away


watch = Watch()


def are_counted() -> bool:
    """Whether steps are."""
    if watch.is_over or not is_member():
        return False
    context = current()
    return context.world.size > 1 and context.settings.different_weights != "ignore"


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
        if not are_counted():
            return
        context = current()
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
        f"{trained.optimizer} has taken {steps} steps on this rank after hvd.init(), but nothing reduces its "
        "gradients: no optimizer was made distributed in this process, and Horovod has sent fewer bytes than the "
        f"parameters have. Each rank seems to train its own model. {trained.remedy} If that is meant, set "
        "HOROVOD_DIFFERENT_WEIGHTS=ignore."
    )
    warn_the_script(coded(TrainingCode.NOT_DISTRIBUTED, sentence))


_of_optimizers: Final[weakref.WeakKeyDictionary[Any, Steps]] = weakref.WeakKeyDictionary()


def steps_of(optimizer: Any, trained: Callable[[], Trained | None]) -> Steps:
    """Those of this optimizer. trained: is called in the first one."""
    steps = _of_optimizers.get(optimizer)
    if steps is None:
        found = trained()
        _of_optimizers[optimizer] = steps = Steps(lambda: found)
    return steps


def least_bytes(gradients: Sequence[Any], shapes: Sequence[Sequence[int | None]]) -> int:
    """What a reduction of these gradients sends at least: a byte for each number, and one row of a sparse gradient.

    shapes: of the variables; None is a length that is not known.
    """
    least = 0
    for gradient, shape in zip(gradients, shapes, strict=False):
        if gradient is not None:
            lengths = list(shape)[1:] if hasattr(gradient, "indices") else list(shape)
            least += math.prod(1 if length is None else int(length) for length in lengths)
    return least


# -- hooks -------------------------------------------------------------------------------------------------------------
class _Hook(NamedTuple):
    install: Callable[[], None]
    packages: tuple[str, ...]  # whose import calls it again


_hooks: Final[list[_Hook]] = []
_MARK: Final = "_hvd_shows_steps"


def when_in_a_world(install: Callable[[], None], *packages: str) -> None:
    """hvd.init() calls `install`, so that a program without it runs the framework as it is.

    packages: `install` looks for these among those that are imported, and is called again if they are imported later.
    """
    _hooks.append(_Hook(install, packages))
    if is_member():
        world_begins()


def world_begins() -> None:
    """In a world that has, or may come to have, several ranks."""
    context = current()
    alone = context.world.size == 1 and not context.settings.may_grow
    if watch.is_over or alone or context.settings.different_weights == "ignore":
        return
    for hook in _hooks:
        hook.install()
        _later.add(hook)


def until_over(restore: Callable[[], None]) -> None:
    """`restore` is called when the watch is over, to take a hook away."""
    _when_over.append(restore)


def replace(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Calls around(original, *args, **kwargs) for a function of a module or a class, until the watch is over.

    Modules that have imported the function by its name (from optax import apply_updates) get the other one too.
    """
    owners = [next(one for one in getattr(owner, "__mro__", (owner,)) if name in vars(one))]
    original = getattr(owners[0], name)
    if hasattr(original, _MARK):
        return
    if isinstance(owner, ModuleType):
        modules = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
        owners = [one for one in modules if vars(one).get(name) is original]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if watch.is_over else around(original, *args, **kwargs)

    def restore() -> None:
        for one in owners:
            if getattr(one, name) is call:
                setattr(one, name, original)

    setattr(call, _MARK, True)
    for one in owners:
        setattr(one, name, call)
    until_over(restore)


class _Later(MetaPathFinder):
    """Finds packages as Python does, and calls hooks when they have been imported."""

    def __init__(self) -> None:
        self._hooks: dict[str, set[Callable[[], None]]] = {}

    def add(self, hook: _Hook) -> None:
        for package in hook.packages:
            if package not in sys.modules:
                self._hooks.setdefault(package, set()).add(hook.install)
        if self._hooks and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            until_over(self._leave)

    def _leave(self) -> None:
        self._hooks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._hooks:
            return None
        finders = (one.find_spec(fullname, path, target) for one in list(sys.meta_path) if one is not self)
        found = next((spec for spec in finders if spec is not None), None)
        if found is not None and hasattr(found.loader, "exec_module"):
            self._call_after(found.loader, fullname)
        return found

    def _call_after(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:
                for hook in self._hooks.pop(name, ()):
                    hook()

        loader.exec_module = exec_module


_later: Final = _Later()
