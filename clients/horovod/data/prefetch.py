"""One pass over an iterable: a thread makes its items ahead of the thread that takes them.

    the thread        makes an item, waits while `size` of them are ready, goes on; then says that it has ended, and how
    next(prefetch)    takes the oldest item, or waits for one; after the last raises what the thread ended with. It
                      waits as long as the thread is there, and warns every minute; with a limit, at most so long
    stop()            tells the thread to end
    close()           the same, and waits until it has, that is at most for the item it is making

Nothing waits for a thread that may never end when the interpreter exits: a loader may be stuck in a read for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from horovod.base.errors import TrainingCode, coded
from horovod.base.frames import frame_of

_PATIENCE_SECONDS = 60.0  # how long an item is awaited before a warning says so, and again after as long
_EXIT_SECONDS: Final = 1.0  # a pass may be made in Python, which the interpreter can leave at any time

_log = logging.getLogger("horovod.data")
_running: Final[set[Prefetch]] = set()


class Prefetch:
    """Iterate over it once, in one thread. `make` is called, iterated and let go of in the other.

    exit_seconds: how long the exit of the interpreter waits for an item that is being made. A thread that is in native
    code, and comes back from there to Python when the interpreter is gone, aborts the process.
    awaited: says what is being made, for the warning about an item that does not come.
    limit: how many seconds the item that is being made may take; None: any number. TimeoutError says that it took
    longer. The thread is left where it is then, since nobody can end it, and nothing waits for it but the exit.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[Any]],
        size: int,
        exit_seconds: float = _EXIT_SECONDS,
        awaited: Callable[[], str] | None = None,
        limit: Callable[[], float] | None = None,
    ) -> None:
        self._make = make
        self._size = size
        self._exit_seconds = exit_seconds
        self._awaited = awaited
        self._limit = limit
        self.is_late = False  # an item took longer than the limit
        self._items: deque[Any] = deque()
        self._error: BaseException | None = None
        self._ended = False  # the thread makes no more items
        self._closed = False  # close() was called: no more items are taken
        # Reentrant, because a garbage collection may close another pass, or this one, in either thread at any time.
        self._changed = threading.Condition(threading.RLock())
        self._pid = os.getpid()
        self._taken = 0
        self._starved_seconds = self._full_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="horovod-data-loader", daemon=True)

    def __iter__(self) -> Prefetch:
        """Starts the thread."""
        self._thread.start()
        return self

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                coded(
                    TrainingCode.FORKED_ITERATION,
                    "A forked child can't continue its parent's iteration over an asynchronous data loader: "
                    "the thread that makes the batches exists only in the parent. Start a new iteration.",
                )
            )
        with self._changed:
            if not self._items and not self._ended:
                begun = time.perf_counter()
                self._await_item()
                self._starved_seconds += time.perf_counter() - begun
            if self._closed:
                raise StopIteration
            if self._items:
                item = self._items.popleft()
                self._taken += 1
                self._changed.notify_all()
                return item
            error, self._error = self._error or StopIteration(), None
        try:
            raise error
        finally:
            del error  # its traceback would keep this frame alive

    def _await_item(self) -> None:
        # Waits are added up instead of asking the clock, which also counts the time for which this process was stopped.
        waited = 0.0
        while True:
            limit = self._limit() if self._limit is not None else math.inf
            step = min(_PATIENCE_SECONDS, limit - waited)
            if step > 0 and self._changed.wait_for(self._has_news, step):
                return
            waited += max(step, 0.0)
            if waited >= limit:
                self.is_late = self._closed = True
                raise TimeoutError(f"there was no answer for {waited:.0f} s")
            what = self._awaited() if self._awaited is not None else self._place()
            _log.warning("The training has waited %.0f s for %s.", waited, what)

    def _has_news(self) -> bool:
        return bool(self._items or self._ended or self._closed)

    def _place(self) -> str:
        """Which line of the program makes the next item."""
        frame = frame_of(self._thread)
        where = f"{frame.f_code.co_filename}, line {frame.f_lineno}" if frame is not None else "its end"
        return f"a data loader, whose thread is at {where}"

    def close(self) -> None:
        """Ends the thread; waits for it, unless this is it or the interpreter is exiting. Idempotent.

        With a limit it waits no longer than that, and not at all for a thread that is late already.
        """
        if self.stop() and threading.current_thread() is not self._thread and not self.is_late:
            with contextlib.suppress(RuntimeError):  # the thread could not be started
                self._thread.join(self._limit() if self._limit is not None else None)

    def stop(self) -> bool:
        """Tells the thread to end; returns whether there is one to wait for."""
        if sys.is_finalizing() or os.getpid() != self._pid:
            # Other threads have stopped where they were, or were not copied by the fork; perhaps one has the lock.
            return False
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        return True

    def _work(self) -> None:
        _running.add(self)
        error: BaseException | None = None
        try:
            for item in self._make():  # leaving the loop lets go of a generator, whose `finally` runs here
                if not self._offer(item):
                    break
        except BaseException as caught:
            error = caught
        with self._changed:
            self._ended = True
            if not self._closed:
                self._error, error = error, None
            self._changed.notify_all()
        _running.discard(self)
        if error is not None:
            raise error  # no thread takes another item, so none would raise it; threading.excepthook shows it

    def _offer(self, item: Any) -> bool:
        """Waits until there is room for `item`; False after close()."""
        with self._changed:
            if len(self._items) >= self._size and not self._closed:
                begun = time.perf_counter()
                self._changed.wait_for(lambda: len(self._items) < self._size or self._closed)
                self._full_seconds += time.perf_counter() - begun
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def summary(self) -> str:
        return (
            f"{self._taken} batches; the training waited {self._starved_seconds:.3f} s for the loader, the loader "
            f"{self._full_seconds:.3f} s for the training (at most {self._size} batches ahead)."
        )


def _at_exit() -> None:
    begun = time.monotonic()
    running = [prefetch for prefetch in list(_running) if prefetch.stop()]
    _join(running, begun + _EXIT_SECONDS)
    if late := [one for one in running if one._thread.is_alive() and one._exit_seconds > _EXIT_SECONDS]:
        longest = max(one._exit_seconds for one in late)
        print(
            f"horovod.data: the exit of this process waits up to {longest:.0f} s for a read that is under way.",
            file=sys.stderr,
            flush=True,
        )
        _join(late, begun + longest)


def _join(running: Iterable[Prefetch], deadline: float) -> None:
    for prefetch in running:
        prefetch._thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_at_exit)
