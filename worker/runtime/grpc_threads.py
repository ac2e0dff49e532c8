"""The threads in which gRPC works for this process's streams, so that none outlives them.

gRPC for Python runs a stream in two daemon threads of its own: one iterates over the requests, one (for each channel)
delivers events. Both hold the stream's lock now and then. A daemon thread that wants the GIL while the interpreter
ends is stopped where it stands; when that is under the lock, the last garbage collection waits for the lock for ever
in the stream's finalizer (seen once in 300 processes on a busy machine). So they are waited for while they can still
run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import grpc

Message = TypeVar("Message")


class GrpcThreads:
    """Begins streams and knows their threads. Used from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the two below
        self._threads: set[threading.Thread] = set()
        self._unknown = 0  # streams whose threads are not known yet

    def start(
        self,
        method: grpc.StreamStreamMultiCallable[Message, Any],
        requests: Iterable[Message],
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """Begins a stream and returns its call."""
        before = set(threading.enumerate())
        call = method(self._told(requests), metadata=metadata)
        with self._changed:
            self._unknown += 2
        if not call.add_callback(self._remember):
            # The stream may be over already (a name that can't be resolved is enough), but the thread that told of it
            # may not be. Either this call started that thread, or an earlier call did, which is known or will tell.
            began = {thread for thread in threading.enumerate() if _is_of_grpc(thread)} - before
            with self._changed:
                self._unknown -= 1
                self._threads |= began
                self._changed.notify_all()
        return call

    def join(self, seconds: float) -> None:
        """Waits until the threads have ended, `seconds` at most. All calls must be cancelled, their requests ended."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._unknown <= 0, seconds)
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            # A thread of gRPC's core that has called Python is in the list of threads too, and can't be joined.
            if not isinstance(thread, threading._DummyThread):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _told(self, requests: Iterable[Message]) -> Iterator[Message]:
        self._remember()
        yield from requests

    def _remember(self) -> None:
        # Runs in the thread that is to be remembered: as its first step, or (for events) when the stream is over.
        with self._changed:
            self._unknown -= 1
            self._threads = {thread for thread in self._threads if thread.is_alive()} | {threading.current_thread()}
            self._changed.notify_all()


def _is_of_grpc(thread: threading.Thread) -> bool:
    """As far as the thread says what it runs; one that is about to end says nothing any more."""
    runs = getattr(thread, "_target", None)
    may_be = runs is None or str(getattr(runs, "__module__", "")).startswith("grpc.")
    return thread.daemon and may_be and thread.is_alive()
