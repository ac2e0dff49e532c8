"""Operations under way, as torch.distributed knows them: its Work, with a future where somebody asks for one."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from horovod._core import Handle
from horovod.base.errors import OperationCode, coded
from horovod.base.words import capitalized
from horovod.common.exceptions import HorovodInternalError

dist: Final[Any] = torch.distributed  # its stubs do not say all that its C++ classes have

log = logging.getLogger(__name__)

_POLL_S: Final = 0.0005
_MAX_POLL_S: Final = 0.02


def backend_error(what: str, group: str, error: Exception) -> Exception:
    """What torch's own handlers expect, with our text."""
    made: Exception = dist.DistBackendError(f"{what} in {group} failed: {error}")
    return made


class Done(dist.Work):  # type: ignore[misc]
    """Of an operation that was over when its call returned."""

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class UnderWay(dist.Work):  # type: ignore[misc]
    """Of an operation of one or more handles.

    `_lock` is held by the one thread that waits for the handles and stores the results; `_error` and `_is_over` are
    written under it, and read without it once `_is_over` is True.
    """

    def __init__(
        self,
        what: str,
        group: str,
        handles: Sequence[Handle],
        finish: Callable[[list[Any]], None] | None,
        outputs: Sequence[torch.Tensor],
        later: Later,
    ) -> None:
        super().__init__()
        self.since = time.monotonic()
        self.what, self._group = what, group
        self._handles, self._finish, self._outputs = handles, finish, list(outputs)
        self._later = later
        self._lock = threading.Lock()
        self._is_over = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end; raises what became of it. timeout: of this call alone; the operation goes on."""
        if timeout is not None and timeout > timedelta(0) and not self._ends_within(timeout.total_seconds()):
            raise backend_error(
                self.what,
                self._group,
                RuntimeError(
                    coded(OperationCode.STALLED, f"It was not over after the {timeout} that wait() was given.")
                ),
            )
        self.end()
        if self._error is not None:
            raise self._error
        return True

    def _ends_within(self, seconds: float) -> bool:
        deadline, pause = time.monotonic() + seconds, _POLL_S
        while not self.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_S)
        return True

    def end(self) -> None:
        """Waits for the end and keeps what became of it."""
        with self._lock:
            if self._is_over:
                return
            try:
                received = [handle.result() for handle in self._handles]
                if self._finish is not None:
                    self._finish(received)
            except (HorovodInternalError, ValueError) as error:
                self._error = backend_error(self.what, self._group, error)
            self._handles, self._finish = (), None
            self._is_over = True

    @property
    def is_over(self) -> bool:
        """Whether end() has returned."""
        return self._is_over

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._is_over or self._lock.locked():
            return self._is_over
        try:
            return all(handle.done() for handle in self._handles)
        except ValueError:  # another thread has just ended it
            return False

    def is_success(self) -> bool:
        return self._is_over and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Set by a thread of the group when the operation is over. Its value: the list of result tensors."""
        with self._lock:
            first = self._future is None
            if self._future is None:
                self._future = torch.futures.Future()
            future = self._future
        if first:
            self._later.add(self)
        return future

    def settle(self) -> None:
        """Sets its future, after end()."""
        assert self._future is not None
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._outputs)


class Later:
    """Threads of one group that end works whose futures somebody has. Operations of a group end in their order.

    One thread waits for operations. A callback of a future may wait for another operation (the hook PowerSGD does), so
    while one runs and works are left, there is another thread. Each group has its own, so that an operation that waits
    for its peers holds up none of another group.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the rest
        self._works: deque[UnderWay] = deque()
        self._waiting = 0  # threads that wait for works or for the end of one; the others run callbacks
        self._is_closed = False

    def add(self, work: UnderWay) -> None:
        with self._changed:
            self._works.append(work)
            self._changed.notify()
            self._staff()

    def close(self) -> None:
        """The threads end after the works that there are."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _staff(self) -> None:
        """Starts a thread if works are queued and no thread waits for them. The caller holds the lock."""
        if self._works and self._waiting == 0:
            self._waiting += 1
            threading.Thread(target=self._serve, name="horovod-futures", daemon=True).start()

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            work.end()
            with self._changed:
                self._waiting -= 1
                self._staff()
            try:
                work.settle()
            except Exception:  # of a callback of the future
                log.exception("A callback of a future of torch.distributed failed.")
            del work  # and with it the tensors
            with self._changed:
                if self._waiting > 0:
                    return  # another thread has taken over
                self._waiting += 1

    def _next(self) -> UnderWay | None:
        with self._changed:
            self._changed.wait_for(lambda: self._works or self._is_closed)
            if self._works:
                return self._works.popleft()
            self._waiting -= 1
            return None


class Limit:
    """The time that operations of one group may take: a thread ends the world when one takes longer, on all ranks.

    The thread that runs an operation at once writes `running`; what `started` holds is appended by any thread. The
    watching thread reads both, and takes works away that are over or that nobody has any more.
    """

    def __init__(self, group: str, rank: str, abort: Callable[[str], None], timeout: timedelta) -> None:
        self.timeout = timeout
        self.running: tuple[float, str] | None = None  # since when, and what
        self._group, self._rank, self._abort = group, rank, abort
        self._started: deque[weakref.ref[UnderWay]] = deque()
        self._over = threading.Event()

    def watch(self, work: UnderWay) -> None:
        self._started.append(weakref.ref(work))

    def begin(self) -> None:
        threading.Thread(target=self._look, name="horovod-limit", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(min(1.0, self.timeout.total_seconds() / 4)):
            now, allowed = time.monotonic(), self.timeout.total_seconds()
            running = self.running
            oldest = [running] if running is not None else []
            while self._started:
                work = self._started[0]()
                if work is not None and not work.is_over:
                    if not work.is_completed():
                        oldest.append((work.since, work.what))
                    break
                self._started.popleft()
            late = [what for since, what in oldest if now - since > allowed]
            if late:
                self._abort(
                    coded(
                        OperationCode.STALLED,
                        f"{capitalized(self._rank)} waited in {late[0]} in {self._group} for more than {allowed:g} s, "
                        "the timeout of that group. See what the ranks do that have not called it.",
                    )
                )
                return
