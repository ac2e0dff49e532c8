"""One training process as its launcher sees it: started behind the gate, in its own session, watched to its end.

A process that has ended is not reaped before `release`. The kernel gives its number to no other process until then, so
a signal to its group reaches no other process, however late it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from horovod.base.errors import LaunchCode, coded
from horovod.base.words import reason_of
from horovod.worker.agent.guardian import Guardian, is_alive, session_members, signal_programs, signal_session
from horovod.worker.agent.output import Sink, Stream

_GATE = str(Path(__file__).with_name("gate.py"))
_POLL_S = 0.02
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the signals that ask a program to end


class _Pump(asyncio.Protocol):
    """Carries one output stream into the sink. Pauses while the sink is full: the process then waits in its write."""

    def __init__(self, sink: Sink, rank: int, stream: Stream) -> None:
        self._sink = sink
        self._rank = rank
        self._stream = stream
        self._transport: asyncio.ReadTransport | None = None
        self._seen_bytes = 0
        self._paused = False
        self.done = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        if not self._sink.feed(self._rank, self._stream, data) and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._sink.finish(self._rank, self._stream)
        self.done.set()

    def resume(self) -> None:
        """The sink has room again."""
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Stops reading: what is still in the pipe is lost."""
        if self._transport is not None:
            self._transport.close()

    async def finish(self, idle_s: float) -> None:
        """Waits for the end of the stream; or for silence, where a process of another session holds it open."""
        while not self.done.is_set():
            seen = self._seen_bytes
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.done.wait(), idle_s)
            if not self._paused and seen == self._seen_bytes:
                break
        self.abandon()
        await self.done.wait()


