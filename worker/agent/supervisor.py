"""Starts the processes of a job on this host, watches them, and ends them when it is told to.

The supervisor does not decide what the end of a process means for the others. The scheduler does
(coordinator/core/elastic), and its decision comes back as a call of a method here. `end_after_failure` gives the ranks
a short grace, in which they notice by themselves that a peer is gone and report it; then it stops them. `stop` first
asks the ranks to end, and makes them end after a grace. Whatever happens, `run` returns with no process left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.output import Sink
from horovod.worker.agent.processes import TrainingProcess

FAILURE_GRACE_S = 3.0  # how long other ranks may go on after one has failed
STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL, after a rank has failed
REQUEST_GRACE_S = 10.0  # between the signals of `stop`: time for the ranks to write a checkpoint
_LEFTOVER_GRACE_S = 1.0
_OUTPUT_GRACE_S = 1.0  # how long a stopped job waits for a console that takes no output
_KILL_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Slot:
    """The command to start as one rank, and its environment."""

    rank: int
    command: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)  # not in the repr, as it holds the job's token
    directory: str | None = None
    descriptors: tuple[int, ...] = ()  # descriptors that the command inherits, beside the standard three
    stdin: int | None = None  # the command's stdin; None: an empty one


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. `code` is negative for a signal, None when not even SIGKILL ended it."""

    rank: int
    pid: int
    code: int | None
    stopped: bool  # whether it ended after this supervisor had sent it a signal
    ended_s: float  # time of the event loop's clock
    lost: str = ""  # why the exit code is not known; "" where it is


_Steps = tuple[tuple[int | None, float], ...]


class Supervisor:
    """Call `run` once. The other methods are for signal handlers and callbacks of the same event loop."""

    def __init__(
        self,
        sink: Sink,
        guardian: Guardian,
        *,
        failure_grace_s: float = FAILURE_GRACE_S,
        stop_grace_s: float = STOP_GRACE_S,
        request_grace_s: float = REQUEST_GRACE_S,
    ) -> None:
        self.changed: Callable[[], None] = lambda: None  # called when a rank has started or ended
        self._sink = sink
        self._guardian = guardian
        self._failure_grace_s = failure_grace_s
        self._stop_grace_s = stop_grace_s
        self._request_grace_s = request_grace_s
        self._processes: list[TrainingProcess] = []
        self._outcomes: list[Outcome] = []
        self._signalled = False
        self._requested = False
        self._hurry = asyncio.Event()
        self._draining = False
        self._ending: asyncio.Task[None] | None = None

    async def run(self, slots: Sequence[Slot]) -> list[Outcome]:
        """Starts every slot. Returns how the ranks ended, in the order in which they ended."""
        loop = asyncio.get_running_loop()
        self._sink.room = lambda: self._call(loop)
        watchers: list[asyncio.Task[None]] = []
        try:
            for slot in slots:
                if self._requested:
                    return self._outcomes  # stop() was called meanwhile; the processes that run are stopped below
                process = TrainingProcess.start(
                    slot.rank,
                    slot.command,
                    slot.environ,
                    self._guardian,
                    slot.directory,
                    slot.descriptors,
                    slot.stdin,
                )
                self._processes.append(process)
                self.changed()
                watchers.append(asyncio.create_task(self._watch(process)))
                await process.connect(self._sink)
            await asyncio.wait(watchers)
        finally:
            await self._clean_up(watchers)
        return self._outcomes

    @property
    def started(self) -> int:
        """How many processes were started."""
        return len(self._processes)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._requested

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each rank that was started."""
        return {process.rank: process.pid for process in self._processes}

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """How the ranks ended that have ended so far, in that order."""
        return self._outcomes

    def forward(self, signum: int) -> None:
        """Passes `signum` on to every rank that still runs."""
        for process in self._processes:
            if process.code is None:
                process.signal(signum)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Sends `signum`, then SIGTERM, then SIGKILL, with a grace between. Each further call skips a grace."""
        if self._draining:
            self._requested = True
            self._abandon_output_soon()
            return
        if self._requested:
            self._hurry.set()
            return
        self._requested = True
        if self._ending is not None:
            self._ending.cancel()
        first: _Steps = () if signum == signal.SIGTERM else ((signum, self._request_grace_s),)
        steps = (*first, (signal.SIGTERM, self._request_grace_s), (signal.SIGKILL, _KILL_DEADLINE_S))
        self._ending = asyncio.create_task(self._end(steps))

    def kill(self) -> None:
        """Ends every rank now, whatever was asked before."""
        self._requested = True
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.create_task(self._end(((signal.SIGKILL, _KILL_DEADLINE_S),)))

    def end_after_failure(self) -> None:
        """A rank has failed, here or on another host: stops the ranks that still run, after their grace."""
        if self._ending is None:
            grace_s, stop_s = self._failure_grace_s, self._stop_grace_s
            steps = ((None, grace_s), (signal.SIGTERM, stop_s), (signal.SIGKILL, _KILL_DEADLINE_S))
            self._ending = asyncio.create_task(self._end(steps))

    async def _watch(self, process: TrainingProcess) -> None:
        await process.ended.wait()
        now_s = asyncio.get_running_loop().time()
        self._outcomes.append(Outcome(process.rank, process.pid, process.code, self._signalled, now_s))
        self.changed()

    async def _end(self, steps: _Steps) -> None:
        """Sends the signals of `steps`. The wait after each ends when all ranks have ended or `stop` is called."""
        for signum, wait_s in steps:
            if signum is not None:
                self._signalled = True
                self.forward(signum)
                self.forward(signal.SIGCONT)  # a process that SIGSTOP has stopped acts on no signal but SIGKILL
            self._hurry.clear()
            waits = [asyncio.create_task(self._all_ended())]
            if signum != signal.SIGKILL:
                waits.append(asyncio.create_task(self._hurried()))
            try:
                await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if all(process.code is not None for process in self._processes):
                return
        # Only a process stuck in the kernel gets here. Nothing more can be done, and a longer wait changes nothing.
        for process in self._processes:
            process.ended.set()

    async def _all_ended(self) -> None:
        for process in self._processes:
            await process.ended.wait()

    async def _hurried(self) -> None:
        await self._hurry.wait()

    async def _clean_up(self, watchers: Sequence[asyncio.Task[None]]) -> None:
        """Ends and reaps all processes, also when `run` was cancelled or could not start a slot."""
        if self._ending is not None:
            self._ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ending
        if any(not process.ended.is_set() for process in self._processes):
            await self._end(((signal.SIGTERM, self._stop_grace_s), (signal.SIGKILL, _KILL_DEADLINE_S)))
            if watchers:
                await asyncio.wait(watchers)
        self._draining = True
        if self._requested:
            self._abandon_output_soon()
        await asyncio.gather(*(process.release(_LEFTOVER_GRACE_S) for process in self._processes))

    def _abandon_output_soon(self) -> None:
        for process in self._processes:
            asyncio.get_running_loop().call_later(_OUTPUT_GRACE_S, process.abandon_output)

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called in the writer's thread when the sink has room."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        for process in self._processes:
            process.resume_output()
