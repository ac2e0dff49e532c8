"""How a process leaves an elastic job before the work is done: at the next commit, so that no step of the others fails.

    hvd.elastic.run begins  -->  TRAINS  --(the loop leaves its world)-->  BETWEEN worlds  --(the next one stands)--+
                                   ^------------------------------------------------------------------------------+

SIGTERM means that the host of this process is about to be taken away: a spot instance is reclaimed, a node is drained,
a Deployment is scaled down. A process that trains says through the coordinator that it will leave (`say_leaving`); all
members leave their world together at the next commit, and this one ends with the exit code 143. Whoever is between two
worlds holds up nobody who trains, and ends at once. So does a process that gets a second SIGTERM.

A handler of Python runs when the main thread next runs Python code, which may be late: a step may be one long call of a
framework. So a thread of its own hears of the signal, through the descriptor that the interpreter's own handler writes
to (signal.set_wakeup_fd). It also hears of it from a handler in Python, where that descriptor is somebody else's, such
as an event loop's. Neither interrupts what runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

from horovod.worker.runtime.context import current, is_member, say_leaving

__all__ = ["EXIT_CODE", "Departure", "departure", "end_by_sigterm_as_pid_1"]

log = logging.getLogger(__name__)

EXIT_CODE: Final = 128 + signal.SIGTERM  # as a shell shows the end by SIGTERM
ALSO_HEARS_S = 0.2  # seconds in which SIGTERM reaches this process, too, if it has just ended a child of it
SAME_SECONDS = 1.0  # signals that come so close together are one: a supervisor and its own parent may both send it
GOT_SIGTERM = "it got SIGTERM"

_HANDLED = b"\0"  # written by the handler in Python; the interpreter writes the number of the signal


class Phase(Enum):
    OUTSIDE = "outside"  # of hvd.elastic.run
    TRAINS = "trains"
    BETWEEN = "between"


class Departure:
    """Whether this process is to leave its job. `request` and `signalled` are called by any thread."""

    def __init__(self, say: Callable[[str], None] = say_leaving, end: Callable[[int], object] = os._exit) -> None:
        """say: tells the others. end: ends the process at once, with this exit code."""
        self._say = say
        self._end = end
        self._lock = threading.Lock()  # guards the fields of this object
        self._phase = Phase.OUTSIDE
        self._reason = ""  # why the process is to leave; empty: it is not
        self._first_signal_s: float | None = None
        self._got_signal = threading.Event()  # set when SIGTERM has come in this training
        self._listens = False  # whether SIGTERM calls `signalled`

    @property
    def is_between_worlds(self) -> bool:
        return self._phase is Phase.BETWEEN

    def begins(self) -> None:
        """This process is in a world and trains from now on."""
        with self._lock:
            self._phase = Phase.TRAINS
            reason = self._reason
        if reason:
            self._say(reason)

    def leaves_world(self) -> str:
        """This process leaves its world. Returns why it is not to join another one, or ""."""
        with self._lock:
            self._phase = Phase.BETWEEN
            reason, self._reason = self._reason, ""
        return reason

    def ends(self) -> str:
        """The training function has ended. Returns why the process was to leave at the next commit, or ""."""
        with self._lock:
            self._phase, self._first_signal_s = Phase.OUTSIDE, None
            self._got_signal.clear()
            return self._reason

    def explains_error(self) -> bool:
        """Whether an error in the training function may come from SIGTERM, which this process got too.

        A scheduler may send SIGTERM to all processes of a host at once. It ends children of this one that the next
        commit needs, such as the workers of a DataLoader.
        """
        return self._listens and self._got_signal.wait(ALSO_HEARS_S)

    def request(self, reason: str) -> None:
        """The process is to leave at the next commit: of the next world, if it is between two."""
        with self._lock:
            is_first, self._reason = not self._reason, self._reason or reason
            is_told = is_first and self._phase is Phase.TRAINS
            if reason == GOT_SIGTERM:
                self._got_signal.set()
        if is_told:
            self._say(reason)

    def signalled(self, now_s: float) -> None:
        """The process got SIGTERM."""
        with self._lock:
            before_s, is_between = self._first_signal_s, self._phase is Phase.BETWEEN
            if before_s is None:
                self._first_signal_s = now_s
        if is_between:
            log.warning("SIGTERM: this process waits for the next world, and ends.")
            self._end(EXIT_CODE)
        elif before_s is None:
            log.warning(
                "SIGTERM: this process leaves the job at the next commit, and ends with exit code %d. A second SIGTERM "
                "ends it at once.",
                EXIT_CODE,
            )
            self.request(GOT_SIGTERM)
        elif now_s - before_s >= SAME_SECONDS:
            log.warning("A second SIGTERM: this process ends at once.")
            self._end(EXIT_CODE)

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """During hvd.elastic.run, SIGTERM calls `signalled` if the program has no SIGTERM handler.

        Outside the main thread nothing changes, nor in jobs of a fixed size, which can't go on without a member.
        """
        may_leave = is_member() and current().is_elastic
        is_main = threading.current_thread() is threading.main_thread()
        is_default = signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _end_now)
        listener = _Listener(self) if may_leave and is_main and is_default else None
        self._listens = listener is not None
        self.begins()
        try:
            yield
        finally:
            self._listens = False
            if listener is not None:
                listener.close()
            if reason := self.ends():
                log.warning("Training ended before the next commit, at which this process was to leave (%s).", reason)


class _Listener:
    """The handler of SIGTERM, and the thread that acts on it."""

    def __init__(self, departure: Departure) -> None:
        self._departure = departure
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.getsignal(signal.SIGTERM)
        self._handler = self._on_signal  # kept, because each access to a method makes another object
        self._thread = threading.Thread(target=self._run, name="horovod-sigterm", daemon=True)
        self._thread.start()
        _heed_forks()
        _installed.append(self)
        if (other := signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(other)
        signal.signal(signal.SIGTERM, self._handler)
        signal.siginterrupt(signal.SIGTERM, False)  # so that system calls of libraries go on

    def _on_signal(self, signum: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # a full pipe means that the thread has much to read
            os.write(self._writer, _HANDLED)

    def _run(self) -> None:
        """A signal comes in two ways, of which one may be missing."""
        ways: Counter[int] = Counter()
        heard = 0
        while told := os.read(self._reader, 256):
            ways.update(byte for byte in told if byte in (_HANDLED[0], signal.SIGTERM))
            while heard < max(ways.values(), default=0):
                heard += 1
                # Otherwise the program has set its own handler by now.
                if signal.getsignal(signal.SIGTERM) == self._handler:
                    self._departure.signalled(time.monotonic())

    def close(self) -> None:
        """Gives SIGTERM the handler that it had before, unless the program has installed another one meanwhile."""
        self._uninstall()
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def forget(self) -> None:
        """In a forked child, which has no such thread, and whose parent reads the pipe."""
        self._uninstall()
        os.close(self._writer)
        os.close(self._reader)

    def _uninstall(self) -> None:
        _installed.remove(self)
        if (current := signal.set_wakeup_fd(-1)) not in (-1, self._writer):
            signal.set_wakeup_fd(current)
        if signal.getsignal(signal.SIGTERM) == self._handler:
            signal.signal(signal.SIGTERM, self._before)


_installed: list[_Listener] = []  # holds one listener at most
_heeds_forks = False


_mask = threading.local()  # the signals that a thread which forks had blocked


def _heed_forks() -> None:
    """A forked child, such as a worker of a DataLoader, is ended by SIGTERM. The signal is held back until it can no
    longer write to the pipe of its parent.
    """
    global _heeds_forks
    if not _heeds_forks:
        _heeds_forks = True
        os.register_at_fork(before=_before_fork, after_in_parent=_restore_mask, after_in_child=_after_fork)


def _before_fork() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]) if _installed else None


def _restore_mask() -> None:
    if _mask.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _after_fork() -> None:
    while _installed:
        _installed[0].forget()
    _restore_mask()


def _end_now(signum: int, frame: object) -> None:
    os._exit(EXIT_CODE)


def end_by_sigterm_as_pid_1() -> None:
    """For a process of an elastic job that is the first one of its container: the kernel does not end such a process by
    a signal for which it has no handler (pid_namespaces(7)), and it would wait for a place until it is killed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if os.getpid() == 1 and is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_now)


departure: Final = Departure()
