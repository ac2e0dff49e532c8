"""Handles of operations in flight: what `*_async` returns and `poll` and `synchronize` take.

A handle, or the engine when there is no handle any more, holds what the operation reads and writes (the tensors and
their storages) until it is over. A tensor may so get another storage meanwhile, as torch's `tensor.data = other` does;
a storage that is itself resized or moved is gone, for which `synchronize` raises ValueError. A handle can end in three
ways:

    synchronize(handle)         waits, hands over the result, and the handle is forgotten
    synchronize(handle) raises  the operation failed; the handle is forgotten
    the last reference goes     the result can't be asked for any more; the engine lets go of the tensors when the
                                operation is over and a later one starts

A handle belongs to the engine that made it. After shutdown and init, a handle of the old world fails or has its old
result; it is never mistaken for an operation of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from horovod._core import Handle
from horovod.base.errors import OperationCode, coded

CurrentStream: TypeAlias = Callable[[int], int]


class PartedHandle:
    """Several operations behind one handle (a grouped call whose tensors differ in dtype), or one with a stand-in."""

    __slots__ = ("_finish", "_parts", "_results")

    def __init__(self, parts: Sequence[AnyHandle], finish: Callable[[list[Any]], Any]) -> None:
        self._parts: Sequence[AnyHandle] | None = parts
        self._results: list[Any] = []  # the results of the parts that are done; an interrupted wait goes on behind them
        self._finish = finish

    def done(self) -> bool:
        if self._parts is None:
            raise ValueError(
                coded(
                    OperationCode.CLEARED_HANDLE,
                    f"Handle {self!r} was not created or has been cleared: it was synchronized before.",
                )
            )
        return all(part.done() for part in self._parts[len(self._results) :])

    def result(self, current_stream: CurrentStream) -> Any:
        if self._parts is None:
            return None
        try:
            for part in self._parts[len(self._results) :]:
                self._results.append(_result_of(part, current_stream))
        except Exception:
            self._parts = None
            raise
        self._parts = None
        return self._finish(self._results)


AnyHandle: TypeAlias = Handle | PartedHandle


def _result_of(handle: AnyHandle, current_stream: CurrentStream) -> Any:
    """The result of one part. On a GPU the framework's stream waits for it, not this thread."""
    if isinstance(handle, PartedHandle):
        return handle.result(current_stream)
    device = handle.device
    return handle.result() if device is None else handle.result(current_stream(device))


def poll(handle: Any) -> bool:
    if not isinstance(handle, (Handle, PartedHandle)):
        raise ValueError(coded(OperationCode.CLEARED_HANDLE, f"Handle {handle!r} was not created or has been cleared."))
    return handle.done()


def synchronize(handle: Any, current_stream: CurrentStream) -> Any:
    if isinstance(handle, Handle):
        device = handle.device  # the same as _result_of, without the cost of a call
        return handle.result() if device is None else handle.result(current_stream(device))
    return handle.result(current_stream) if isinstance(handle, PartedHandle) else None
