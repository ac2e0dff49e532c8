"""How a job ended, in words."""

from __future__ import annotations

from horovod.coordinator.core.ending import exit_code, explain
from horovod.worker.agent.supervisor import Outcome

HOSTS = ["a", "a", "b", "b"]


def outcome(rank: int, code: int | None, *, stopped: bool = False, ended_s: float = 0.0) -> Outcome:
    return Outcome(rank, 100 + rank, code, stopped, ended_s)


def test_success_needs_no_words() -> None:
    assert explain([outcome(1, 0), outcome(0, 0)], HOSTS) is None


def test_an_exit_code() -> None:
    assert explain([outcome(0, 0), outcome(2, 3)], HOSTS) == "Rank 2 on host b (pid 102) ended with exit code 3."


def test_a_signal_and_what_became_of_the_others() -> None:
    outcomes = [outcome(1, -9), outcome(0, 1), outcome(3, -15, stopped=True), outcome(2, -15, stopped=True)]
    assert explain(outcomes, HOSTS) == (
        "Rank 1 on host a (pid 101) ended by signal 9 (SIGKILL); after that rank 0 ended with exit code 1 and "
        "ranks 2 and 3 were stopped by this launcher."
    )


def test_a_killed_rank_goes_before_a_peer_that_noticed_at_once() -> None:
    assert explain([outcome(0, 1, ended_s=5.0), outcome(1, -9, ended_s=5.1)], HOSTS) == (
        "Rank 1 on host a (pid 101) ended by signal 9 (SIGKILL); after that rank 0 ended with exit code 1."
    )
    for late in (outcome(1, -9, ended_s=8.0), outcome(1, -15, stopped=True, ended_s=5.1)):
        assert str(explain([outcome(0, 1, ended_s=5.0), late], HOSTS)).startswith("Rank 0 on host a (pid 100) ended")


def test_a_rank_that_cannot_be_ended() -> None:
    assert "did not end even after SIGKILL" in str(explain([outcome(0, None)], HOSTS))


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code(code) for code in (0, 3, -9, -2, None)] == [0, 3, 137, 130, 255]
