"""Handles of operations in flight: what `*_async` returns and `poll` and `synchronize` take.

The engine holds what it reads and writes (the tensors) until the operation is over. A handle can end in three ways:

    synchronize(handle)         waits, hands over the result, and the handle is forgotten
    synchronize(handle) raises  the operation failed; the handle is forgotten
    the last reference goes     nobody can ask for the result any more; the engine lets go of the tensors when the
                                operation is over and a later one starts

A handle belongs to the engine that made it. After shutdown and init, a handle of the old world fails or has its old
result; it is never mistaken for an operation of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from horovod.torch.tensors import current_stream

if TYPE_CHECKING:
    from horovod._core import Engine

__all__ = ["poll", "synchronize"]


class Handle:
    """One engine operation. `finish` makes the user's result of what Engine.wait returned."""

    __slots__ = ("_device", "_engine", "_finish", "_keep", "_number")

    def __init__(
        self,
        engine: Engine,
        number: int,
        keep: Any,
        finish: Callable[[Any], Any] | None = None,
        device: int | None = None,
    ) -> None:
        self._device = device  # the GPU of its tensors
        self._engine: Engine | None = engine
        self._number = number
        self._keep = keep
        self._finish = finish

    def done(self) -> bool:
        if self._engine is None:
            raise ValueError(f"Handle {self!r} was not created or has been cleared: it was synchronized before.")
        return self._engine.poll(self._number)

    def result(self) -> Any:
        engine = self._engine
        if engine is None:
            return None
        try:
            if self._device is None:
                received = engine.wait(self._number)
            else:  # torch's stream waits, not this thread
                received = engine.wait(self._number, current_stream(self._device))
        except Exception:
            self._forget()
            raise
        # Any other exception (Ctrl-C) leaves the operation running and this handle usable.
        keep, finish = self._keep, self._finish
        self._forget()
        return keep if finish is None else finish(received)

    def _forget(self) -> None:
        self._engine = self._keep = self._finish = None

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.abandon(self._number)


class PartedHandle:
    """Several operations behind one handle: a grouped call whose tensors differ in dtype."""

    __slots__ = ("_finish", "_parts", "_results")

    def __init__(self, parts: Sequence[Handle], finish: Callable[[list[Any]], Any]) -> None:
        self._parts: Sequence[Handle] | None = parts
        self._results: list[Any] = []  # of the first parts: an interrupted wait goes on behind them
        self._finish = finish

    def done(self) -> bool:
        if self._parts is None:
            raise ValueError(f"Handle {self!r} was not created or has been cleared: it was synchronized before.")
        return all(part.done() for part in self._parts[len(self._results) :])

    def result(self) -> Any:
        if self._parts is None:
            return None
        try:
            for part in self._parts[len(self._results) :]:
                self._results.append(part.result())
        except Exception:
            self._parts = None
            raise
        self._parts = None
        return self._finish(self._results)


AnyHandle: TypeAlias = Handle | PartedHandle


def poll(handle: Any) -> bool:
    """True when `synchronize(handle)` would return at once.

        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        >>> while not hvd.poll(handle):
        ...     pass  # something else to do meanwhile
        >>> hvd.synchronize(handle)
        tensor([2., 2.])

    Raises:
        ValueError: what is not a handle, or a handle that was synchronized before.
    """
    if not isinstance(handle, (Handle, PartedHandle)):
        raise ValueError(f"Handle {handle!r} was not created or has been cleared.")
    return handle.done()


def synchronize(handle: Any) -> Any:
    """Waits for an asynchronous operation and returns its result: a tensor, or for grouped calls a tuple of tensors.

    On a GPU the result is there for what is queued on the current stream from now on; this thread does not wait for it.
    Returns None for an unknown handle or one that was synchronized before. Example, on two ranks:

        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        >>> hvd.synchronize(handle)
        tensor([2., 2.])
        >>> hvd.synchronize(handle) is None
        True

    Raises:
        HorovodInternalError: the operation failed (a rank was lost, or the ranks do not agree on it). The handle is
            forgotten then.
    """
    return handle.result() if isinstance(handle, (Handle, PartedHandle)) else None
