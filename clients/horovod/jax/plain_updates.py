"""Updates of Optax that nothing reduces, though hvd.init() was called (common/unreduced.py).

Optax has no classes, but loops end their steps with optax.apply_updates, which hvd.init() replaces. A step that is
traced runs no Python. So when updates are applied in a trace, JAX is asked to tell of each call of a compiled function
(the hook by which it looks for NaNs); calls of those that were traced then are steps, or as many steps as the loops
around them (lax.scan, fori_loop) have passes. Nothing is added to a program.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from types import CodeType, FrameType
from typing import Any, Final

import jax
from jax._src import api

from horovod.common import unreduced
from horovod.common.unreduced import Steps, Trained, least_bytes

_LOOPS: Final = "jax._src.lax.control_flow.loops"  # the module of lax.scan, which lax.fori_loop calls
_REMEDY: Final = "Write optimizer = hvd.DistributedOptimizer(optimizer), or use hvd.value_and_grad."


def stepped(steps: Steps, tree: Any) -> None:
    """After updates of this tree were applied, or while that is traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        _traced(steps)
    else:
        steps.add()


# -- Optax -------------------------------------------------------------------------------------------------------------
_of_places: Final[dict[tuple[CodeType, int], Steps]] = {}  # by the line that applies updates


def _apply_updates(original: Any, params: Any, updates: Any) -> Any:
    result = original(params, updates)
    stepped(_steps_at(sys._getframe(2), updates), updates)
    return result


def _steps_at(frame: Any, updates: Any) -> Steps:
    place = (frame.f_code, frame.f_lineno)
    if place not in _of_places:
        leaves = jax.tree.leaves(updates)
        nbytes = least_bytes(leaves, [jax.numpy.shape(leaf) for leaf in leaves])
        _of_places[place] = Steps(lambda: _trained(nbytes))
    return _of_places[place]


def _trained(nbytes: int) -> Trained | None:
    if jax.distributed.is_initialized():
        return None  # JAX's own processes, which compute together
    return Trained("optax.apply_updates", nbytes, _REMEDY)


# -- compiled functions ------------------------------------------------------------------------------------------------
_hooks: Final = getattr(api, "_post_hook_state", None)  # one of JAX's own; None: this version has no such
_InCall = dict[Steps, int]  # how many of these one call takes
_codes: Final[dict[Any, _InCall]] = {}  # of Python functions that were traced while updates were applied
_of_functions: Final[weakref.WeakKeyDictionary[Any, _InCall]] = weakref.WeakKeyDictionary()  # compiled ones


def _traced(steps: Steps) -> None:
    frame, passes = inspect.currentframe(), 1
    while frame is not None:
        known = _codes.setdefault(frame.f_code, {})
        known[steps] = max(known.get(steps, 0), passes)
        passes *= _passes(frame)
        frame = frame.f_back
    if _hooks is not None and _hooks.value is None and _hooks.get_global() is None:
        _hooks.set_global(_called)
        if _hooks.value is None:  # this thread has a value of its own, once it has been in `with jax.debug_nans(...)`
            _hooks.set_local(_called)
        unreduced.until_over(_forget)


def _passes(frame: FrameType) -> int:
    """Of a loop whose body is traced from here. 1: it is no loop, or its length is not known before it runs."""
    is_loop = frame.f_code.co_name == "scan" and frame.f_globals.get("__name__") == _LOOPS
    length = frame.f_locals.get("length") if is_loop else None
    return length if isinstance(length, int) else 1


def _called(function: Any, *_: Any) -> None:
    """Called by JAX, after a call of a compiled function from Python that was not traced."""
    steps = _of_functions.get(function)
    if steps is None:
        _of_functions[function] = steps = _codes.setdefault(_code_of(function), {})
    for one, passes in steps.items():
        one.add(passes)


def _forget() -> None:
    if _hooks is not None and _hooks.get_global() is _called:
        _hooks.set_global(None)
    if _hooks is not None and _hooks.value is _called:
        _hooks.set_local(None)


def _code_of(function: Any) -> Any:
    """That of the Python function in a compiled one."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return getattr(inner, "__code__", None)


def _watch() -> None:
    if (optax := sys.modules.get("optax")) is not None:
        unreduced.replace(optax, "apply_updates", _apply_updates)


unreduced.when_in_a_world(_watch, "optax")
