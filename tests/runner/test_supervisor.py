"""Supervisor in this process: the ends that a command line cannot bring about."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from error_codes import ends_with
from resources import descriptors, eventually

from horovod.base.errors import LaunchCode
from horovod.protos.v1 import agents_pb2 as pb
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.output import Stream
from horovod.worker.agent.supervisor import Slot, Supervisor

UP = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]


class Collector:
    """A sink that keeps everything and calls `heard` for each piece."""

    def __init__(self) -> None:
        self.room: Callable[[], None] = lambda: None
        self.heard: Callable[[], None] = lambda: None
        self.shown: dict[tuple[int, Stream], bytes] = {}
        self.finished: set[tuple[int, Stream]] = set()

    def feed(self, rank: int, stream: Stream, data: bytes) -> bool:
        self.shown[rank, stream] = self.shown.get((rank, stream), b"") + data
        self.heard()
        return True

    def finish(self, rank: int, stream: Stream) -> None:
        self.finished.add((rank, stream))


@pytest.fixture
def guardian() -> Iterator[Guardian]:
    before = set(psutil.Process().children(recursive=True))  # of other tests in this process, which keep servers
    with Guardian() as guardian:
        yield guardian
        children = set(psutil.Process().children(recursive=True)) - before
        assert [child.pid for child in children] == [guardian.pid]


def slot(rank: int, command: list[str] = UP) -> Slot:
    return Slot(rank, command, dict(os.environ))


def test_outcomes_come_in_the_order_of_the_ends(guardian: Guardian, tmp_path: Path) -> None:
    fifo = str(tmp_path / "pid")
    os.mkfifo(fifo)
    first = [sys.executable, "-c", f"import os; print(os.getpid(), file=open({fifo!r}, 'w'))"]
    # A pidfd is readable from the end on; a pipe is closed somewhat before.
    wait = "select.select([os.pidfd_open(int(open(sys.argv[1]).read()))], [], [])"
    second = [sys.executable, "-c", f"import os, select, sys; {wait}; print('last')", fifo]
    sink = Collector()
    outcomes = asyncio.run(Supervisor(sink, guardian).run([slot(0, second), slot(1, first)]))
    assert [(outcome.rank, outcome.code, outcome.stopped) for outcome in outcomes] == [(1, 0, False), (0, 0, False)]
    assert sink.shown == {(0, "stdout"): b"last\n"}
    assert len(sink.finished) == 4


def test_a_kernel_without_pidfds_will_do(guardian: Guardian, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refused)
    commands = [[sys.executable, "-c", f"exit({code})"] for code in (0, 3)]
    slots = [slot(rank, command) for rank, command in enumerate(commands)]
    outcomes = asyncio.run(Supervisor(Collector(), guardian).run(slots))
    assert {outcome.rank: outcome.code for outcome in outcomes} == {0: 0, 1: 3}


def test_asked_to_stop_before_the_start_it_starts_nothing(guardian: Guardian) -> None:
    async def run() -> list[object]:
        agent = Supervisor(Collector(), guardian)
        agent.stop()
        return list(await agent.run([slot(0), slot(1)]))

    assert asyncio.run(run()) == []


def test_asked_to_stop_by_the_first_rank_it_stops_all(guardian: Guardian) -> None:
    sink = Collector()

    async def run() -> list[int | None]:
        agent = Supervisor(sink, guardian)

        def stop() -> None:
            sink.heard = lambda: None  # asked again, it would make haste
            agent.stop(signal.SIGTERM)

        sink.heard = stop
        return [outcome.code for outcome in await agent.run([slot(rank) for rank in range(4)])]

    assert set(asyncio.run(run())) == {-signal.SIGTERM}


def test_a_failure_ends_nobody_else_until_the_scheduler_says_so(guardian: Guardian) -> None:
    sink = Collector()

    async def run() -> list[tuple[int, int | None]]:
        supervisor = Supervisor(sink, guardian, failure_grace_s=0.01)
        failed, heard = asyncio.Event(), asyncio.Event()
        supervisor.changed = lambda: failed.set() if supervisor.outcomes else None
        sink.heard = heard.set
        job = asyncio.ensure_future(supervisor.run([slot(0), slot(1, ["false"])]))
        await failed.wait()
        await heard.wait()
        assert not (await asyncio.wait([job], timeout=0.3))[0]
        supervisor.end_after_failure()
        return [(outcome.rank, outcome.code) for outcome in await job]

    assert asyncio.run(run()) == [(1, 1), (0, -signal.SIGTERM)]


@pytest.mark.parametrize(
    "end", [Supervisor.stop, lambda supervisor: supervisor.stop(signal.SIGKILL), Supervisor.end_after_failure]
)
def test_an_end_does_not_wait_for_output_that_nobody_takes(
    guardian: Guardian, end: Callable[[Supervisor], None]
) -> None:
    """A failed process waits for its output to be read before another one takes its place."""

    class Full(Collector):
        def feed(self, rank: int, stream: Stream, data: bytes) -> bool:
            return super().feed(rank, stream, data) and rank != 0

    async def run() -> list[tuple[int, int | None]]:
        sink = Full()
        supervisor = Supervisor(sink, guardian, failure_grace_s=0.01, request_grace_s=1.0)
        failed, heard = asyncio.Event(), asyncio.Event()
        supervisor.changed = lambda: failed.set() if supervisor.outcomes else None
        sink.heard = lambda: heard.set() if len(sink.shown) == 2 else None
        failing = [sys.executable, "-c", "print('x' * 300000); raise SystemExit(3)"]
        job = asyncio.ensure_future(supervisor.run([slot(0, failing), slot(1)], replaces_failed=True))
        await heard.wait()
        os.kill(supervisor.pids[0], signal.SIGKILL)  # its pipe is full
        await failed.wait()
        supervisor.start([replace(slot(0), incarnation=2)])
        while not supervisor._releasing:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        end(supervisor)
        return [(outcome.rank, outcome.incarnation) for outcome in await job]

    assert asyncio.run(run()) == [(0, 1), (1, 1)]


def test_processes_follow_each_other_as_one_rank(guardian: Guardian) -> None:
    async def run() -> list[tuple[int, int, int | None]]:
        supervisor = Supervisor(Collector(), guardian)
        changed = asyncio.Event()
        supervisor.changed = changed.set
        job = asyncio.ensure_future(supervisor.run([slot(0, ["false"]), slot(1)], replaces_failed=True))
        for incarnation in (2, 3):
            while not any(state["ended"] and state["incarnation"] == incarnation - 1 for state in supervisor.states()):
                changed.clear()
                await changed.wait()
            supervisor.start([replace(slot(0, ["false"]), incarnation=incarnation)])
            supervisor.start([replace(slot(0), incarnation=incarnation - 1)])  # an earlier one, told late
        while not any(state["ended"] and state["incarnation"] == 3 for state in supervisor.states()):
            changed.clear()
            await changed.wait()
        assert not job.done()  # it would start others
        assert [state["incarnation"] for state in supervisor.states() if state["rank"] == 0] == [2, 3]
        supervisor.finish()
        supervisor.stop()
        return [(outcome.rank, outcome.incarnation, outcome.code) for outcome in await job]

    assert asyncio.run(run()) == [(0, 2, 1), (0, 3, 1), (1, 1, -signal.SIGTERM)]


def test_one_that_is_stopped_is_reported_for_as_long_as_it_is(guardian: Guardian) -> None:
    async def run() -> list[bool]:
        supervisor = Supervisor(Collector(), guardian, look_s=0.02)
        changed = asyncio.Event()
        supervisor.changed = changed.set
        job = asyncio.ensure_future(supervisor.run([slot(0)], replaces_failed=True))
        seen: list[bool] = []

        async def is_told(stopped: bool) -> None:
            while not (states := supervisor.states()) or ("stopped_turns" in states[0]) is not stopped:
                changed.clear()
                await changed.wait()
            pb.RankStatus(**states[0])
            seen.append(stopped)

        await is_told(False)
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            supervisor.forward(signum)
            await is_told(signum == signal.SIGSTOP)
        supervisor.stop()
        await job
        return seen

    assert asyncio.run(run()) == [False, True, False]


def test_one_that_is_stopped_when_the_work_is_done_is_continued(guardian: Guardian) -> None:
    async def run() -> list[int | None]:
        supervisor = Supervisor(Collector(), guardian, wake_s=0.05)
        started = asyncio.Event()
        supervisor.changed = started.set
        job = asyncio.ensure_future(supervisor.run([slot(0, ["sh", "-c", "kill -STOP $$"])], replaces_failed=True))
        await started.wait()
        supervisor.finish()
        return [outcome.code for outcome in await job]

    assert asyncio.run(run()) == [0]


def test_a_slot_that_cannot_be_started_leaves_none_of_the_others(guardian: Guardian) -> None:
    slots = [slot(0), replace(slot(1), directory="/no/such/folder")]
    with pytest.raises(FileNotFoundError, match=ends_with(LaunchCode.PROCESS_NOT_STARTED, "rank 1", "/no/such/folder")):
        asyncio.run(Supervisor(Collector(), guardian).run(slots))


def test_a_cancelled_run_leaves_nothing(guardian: Guardian) -> None:
    sink = Collector()

    async def run() -> None:
        job = asyncio.ensure_future(Supervisor(sink, guardian).run([slot(0), slot(1)]))

        def cancel() -> None:
            sink.heard = lambda: None  # a second one would interrupt the clearing up
            job.cancel()

        sink.heard = cancel
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(run())


def test_no_descriptor_stays_open(guardian: Guardian) -> None:
    asyncio.run(Supervisor(Collector(), guardian).run([slot(0, ["true"])]))
    gc.collect()
    before = descriptors()
    for _ in range(3):
        asyncio.run(Supervisor(Collector(), guardian).run([slot(0, ["true"]), slot(1, ["false"])]))
    assert eventually(lambda: descriptors() <= before)


# Takes its time after SIGTERM, with a child that must not hear of it: a worker that loads data, for example. Both write
# to one pipe, each its line in one piece. signal.pause() would miss a signal that comes just before it.
TAKES_ITS_TIME = r"""
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", r"import os, signal; os.write(1, b'up\n'); signal.pause()"])
def asked(signum, frame):
    print("asked", child.poll(), flush=True)
    if LEAVES:
        child.kill()
        sys.exit(143)
