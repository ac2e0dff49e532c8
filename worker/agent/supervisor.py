"""Starts the processes of a job on this host, watches them, and ends them when it is told to.

The supervisor does not decide what the end of a process means for the others. The scheduler does
(coordinator/core/elastic), and its decision comes back as a call of a method here. `start` starts another process of a
rank whose process has ended. `end_after_failure` gives the ranks a short grace, in which they notice by themselves that
a peer is gone and report it; then it stops them. `stop` first asks the ranks to end, and makes them end after a grace.
`drain` asks those of an elastic job to leave it in order.
Whatever happens, `run` returns with no process left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.base.processes import stopped_turns
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.output import Sink
from horovod.worker.agent.processes import TrainingProcess

FAILURE_GRACE_S = 3.0  # how long other ranks may go on after one has failed
STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL, after a rank has failed
REQUEST_GRACE_S = 10.0  # between the signals of `stop`: time for the ranks to write a checkpoint
_LEFTOVER_GRACE_S = 1.0
_REPLACED_OUTPUT_S = 20.0  # for the last output of a process in whose place another one is to start
_OUTPUT_GRACE_S = 1.0  # how long a stopped job waits for a console that takes no output
_KILL_DEADLINE_S = 10.0
_FOR_ALL = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGCONT, signal.SIGKILL)
LOOK_S = 1.0  # how often it is looked whether ranks that may be replaced are stopped
WAKE_S = 5.0  # how often processes that are left of a job whose work is done are continued


@dataclass(frozen=True)
class Slot:
    """The command to start as one rank, and its environment."""

    rank: int
    command: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)  # not in the repr, as it holds the job's token
    directory: str | None = None
    descriptors: tuple[int, ...] = ()  # descriptors that the command inherits, beside the standard three
    stdin: int | None = None  # the command's stdin; None: an empty one
    incarnation: int = 1  # counts the processes of this rank (coordinator/core/elastic/decision.py)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. `code` is negative for a signal, None when not even SIGKILL ended it."""

    rank: int
    pid: int
    code: int | None
    stopped: bool  # whether it ended after this supervisor had sent it a signal
    ended_s: float  # time of the event loop's clock
    lost: str = ""  # why the exit code is not known; "" where it is
    incarnation: int = 1


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
        look_s: float = LOOK_S,
        wake_s: float = WAKE_S,
    ) -> None:
        self.changed: Callable[[], None] = lambda: None  # called when a rank has started or ended
        self._sink = sink
        self._guardian = guardian
        self._failure_grace_s = failure_grace_s
        self._stop_grace_s = stop_grace_s
        self._request_grace_s = request_grace_s
        self._look_s = look_s
        self._wake_s = wake_s
        self._waking: asyncio.Task[None] | None = None
        self._stopped: dict[int, int] = {}  # pid of a process that is stopped -> how often it was given a processor
        self._processes: list[TrainingProcess] = []  # the latest of each rank
        self._incarnations: dict[int, int] = {}  # by rank, of the latest process
        self._outcomes: list[Outcome] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._releasing: set[TrainingProcess] = set()  # ended processes in whose place others are about to start
        self._is_open = False  # further processes may be started after the last one has ended
        self._wanted: asyncio.Queue[Slot | None] = asyncio.Queue()  # None: no more come
        self._signalled = False
        self._is_left = False  # drain() was called
        self._asked: set[int] = set()  # the processes, by pid, that were asked to leave
        self._leaving: dict[int, tuple[int, float]] = {}  # by rank: the incarnation that is to leave, and its grace
        self._requested = False
        self._hurry = asyncio.Event()
        self._draining = False
        self._ending: asyncio.Task[None] | None = None

    async def run(self, slots: Sequence[Slot], replaces_failed: bool = False) -> list[Outcome]:
        """Starts every slot. Returns how the processes ended, in the order in which they ended.

        replaces_failed: processes that `start` starts may follow, until `finish` or one of those that end the ranks.
        """
        loop = asyncio.get_running_loop()
        self._sink.room = lambda: self._call(loop)
        self._is_open = replaces_failed
        looking = asyncio.create_task(self._look()) if replaces_failed else None
        try:
            for slot in slots:
                if self._requested:
                    return self._outcomes  # stop() was called meanwhile; the processes that run are stopped below
                if self._is_left:
                    break
                await self._start(slot)
            while self._is_open and self._ending is None:
                if (wanted := await self._wanted.get()) is not None and self._ending is None:
                    await self._start(wanted)
            if self._watchers:
                await asyncio.wait(self._watchers)
        finally:
            if looking is not None:
                looking.cancel()
            await self._clean_up()
        return self._outcomes

    def start(self, slots: Sequence[Slot]) -> None:
        """Starts these processes, each once the earlier process of its rank has ended.

        Nothing happens for one whose incarnation is not greater than that of the rank's latest process.
        """
        for slot in slots:
            self._wanted.put_nowait(slot)

    def leave(self, ranks: Mapping[int, int], grace_s: float) -> None:
        """These processes, by rank and incarnation, are to end: by themselves, or by force after the grace."""
        for rank, incarnation in ranks.items():
            if self._leaving.get(rank, (0, 0.0))[0] != incarnation:
                self._leaving[rank] = (incarnation, grace_s)
                self._ask_to_leave(rank)

    def _ask_to_leave(self, rank: int) -> None:
        """Nothing happens where the process that is to leave has not been started, or has ended."""
        incarnation, grace_s = self._leaving.get(rank, (0, 0.0))
        process = next((one for one in self._processes if one.rank == rank and one.code is None), None)
        if process is not None and self._incarnations[rank] == incarnation:
            self._ask_once(process)
            asyncio.get_running_loop().call_later(grace_s, _kill, process)

    def _ask_once(self, process: TrainingProcess) -> None:
        """A second SIGTERM would end it at once."""
        if process.pid not in self._asked:
            self._asked.add(process.pid)
            process.ask_to_leave()

    def finish(self) -> None:
        """No process is started any more: one has done its work. Those that are left end by themselves, also one that
        was stopped (SIGSTOP) and that the others have gone on without: it is continued, to hear that all is done.
        """
        self._close()
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake())

    async def _look(self) -> None:
        """Whether others are to go on without a rank that is stopped is not decided here."""
        while True:
            await asyncio.sleep(self._look_s)
            seen = {process.pid: stopped_turns(process.pid) for process in self._processes if process.code is None}
            before, self._stopped = self._stopped, {pid: turns for pid, turns in seen.items() if turns is not None}
            if before or self._stopped:
                self.changed()

    async def _wake(self) -> None:
        while True:
            await asyncio.sleep(self._wake_s)
            self.forward(signal.SIGCONT)

    def _close(self) -> None:
        self._is_open = False
        self._wanted.put_nowait(None)
        for process in self._releasing:  # `run` waits for its output, which nobody may take
            asyncio.get_running_loop().call_later(_OUTPUT_GRACE_S, process.abandon_output)

    async def _start(self, slot: Slot) -> None:
        if slot.incarnation <= self._incarnations.get(slot.rank, 0):
            return
        for earlier in [process for process in self._processes if process.rank == slot.rank]:
            await self._release(earlier)
            if self._ending is not None or not self._is_open:  # meanwhile
                return
            self._processes.remove(earlier)
            before = self._incarnations[slot.rank]
            self._outcomes = [one for one in self._outcomes if one.rank != slot.rank or one.incarnation >= before]
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
        self._incarnations[slot.rank] = slot.incarnation
        self._ask_to_leave(slot.rank)
        self.changed()
        self._watchers.append(asyncio.create_task(self._watch(process, slot.incarnation)))
        await process.connect(self._sink)

    async def _release(self, ended: TrainingProcess) -> None:
        """Its output is read to the end, but for as long only as somebody takes it."""
        await ended.ended.wait()
        self._releasing.add(ended)
        given_up = asyncio.get_running_loop().call_later(_REPLACED_OUTPUT_S, ended.abandon_output)
        try:
            await ended.release(_LEFTOVER_GRACE_S)
        finally:
            given_up.cancel()
            self._releasing.discard(ended)

    @property
    def has_started(self) -> bool:
        """Whether any process was started."""
        return bool(self._incarnations)

    @property
    def started(self) -> int:
        """How many ranks have had a process."""
        return len(self._processes)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._requested

    @property
    def pids(self) -> dict[int, int]:
        """The process id of the latest process of each rank that was started."""
        return {process.rank: process.pid for process in self._processes}

    def states(self) -> list[dict[str, Any]]:
        """What a report says of each process, as fields of RankStatus (agents.proto): first those that have ended, in
        that order.
        """
        found: list[dict[str, Any]] = []
        for one in self._outcomes:
            state = {"rank": one.rank, "pid": one.pid, "ended": True, "stopped": one.stopped}
            found.append({**state, "incarnation": one.incarnation, **({} if one.code is None else {"code": one.code})})
        ended = {(one.rank, one.incarnation) for one in self._outcomes}
        for rank, pid in self.pids.items():
            incarnation = self._incarnations[rank]
            if (rank, incarnation) not in ended:
                turns = {"stopped_turns": self._stopped[pid]} if pid in self._stopped else {}
                found.append({"rank": rank, "pid": pid, "ended": False, "incarnation": incarnation, **turns})
        return found

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """How the ranks ended that have ended so far, in that order."""
        return self._outcomes

    def forward(self, signum: int) -> None:
        """Passes `signum` on to every rank that still runs: to its training program, and what stops, continues or kills
        to the children of that too.
        """
        for process in self._processes:
            if process.code is None:
                (process.signal if signum in _FOR_ALL else process.tell)(signum)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Sends `signum`, then SIGTERM, then SIGKILL, with a grace between. Each further call skips a grace.

        SIGKILL ends every rank now, whatever was asked before.
        """
        if signum == signal.SIGKILL:
            self._kill()
            return
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
        self._close()

    def _kill(self) -> None:
        self._requested = True
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.create_task(self._end(((signal.SIGKILL, _KILL_DEADLINE_S),)))
        self._close()

    def drain(self, grace_s: float) -> None:
        """Tells the ranks of an elastic job to leave it, and stops those that are still there after the grace."""
        if self._ending is None:
            self._signalled = self._is_left = True
            for process in self._processes:
                if process.code is None:
                    self._ask_once(process)
            steps = ((None, grace_s), (signal.SIGTERM, self._stop_grace_s), (signal.SIGKILL, _KILL_DEADLINE_S))
            self._ending = asyncio.create_task(self._end(steps))
        self.finish()

    def end_after_failure(self) -> None:
        """A rank has failed, here or on another host: stops the ranks that still run, after their grace."""
        if self._ending is None:
            grace_s, stop_s = self._failure_grace_s, self._stop_grace_s
            steps = ((None, grace_s), (signal.SIGTERM, stop_s), (signal.SIGKILL, _KILL_DEADLINE_S))
            self._ending = asyncio.create_task(self._end(steps))
        self._close()

    async def _watch(self, process: TrainingProcess, incarnation: int) -> None:
        await process.ended.wait()
        is_leaving = self._leaving.get(process.rank, (0, 0.0))[0] == incarnation
        now_s, is_stopped = asyncio.get_running_loop().time(), self._signalled or is_leaving
        self._outcomes.append(
            Outcome(process.rank, process.pid, process.code, is_stopped, now_s, incarnation=incarnation)
        )
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
        # The list may lose and gain processes meanwhile.
        while running := [process for process in self._processes if not process.ended.is_set()]:
            await running[0].ended.wait()

    async def _hurried(self) -> None:
        await self._hurry.wait()

    async def _clean_up(self) -> None:
        """Ends and reaps all processes, also when `run` was cancelled or could not start a slot."""
        if self._waking is not None:
            self._waking.cancel()
        if self._ending is not None:
            self._ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ending
        if any(not process.ended.is_set() for process in self._processes):
            await self._end(((signal.SIGTERM, self._stop_grace_s), (signal.SIGKILL, _KILL_DEADLINE_S)))
            if self._watchers:
                await asyncio.wait(self._watchers)
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


def _kill(process: TrainingProcess) -> None:
    if process.code is None:
        process.signal(signal.SIGKILL)
