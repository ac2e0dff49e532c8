"""What reaches a launcher while its job runs: signals, and a reader of its output that went away."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, Protocol, TypeVar

from horovod.base.errors import LaunchCode, coded
from horovod.launch.console.streams import PythonStreams
from horovod.worker.agent.output import Console

_FAILED = 1
_PIPE_CLOSED = 128 + signal.SIGPIPE
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
# Seconds for which Ctrl-Z waits until the ranks' stop is on its way; after that only this launcher is stopped.
_DELIVERY_S = 2.0


class SignalTarget(Protocol):
    """What the launcher passes signals on to: the Supervisor of a job on this machine, or a job on a cluster."""

    def stop(self, signum: int) -> None:
        """Asks the job to end. Called again, it ends the job sooner."""

    def forward(self, signum: int) -> asyncio.Future[Any] | None:
        """Sends this signal to every rank. None: it was sent; else a future that is done once it was handed over."""


T = TypeVar("T")


def without_loop(function: Callable[[], T]) -> T:
    """The result of `function`, which makes an event loop: in another thread where this one has one, as in a notebook.

    Signal handlers run here meanwhile.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


class Control:
    """Stands around a job. `code` and `sentence` say how the launcher ends when a signal or a reader decided it.

    Plain signal handlers rather than the event loop's: they also stand before the loop runs and after it has ended.
    """

    def __init__(self, console: Console, streams: PythonStreams) -> None:
        self.code: int | None = None  # the launcher's exit code if a signal decided it; None: the ranks decide
        self.sentence = ""
        self._console = console
        self._agent: SignalTarget | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._suspending: asyncio.Task[None] | None = None
        self._before: dict[int, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] = socket.socketpair()
        self._streams = dict(zip(streams.descriptors, ("stdout", "stderr"), strict=True))
        streams.writer.failed = self._on_broken_in_writer

    def __enter__(self) -> Control:
        for signum in (*_STOPPING, *_PASSED_ON, signal.SIGTSTP):
            # nohup ignores SIGHUP on purpose. SIGINT is different: shells ignore it for every background job.
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._on_signal)
        # The kernel may hand a signal to a thread of gRPC, which would leave the event loop asleep.
        for end in self._wakeup:
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for end in self._wakeup:
            end.close()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self.code is not None:  # the exit is decided; one Ctrl-C too many must not turn it into a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def attach(self, agent: SignalTarget) -> None:
        """The job begins. Called in its event loop."""
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._wakeup[0], self._wakeup[0].recv, 4096)
        if self.code is not None:
            agent.stop(self.code - 128)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum in _STOPPING and self.code is None:
            self.code = 128 + signum
            name = signal.Signals(signum).name
            self.sentence = f"Stopped by {name}; no rank is left."
            again = "; press Ctrl-C again to end them sooner" if signum == signal.SIGINT else ""
            self._later(self._console.note, f"horovodrun: {name} received, the ranks are asked to end{again}.")
        self._later(self._pass_on, signum)

    def _pass_on(self, signum: int) -> None:
        assert self._agent is not None
        if self._suspending is not None and signum in (*_STOPPING, signal.SIGCONT):
            self._suspending.cancel()  # the user has changed their mind since Ctrl-Z
            self._suspending = None
        if signum in _STOPPING:
            self._agent.stop(signum)
        elif signum != signal.SIGTSTP:
            self._agent.forward(signum)
        elif self._suspending is None:  # a second Ctrl-Z asks for what is already being done
            self._suspending = asyncio.ensure_future(self._suspend())

    async def _suspend(self) -> None:
        """Ctrl-Z: the ranks have no terminal of their own, so it is carried to them. SIGCONT wakes all of us."""
        assert self._agent is not None
        try:
            handed_over = self._agent.forward(signal.SIGSTOP)
            if handed_over is not None:  # a stopped launcher can't send anything
                await asyncio.wait([handed_over], timeout=_DELIVERY_S)
        finally:
            self._suspending = None
        os.kill(os.getpid(), signal.SIGSTOP)

    def _later(self, function: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
                self._loop.call_soon_threadsafe(function, *arguments)

    def _on_broken_in_writer(self, descriptor: int, error: OSError) -> None:
        self._later(self._on_broken, descriptor, error)

    def _on_broken(self, descriptor: int, error: OSError) -> None:
        assert self._agent is not None
        if descriptor not in self._streams:
            self._console.note(f"horovodrun: a file of --output-filename cannot be written any more: {error.strerror}.")
        elif self.code is None:
            self.code = _PIPE_CLOSED if error.errno == errno.EPIPE else _FAILED
            stream = self._streams[descriptor]
            sentence = f"Nobody takes {stream} any more ({error.strerror}), so the ranks were stopped."
            self.sentence = coded(LaunchCode.OUTPUT_UNUSABLE, sentence)
            self._agent.stop(signal.SIGTERM)