signal.signal(signal.SIGTERM, asked)
os.write(1, b"up\n")
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("way", ["leave", "drain"])
def test_a_process_that_is_to_leave_in_its_first_moments_does(guardian: Guardian, way: str) -> None:
    """Until its command runs it ignores SIGTERM, as the shim does that has started it."""
    supervisor = Supervisor(Collector(), guardian)

    def ask() -> None:
        if supervisor.pids and not supervisor.outcomes:
            supervisor.leave({0: 1}, 600) if way == "leave" else supervisor.drain(600)

    supervisor.changed = ask
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        outcomes = asyncio.run(asyncio.wait_for(supervisor.run([slot(0)]), 60))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [outcome.code for outcome in outcomes] == [-signal.SIGTERM]


@pytest.mark.parametrize(("leaves", "grace_s", "code"), [(True, 600, 143), (False, 0.2, -9)])
def test_a_process_whose_slot_is_taken_back_gets_a_grace(
    guardian: Guardian, leaves: bool, grace_s: float, code: int
) -> None:
    sink = Collector()
    supervisor = Supervisor(sink, guardian)

    async def run() -> None:
        up = asyncio.Event()
        sink.heard = lambda: up.set() if sink.shown.get((1, "stdout"), b"").count(b"up\n") == 2 else None
        command = [sys.executable, "-c", TAKES_ITS_TIME.replace("LEAVES", str(leaves))]
        job = asyncio.ensure_future(supervisor.run([slot(0), slot(1, command)], replaces_failed=True))
        supervisor.leave({1: 2}, 0)  # another process of that rank, of which nothing was heard
        await up.wait()
        supervisor.leave({1: 1}, grace_s)
        supervisor.leave({1: 1}, 0)  # told once more
        ended = asyncio.Event()
        supervisor.changed = ended.set
        await ended.wait()
        assert [(one.rank, one.code, one.stopped) for one in supervisor.outcomes] == [(1, code, True)]
        supervisor.stop()
        await job
        assert not leaves or sink.shown[1, "stdout"] == b"up\nup\nasked None\n"

    asyncio.run(run())
