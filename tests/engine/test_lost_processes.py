"""Three ranks as real processes, on one "host" or on two; one is killed, stopped or exits in large operations.

The others raise, name the right rank, and build the next world in the same processes.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator

import pytest
import tiers
from error_codes import ends_with
from processes import Processes, RankProcess

from horovod.base.errors import OperationCode, code_of

ELEMENTS = 2_000_000
LARGE = 32_000_000  # takes far longer than it takes to notice that it has begun
ENDLESS = 1_000_000
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


def check_next_world(processes: Processes, ranks: list[RankProcess], transport: str) -> None:
    processes.form(ranks, transport)
    for rank in ranks:
        rank.tell("loop", elements=10_000, steps=5)
    assert [rank.answer("done", "error", "wrong") for rank in ranks] == [5] * len(ranks)
    processes.close(ranks)


def errors_of(survivors: list[RankProcess]) -> list[str]:
    return [rank.answer("error", "done", "wrong") for rank in survivors]


def named(ranks: list[RankProcess], victim: int) -> str:
    """What an error calls that rank, with or without a capital letter before it."""
    return f"ank {victim} (pid {ranks[victim].pid}) on host here"


@pytest.mark.longer
@pytest.mark.parametrize("elements", [100, ELEMENTS], ids=["small", "large"])
@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"])
def test_killed_at_any_point(processes: Processes, transport: str, elements: int) -> None:
    """Round after round in the surviving processes: a random rank dies at a random point, a new one replaces it."""
    chance = random.Random(f"{transport} {elements}")
    ranks = processes.start(3)
    for _ in range(tiers.pick(1, 5)):
        processes.form(ranks, transport)
        for rank in ranks:
            rank.tell("loop", elements=elements, steps=ENDLESS, report=True)
        victim = chance.randrange(3)
        for _ in range(chance.randrange(1, 6)):
            ranks[victim].answer("step")
        for _ in range(chance.randrange(200_000)):  # somewhere in the next step, or the one after it
            pass
        ranks[victim].process.kill()
        survivors = [rank for rank in ranks if rank is not ranks[victim]]
        for error in errors_of(survivors):
            assert re.search(ends_with(OperationCode.PEER_LOST, named(ranks, victim)), error)
        processes.close(survivors)
        check_next_world(processes, survivors, transport)
        ranks[victim] = processes.start(1)[0]


@pytest.mark.longer
@pytest.mark.parametrize(
    ("victim", "transport"), tiers.some([(victim, way) for way in ("shm", "tcp", "hosts") for victim in (0, 2)], 3)
)
def test_stopped(processes: Processes, transport: str, victim: int) -> None:
    """A stopped process keeps its connections and its memory; only time tells."""
    ranks = processes.start(3)
    processes.form(ranks, transport, progress_timeout_ms=1500)
    for number, rank in enumerate(ranks):
        rank.tell("once", elements=LARGE, end="stop" if number == victim else "")
    survivors = [rank for rank in ranks if rank is not ranks[victim]]
    for error in errors_of(survivors):
        assert re.search(ends_with(OperationCode.NO_PROGRESS, f"r{named(ranks, victim)}"), error)
    assert ranks[victim].process.poll() is None
    processes.close(survivors)
    check_next_world(processes, survivors, transport)
    os.kill(ranks[victim].pid, signal.SIGCONT)
    said = ranks[victim].answer("error", "done")  # awake again, it learns that the epoch is over
    assert code_of(said) in (OperationCode.NO_PROGRESS, OperationCode.PEER_LOST, OperationCode.SHUT_DOWN), said


@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"])
def test_ctrl_c_ends_a_wait_in_the_middle(processes: Processes, transport: str) -> None:
    """Of an operation with a rank that is stopped, long before the limit of five minutes.

    A thread that runs the operation itself gives it up, and tells the others why. One that only waits, while the
    background thread runs it, is free to go; the others learn of it when the rank leaves.
    """
    ranks = processes.start(3)
    processes.form(ranks, transport)
    for number, rank in enumerate(ranks):
        rank.tell("once", elements=LARGE, end="stop" if number == 2 else "")
    os.waitid(os.P_PID, ranks[2].pid, os.WSTOPPED)
    os.kill(ranks[0].pid, signal.SIGINT)
    assert ranks[0].answer("interrupted", "error", "done") is True
    processes.close(ranks[:1])
    said = ranks[1].answer("error", "done")
    assert code_of(said) in (OperationCode.INTERRUPTED, OperationCode.SHUT_DOWN), said
    processes.close(ranks[1:2])
    check_next_world(processes, ranks[:2], transport)
    os.kill(ranks[2].pid, signal.SIGCONT)
    ranks[2].answer("error", "done")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"])
def test_exits_in_the_middle(processes: Processes, transport: str, victim: int) -> None:
    """os._exit(): no destructor runs, nobody is told."""
    ranks = processes.start(3)
    processes.form(ranks, transport)
    for number, rank in enumerate(ranks):
        rank.tell("once", elements=LARGE, end="exit" if number == victim else "")
    survivors = [rank for rank in ranks if rank is not ranks[victim]]
    for error in errors_of(survivors):
        assert re.search(ends_with(OperationCode.PEER_LOST, named(ranks, victim)), error)
    assert ranks[victim].process.wait(60) == 3
    processes.close(survivors)
    check_next_world(processes, survivors, transport)


@pytest.mark.parametrize("elements", [100, ELEMENTS], ids=["small", "large"])
def test_a_loss_reaches_ranks_that_have_no_connection_to_the_lost_one(processes: Processes, elements: int) -> None:
    """In a sparse mesh rank 5 of 8 has connections to 1, 3, 4, 6 and 7; those tell 0 and 2."""
    ranks = processes.start(8)
    processes.form(ranks, "tcp", full_mesh_members=1)
    for rank in ranks:
        rank.tell("loop", elements=elements, steps=ENDLESS, report=True)
    for _ in range(3):
        ranks[5].answer("step")
    ranks[5].process.kill()
    survivors = [rank for rank in ranks if rank is not ranks[5]]
    for error in errors_of(survivors):
        assert re.search(ends_with(OperationCode.PEER_LOST, named(ranks, 5)), error)
    processes.close(survivors)
