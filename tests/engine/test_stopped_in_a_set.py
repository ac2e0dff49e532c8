"""Process sets of real processes make progress independently: a rank that stops holds up only its own sets."""

from __future__ import annotations

import os
import signal

import pytest
from processes import Processes

LARGE = 32_000_000  # takes far longer than it takes to notice that it has begun
OPTIONS = {"progress_timeout_ms": 600_000}  # who is stopped is waited for
SLOW, OTHER = 1, 2  # the sets


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stopped", [0, 2])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_set_goes_on_while_a_rank_of_another_is_stopped_in_its_data_phase(transport: str, stopped: int) -> None:
    """Rank 1 is in both sets: in the middle of the one's operation it begins and ends those of the other."""
    with Processes() as processes:
        ranks = processes.start(3)
        processes.form(ranks, transport, **OPTIONS)
        processes.add_set(SLOW, ranks, sorted((stopped, 1)), transport, **OPTIONS)
        processes.add_set(OTHER, ranks, sorted((2 - stopped, 1)), transport, **OPTIONS)
        victim, both, other = ranks[stopped], ranks[1], ranks[2 - stopped]
        both.tell("begin", elements=LARGE, process_set=SLOW)
        victim.tell("once", elements=LARGE, end="stop", process_set=SLOW)
        _, status = os.waitpid(victim.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        for elements in (100, 200_000):
            for rank in (both, other):
                rank.tell("loop", elements=elements, steps=20, process_set=OTHER)
            assert [rank.answer("done", "error", "wrong") for rank in (both, other)] == [20, 20]
        both.tell("look")
        assert both.answer("over") is False
        os.kill(victim.pid, signal.SIGCONT)
        both.tell("finish", process_set=SLOW)
        for rank in (both, victim):
            said = rank.next()
            assert said == {"done": 1, "right": True}, said
        for rank in ranks:  # and everybody together
            rank.tell("loop", elements=10_000, steps=3)
        assert [rank.answer("done", "error", "wrong") for rank in ranks] == [3, 3, 3]
        processes.close(ranks)
