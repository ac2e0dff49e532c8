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
from typing import TypeVar

import grpc

Message = TypeVar("Message")


class GrpcThreads:
    """Knows the threads of all streams that it was shown. Used from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the two below
        self._threads: set[threading.Thread] = set()
        self._unknown = 0  # threads of watched calls that have not told who they are yet

    def requests(self, requests: Iterable[Message]) -> Iterator[Message]:
        """`requests`, to hand to a streaming call, which must be shown to `watch` as soon as it has begun."""
        self._remember()
        yield from requests

    def watch(self, call: grpc.Call) -> None:
        """For a streaming call whose requests are those of `requests`."""
        with self._changed:
            self._unknown += 2
        if not call.add_callback(self._remember):  # it is over, and the thread of its events has nothing left to do
            with self._changed:
                self._unknown -= 1
                self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Waits until the threads have ended, `seconds` at most. All calls must be cancelled, their requests ended."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._unknown <= 0, seconds)
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _remember(self) -> None:
        # Runs in the thread that is to be remembered: as its first step, or (for events) when the stream is over.
        with self._changed:
            self._unknown -= 1
            self._threads = {thread for thread in self._threads if thread.is_alive()} | {threading.current_thread()}
            self._changed.notify_all()
