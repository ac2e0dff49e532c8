"""What is used of PyTorch beneath its public interface: of autograd's engine, torch.compile and GradScaler.

EndOfBackward tells when a backward pass is over: the outermost one, where passes run inside of each other.
torch.utils.checkpoint(use_reentrant=True) and functions like it call backward() inside of a backward pass. The engine
of autograd calls back at the end of the pass that runs when it is asked to, so a hook that fires in an inner pass hears
of the end of that one. From there the request moves on: the node of the outer pass that is running the inner one is
known, and the first of the nodes after it asks again.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, cast

import torch

from horovod import _core

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Whether torch.compile traces the caller. PyTorch has it in torch.compiler since 2.3.
is_compiling: Final[Callable[[], bool]] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling


def untraced(function: _Function) -> _Function:
    """What torch.compile runs as it is, without tracing it: code that talks to other ranks or keeps books about a step.

    It is torch.compiler.disable for functions of a module, which imports the compiler of PyTorch only when one is
    called. Two frames of PyTorch stand between the function and its caller.
    """
    exporting: Any = torch  # torch has _disable_dynamo, but does not declare that it exports it
    return cast(_Function, exporting._disable_dynamo(function))


_engine: Any = torch.autograd.Variable._execution_engine
_current_pass: Callable[[], int] = torch._C._current_graph_task_id
# Returns None at the end of a backward pass that runs inside of no other.
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)


class EndOfBackward:
    """Calls `inner` when a pass inside of another one is over, and `outermost` when all of them are.

    Both are methods, whose object is not kept alive. Either may be called more than once for a pass, and neither is
    when the pass fails.
    """

    def __init__(self, inner: Callable[[], None], outermost: Callable[[], None]) -> None:
        self._inner = weakref.WeakMethod(inner)
        self._outermost = weakref.WeakMethod(outermost)
        self.passes = 0  # outermost passes that are over; after a failed pass the next one has its number
        self._asked: int | None = None  # the pass whose end was last asked for
        self._moving: list[Any] = []  # hooks on nodes of the outer pass, each of which would ask again

    def expect(self) -> bool:
        """Asks to be called; from a hook that runs in the pass. False where autograd's engine runs none."""
        running = _current_pass()
        if running == self._asked:
            return True
        try:
            _engine.queue_callback(self._over)
        except RuntimeError:  # compiled autograd
            return False
        self._asked = running
        return True

    def forget(self) -> None:
        """A request that moves between passes ends."""
        moving, self._moving = self._moving, []
        for hook in moving:
            hook.remove()

    # Where the step that calls backward() is compiled, Dynamo would trace both, as it does all that autograd calls.
    @untraced
    def _over(self) -> None:
        self._asked = None
        node = _current_node()
        if node is None:
            self.passes += 1
        told = (self._outermost if node is None else self._inner)()
        if told is not None:
            told()
        if node is None or told is None:
            return
        self.forget()
        self._moving = [after.register_prehook(self._move) for after, _ in node.next_functions if after is not None]

    @untraced
    def _move(self, _: object) -> None:
        self.forget()
        self.expect()


@contextlib.contextmanager
def in_place_of_script() -> Iterator[None]:
    """The end of a pass waits for other ranks. Of a pass on a GPU it is run by a thread of autograd's, which is not one
    of Python's, while the thread of the script waits inside of backward().
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):
        yield
        return
    _core.stand_in(True)
    try:
        yield
    finally:
        _core.stand_in(False)


# PyTorch before 2.3 has one for CUDA only; later that one is a subclass.
_GRAD_SCALER: Final[Any] = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_FRAMES_TO_GRAD_SCALER: Final = 9  # three of these frames are of `untraced`


def is_called_by_grad_scaler() -> bool:
    """Whether one called the optimizer's `step`, which asks, through what schedulers and profilers put around it."""
    return calling_grad_scaler() is not None


def calling_grad_scaler() -> Any:
    """The GradScaler that called the optimizer's `step`, which asks; or None.

    Unless it is disabled it divides gradients in place, and nothing shows that.
    """
    frame = inspect.currentframe()
    for _ in range(_FRAMES_TO_GRAD_SCALER + 1):
        frame = frame.f_back if frame is not None else None
        # Only there: a frame remembers what was asked of it, and the script's would keep optimizers alive.
        is_torchs = frame is not None and frame.f_globals.get("__name__", "").endswith("grad_scaler")
        caller = frame.f_locals.get("self") if frame is not None and is_torchs else None
        if isinstance(caller, _GRAD_SCALER) and caller.is_enabled():
            return caller
    return None