class TrainingProcess:
    """One training process. Call `start`, await `connect` and `ended`, and then, in any case, `release`."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], guardian: Guardian) -> None:
        self.rank = rank
        self.pid = process.pid
        self.code: int | None = None  # exit code, or minus the signal that ended it, once it has ended
        self.ended = asyncio.Event()
        self._process = process
        self._guardian = guardian
        self._pumps: list[_Pump] = []
        self._pidfd: int | None = None
        self._following: asyncio.Task[None] | None = None  # of `tell`

    @classmethod
    def start(
        cls,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        guardian: Guardian,
        directory: str | None = None,
        descriptors: Sequence[int] = (),
        stdin: int | None = None,
    ) -> TrainingProcess:
        """Starts `command`, with an empty stdin unless a descriptor is given.

        OSError when this machine can't start a process. A command that does not exist ends with the exit code 127.

        This is called in the event loop and awaits nothing, so a caller that is cancelled has either got the process or
        started none.
        """
        try:
            gate, opener = os.pipe()
        except OSError as error:
            raise _cannot_start(rank, error) from error
        try:
            process = subprocess.Popen(  # returns as soon as the gate runs, after some milliseconds
                [sys.executable, "-I", "-S", _GATE, str(gate), str(os.getpid()), *command],
                env=dict(environ),
                cwd=directory,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(gate, *descriptors),
                start_new_session=True,
            )
        except OSError as error:
            os.close(opener)
            raise _cannot_start(rank, error) from error
        except BaseException:
            os.close(opener)
            raise
        finally:
            os.close(gate)
        started = cls(rank, process, guardian)
        guardian.add(process.pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(opener, b"g")
        os.close(opener)
        started._watch_end(asyncio.get_running_loop())
        return started

    async def connect(self, sink: Sink) -> None:
        """Begins to carry the output of the process to `sink`."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        await self._pump(self._process.stdout, sink, "stdout")
        await self._pump(self._process.stderr, sink, "stderr")

    def signal(self, signum: int) -> None:
        """Sends `signum` to the process and everything it started: SIGSTOP, SIGCONT and SIGKILL concern all of them."""
        signal_session(self.pid, signum)

    def tell(self, signum: int) -> None:
        """Sends `signum` to the training program, not to what that has started (`programs_of`).

        A signal that asks it to end is sent to the others once it has ended: to a shell that has started it, and to
        what it has left. Where the command is not started yet, that signal may be ignored: it is sent once more then.
        """
        is_at_gate = self._is_at_gate()  # before the signal
        programs = signal_programs(self.pid, signum)
        if signum in _ENDING and (is_at_gate or self.pid not in programs):
            self._stop_following()
            following = self._tell_again(signum) if is_at_gate else self._follow(programs, signum)
            self._following = asyncio.create_task(following)

    def _is_at_gate(self) -> bool:
        """Whether gate.py still runs, or has not even begun: with what this process ignores, as a shim does SIGTERM."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
            return arguments == [b""] or _GATE.encode() in arguments[:5]  # none: in the middle of an exec
        return False

    async def _tell_again(self, signum: int) -> None:
        while True:
            if self.code is not None or not self._is_at_gate():
                break
            await asyncio.sleep(_POLL_S)  # as in `release`
        if self.code is None:
            self._following = None  # so that `tell` does not cancel this task
            self.tell(signum)

    async def _follow(self, programs: Sequence[int], signum: int) -> None:
        while True:
            if not any(map(is_alive, programs)):
                break
            await asyncio.sleep(_POLL_S)  # as in `release`
        if self.code is None:
            self.signal(signum)

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    def ask_to_leave(self) -> None:
        """Sends SIGTERM to the training program, which is continued if it is stopped."""
        self.tell(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def resume_output(self) -> None:
        """The sink has room again."""
        for pump in self._pumps:
            pump.resume()

    def abandon_output(self) -> None:
        """Gives up the output that has not been read yet."""
        for pump in self._pumps:
            pump.abandon()

    async def release(self, grace_s: float) -> None:
        """To be called after the end: stops the descendants of the process, reads its last output and reaps it."""
        self._stop_following()
        if session_members(self.pid):
            self.signal(signal.SIGTERM)
            for _ in range(round(grace_s / _POLL_S)):
                if not session_members(self.pid):
                    break
                await asyncio.sleep(
                    _POLL_S
                )  # the kernel has no event for the end of processes that are not our children
        self.signal(signal.SIGKILL)
        for pump in self._pumps:
            await pump.finish(idle_s=0.5)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()  # `connect` was never called
        self._close_pidfd(asyncio.get_running_loop())
        self._guardian.drop(self.pid)
        if self.code is not None:
            self._process.wait()

    async def _pump(self, pipe: IO[bytes], sink: Sink, stream: Stream) -> None:
        pump = _Pump(sink, self.rank, stream)
        await asyncio.get_running_loop().connect_read_pipe(lambda: pump, pipe)
        self._pumps.append(pump)

    def _watch_end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Arranges that `_end` is called when the process has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (
            AttributeError,
            OSError,
        ):  # pidfd_open came with Linux 5.3 and may be forbidden: a thread waits instead, and the order is less exact
            threading.Thread(target=self._wait_in_thread, args=(loop,), daemon=True).start()
            return
        # One epoll reports the ends of all processes in their order, so the rank that failed first is seen first.
        self._pidfd = descriptor
        loop.add_reader(descriptor, self._on_end, loop)

    def _on_end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._close_pidfd(loop)
        self._end(self._ended_with())

    def _close_pidfd(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _wait_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._ended_with()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            loop.call_soon_threadsafe(self._end, code)

    def _ended_with(self) -> int:
        """Waits for the end of a process without reaping it, and returns its exit code."""
        try:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # other code in this process reaps all its children
            return 255
        assert result is not None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def _end(self, code: int) -> None:
        self.code = code
        self.ended.set()


def _cannot_start(rank: int, error: OSError) -> OSError:
    file = f" ({error.filename})" if error.filename else ""
    why = f"rank {rank} cannot be started: {reason_of(error)}{file}"
    return OSError(error.errno, coded(LaunchCode.PROCESS_NOT_STARTED, why))
