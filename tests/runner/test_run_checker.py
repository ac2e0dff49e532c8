"""The checker of elastic runs (committed_work.py) itself: a good log breaks no rule, and each rule can be broken."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from committed_work import Record, check, read, value_of

TOTAL = 4


class Logs:
    """A log, written by hand: `log.rank("a", 0, 2, "begins", 3)` is process a, rank 0 of 2, in the current world."""

    def __init__(self, fewest: int = 1, anew: bool = False) -> None:
        self.records: list[Record] = []
        self.world = 1
        self._at = itertools.count()
        self.test("job", total=TOTAL, min=fewest, anew=anew)

    def add(self, who: str, what: str, **facts: Any) -> None:
        self.records.append({"at": next(self._at), "who": who, "what": what, **facts})

    def test(self, what: str, **facts: Any) -> None:
        self.add("test", what, **facts)

    def rank(self, who: str, rank: int, size: int, what: str, step: int, **facts: Any) -> None:
        place = {"world": self.world, "rank": rank, "size": size, "step": step, "value": value_of(step)}
        self.add(who, what, **place | facts)

    def all(self, who: str, what: str, step: int) -> None:
        """The same by the processes `who`, a letter each, in rank order."""
        for rank, one in enumerate(who):
            self.rank(one, rank, len(who), what, step)

    def kills(self, who: str) -> None:
        for one in who:
            self.test("faulted", whom=one, how="kill")

    def over(self, code: int, said: str = "") -> list[str]:
        """The rules that are broken."""
        self.test("over", code=code, said=said)
        return self.rules()

    def rules(self) -> list[str]:
        return [one.rule for one in check(self.records)]


def trained(who: str = "ab", step: int = 2, **options: Any) -> Logs:
    """A log in which these have begun, and committed this step."""
    log = Logs(**options)
    log.all(who, "begins", 0)
    log.all(who, "saves", step)
    return log


def done(log: Logs, who: str) -> Logs:
    log.all(who, "saves", TOTAL)
    log.all(who, "returns", TOTAL)
    return log


def next_world(log: Logs, who: str, step: int) -> Logs:
    log.world += 1
    log.all(who, "begins", step)
    return log


def test_a_run_without_faults_is_right() -> None:
    assert done(trained(), "ab").over(0) == []


def test_a_lost_process_and_its_replacement_are_right() -> None:
    log = trained()
    log.kills("b")
    log = next_world(log, "a", 2)
    log.all("a", "saves", 3)
    assert done(next_world(log, "ac", 3), "ac").over(0) == []


def test_a_commit_that_only_some_have_saved_may_be_lost_with_them() -> None:
    log = trained()
    log.rank("a", 0, 2, "saves", 3)
    log.kills("a")
    assert done(next_world(log, "bc", 2), "bc").over(0) == []


def test_a_stopped_process_may_commit_in_a_world_that_is_over() -> None:
    log = next_world(trained("abc"), "bc", 2)
    log.records.append({**log.records[1], "at": 1000, "what": "saves", "step": 3, "value": value_of(3)})
    assert done(log, "bc").over(0) == []


def test_a_process_that_was_left_out_gets_the_state_of_the_others() -> None:
    log = trained("abc", 2)
    log.rank("a", 0, 3, "saves", 3)
    log = next_world(log, "bc", 2)
    assert done(next_world(log, "bca", 2), "bca").over(0) == []


def test_what_a_process_commits_by_itself_after_a_stop_counts_for_nobody() -> None:
    log = trained()
    log.test("stopped", whom="b")
    log.rank("b", 1, 2, "saves", 3)
    assert done(next_world(log, "ab", 2), "ab").over(0) == []


def test_processes_may_be_killed_between_their_last_commit_and_the_return() -> None:
    log = trained("ab", TOTAL)
    log.kills("ab")
    for one in "ab":
        log.test("exit", whom=one, code=-9, said="")
    log.test("exit", whom="c", code=0, said="[job-done]")
    assert log.rules() == []


def test_a_lost_state_that_is_told_is_right() -> None:
    log = trained()
    log.kills("ab")
    assert log.over(79, "All is lost. [state-lost]") == []


def test_beginning_anew_is_right_where_it_is_allowed_and_nobody_holds_the_state() -> None:
    log = trained(anew=True)
    log.kills("ab")
    assert done(next_world(log, "cd", 0), "cd").over(0) == []


def test_a_crash_after_the_work_is_done_may_fail_the_job() -> None:
    log = done(trained(), "ab")
    log.add("b", "fails", where="after its work is done")
    assert log.over(139) == []


# -- each rule can be broken -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [value_of(2), value_of(4)], ids=["a step is lost", "a step counts twice"])
def test_values(value: int) -> None:
    log = trained()
    log.rank("a", 0, 2, "saves", 3, value=value)
    assert done(log, "ab").over(0) == ["each step counts once"]


def test_beginnings_of_ranks() -> None:
    log = trained()
    log.world += 1
    log.rank("a", 0, 2, "begins", 2)
    log.rank("b", 1, 2, "begins", 3)
    assert done(log, "ab").over(0) == ["ranks begin alike"]


def test_two_processes_of_one_rank() -> None:
    log = trained()
    log.world += 1
    log.rank("a", 0, 2, "begins", 2)
    log.rank("b", 0, 2, "begins", 2)
    assert done(log, "ab").over(0) == ["ranks are processes"]


def test_sizes() -> None:
    log = trained(fewest=2)
    log.kills("b")
    assert done(next_world(log, "a", 2), "a").over(0) == ["no world is too small"]


@pytest.mark.parametrize("anew", [False, True])
def test_a_world_at_step_0(anew: bool) -> None:
    """Also where the training may begin anew, as long as a process holds the state."""
    log = trained(anew=anew)
    log.kills("a")
    rules = done(next_world(log, "cd", 0), "cd").over(0)
    assert rules == ["a world begins at 0 only where nothing was committed"]


def test_a_world_that_goes_back() -> None:
    log = trained("ab", 3)
    log.kills("ab")
    assert done(next_world(log, "cd", 1), "cd").over(0) == ["no world goes back"]


def test_a_process_that_goes_back_behind_its_own_commit() -> None:
    log = trained()
    log.rank("a", 0, 2, "saves", 3)
    assert done(next_world(log, "ab", 2), "ab").over(0) == ["nobody goes back behind its own commit"]


def test_work_that_is_done_again() -> None:
    log = done(trained(), "ab")
    log.kills("b")
    rules = done(next_world(log, "c", TOTAL), "c").over(0)
    assert rules == ["work that is done stays done"]


def test_a_member_that_lost_others_in_the_last_step_may_end() -> None:
    log = trained("abc", TOTAL)
    log.rank("a", 0, 3, "returns", TOTAL)
    log.kills("b")
    assert done(next_world(log, "c", TOTAL), "c").over(0) == []


def test_a_function_that_returns_too_early() -> None:
    log = trained()
    log.all("ab", "returns", 3)
    assert log.over(0) == ["all steps are taken", "all steps are taken", "0 is for work that is done"]


def test_exit_code_0_without_work() -> None:
    assert trained().over(0) == ["0 is for work that is done"]


def test_a_failure_without_a_sentence() -> None:
    log = trained()
    log.kills("a")
    assert log.over(1) == ["a failure is told", "a job that can go on does"]


def test_a_failure_of_a_job_that_could_go_on() -> None:
    log = trained()
    log.kills("a")
    assert log.over(1, "Too few. [too-few-processes]") == ["a job that can go on does"]


def test_a_failure_after_the_work_is_done() -> None:
    assert done(trained(), "ab").over(255, "Lost. [agent-lost]") == ["work that is done ends well"]


def test_a_process_that_ends_badly() -> None:
    log = done(trained(), "ab")
    log.test("exit", whom="a", code=0, said="")
    log.test("exit", whom="b", code=1, said="")
    assert log.rules() == ["who is not disturbed ends well"]


def test_processes_that_give_up() -> None:
    log = trained()
    log.kills("ab")
    for one in "ab":
        log.test("exit", whom=one, code=-9, said="")
    assert log.rules() == ["a job that can go on does"]


def test_a_state_that_is_not_lost() -> None:
    log = trained()
    log.kills("a")
    assert log.over(79, "All is lost. [state-lost]") == ["the state is lost only with all that hold it"]


def test_a_state_that_never_was() -> None:
    log = Logs()
    log.all("ab", "begins", 0)
    log.kills("ab")
    assert log.over(79, "All is lost. [state-lost]") == ["the state is lost only if there was one"]


def test_processes_that_are_left() -> None:
    log = done(trained(), "ab")
    log.test("runs", still=["7: python train.py"])
    assert log.over(0) == ["after the end nothing runs"]


def test_a_run_that_does_not_end() -> None:
    assert trained().rules() == ["a job ends"]


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "2.log").write_text('{"at": 2, "what": "saves"}\n{"at": 3, "wh')
    (tmp_path / "1.log").write_text('{"at": 1, "what": "begins"}\n')
    assert [record["what"] for record in read(tmp_path)] == ["begins", "saves"]
