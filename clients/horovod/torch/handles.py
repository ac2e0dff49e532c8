"""Handles of operations in flight: what `*_async` returns and `poll` and `synchronize` take.

A handle, or the engine when nobody has one any more, holds what the operation reads and writes (the tensors and their
storages) until it is over. A tensor may so get another storage meanwhile, as `tensor.data = other` does; a storage that
is itself resized or moved is gone, for which `synchronize` raises ValueError. A handle can end in three ways:

    synchronize(handle)         waits, hands over the result, and the handle is forgotten
    synchronize(handle) raises  the operation failed; the handle is forgotten
    the last reference goes     nobody can ask for the result any more; the engine lets go of the tensors when the
                                operation is over and a later one starts

A handle belongs to the engine that made it. After shutdown and init, a handle of the old world fails or has its old
result; it is never mistaken for an operation of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from horovod._core import Handle
from horovod.torch.tensors import current_stream
from horovod.torch.undecided import UNDECIDED, before_waiting

__all__ = ["poll", "synchronize"]


def _result_of(handle: Handle) -> Any:
    """The result of one operation. On a GPU torch's stream waits for it, not this thread."""
    device = handle.device
    return handle.result() if device is None else handle.result(current_stream(device))


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
                self._results.append(_result_of(part))
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
    if UNDECIDED:
        before_waiting()
    if isinstance(handle, Handle):
        return _result_of(handle)
    return handle.result() if isinstance(handle, PartedHandle) else None
