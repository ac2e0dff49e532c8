"""A member looks at the others of its host: which of them are stopped, and for how long by its own looks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from resources import eventually

from horovod.base.processes import stopped_turns
from horovod.worker.runtime.host import shared_memory_domain
from horovod.worker.runtime.stopped_peers import StoppedPeers
from horovod.worker.runtime.world import Member, World

LIMIT_SECONDS = 3.0


@pytest.fixture
def others() -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(3)]
        yield started
        for one in started:
            one.kill()


def stop(*processes: subprocess.Popen[bytes]) -> None:
    for one in processes:
        before = stopped_turns(one.pid)
        one.send_signal(signal.SIGCONT)
        one.send_signal(signal.SIGSTOP)
        assert eventually(lambda one=one, before=before: stopped_turns(one.pid) not in (None, before))  # type: ignore[misc]


def peers_of(rank: int, pids: list[int]) -> StoppedPeers:
    domain = shared_memory_domain()
    members = [Member(number, number, 4, 0, 1, str(number), "h", domain, pid) for number, pid in enumerate(pids)]
    return StoppedPeers(World("job", 1, rank, tuple(members)), LIMIT_SECONDS, lambda rank: None)


def test_the_next_one_and_those_after_it_as_long_as_they_are_stopped(others: list[subprocess.Popen[bytes]]) -> None:
    peers = peers_of(2, [one.pid for one in others[:2]] + [os.getpid(), others[2].pid])
    stop(others[2], others[1])  # ranks 3 and 1
    looks = [peers.look() for _ in range(5)]
    assert looks == [[], [], [], [3], [3]]  # rank 0, between them, is looked at by rank 3 or in its place
    stop(others[0])
    assert [peers.look() for _ in range(4)][-1] == [3, 0, 1]
    others[0].kill()
    others[0].wait()
    assert peers.look() == [3, 1]
    others[2].send_signal(signal.SIGCONT)
    assert eventually(lambda: stopped_turns(others[2].pid) is None)
    assert peers.look() == []


def test_one_that_was_continued_meanwhile_has_run(others: list[subprocess.Popen[bytes]]) -> None:
    peers = peers_of(0, [os.getpid(), others[0].pid])
    stop(others[0])
    assert [peers.look() for _ in range(3)] == [[]] * 3
    stop(others[0])
    assert [peers.look() for _ in range(4)] == [[], [], [], [1]]
