"""Members of elastic jobs that stand still, and when the others go on without them. Without clock and socket."""

from __future__ import annotations

import re

import pytest
from error_codes import ends_with
from event_words import ACKNOWLEDGES_NOTHING
from test_elastic_worlds import Elastic

from horovod.base.errors import WorldCode
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.services.sights import Sights
from horovod.protos.v1 import agents_pb2
from horovod.protos.v1 import membership_pb2 as pb

JOB = "digits"


class Hung(Elastic):
    """Of members whose processes the coordinator sees."""

    def __init__(self, limit_s: float = 3.0, elastic: bool = True, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self._request["options"] = {"hung_seconds": str(limit_s)}
        if not elastic:
            self._request |= {"sizes": None, "size": self._request["sizes"][1]}  # type: ignore[index]
        self.stopped: dict[str, int] = {}  # by letter

    def stop(self, names: str) -> None:
        self.stopped.update({name: self.stopped.get(name, 0) for name in names})

    def look(self, seconds: float, names: str, silent: str = "") -> None:
        """As long as that, with a look each second. names: of all processes that can be seen."""
        for _ in range(round(seconds)):
            stopped = {self.member(name): turns for name, turns in self.stopped.items()}
            runs = {self.member(name) for name in names if name not in self.stopped}
            self.pass_time(1.0, runs=runs, stopped=stopped, silent={self.member(name) for name in silent})

    def lost(self) -> list[int]:
        return [rank for _, rank in self.gone]

    def refusal(self, name: str) -> str:
        events = self.told[self.member(name)]
        return next((event.refused.sentence for event in events if event.HasField("refused")), "")

    def accuse(self, witness: str, rank: int) -> None:
        report = pb.PeerLost(epoch=self.epoch, rank=rank)
        self.take(self.membership.peer_lost(self.member(witness), report, self.now_s))

    def testify(self, witness: str, rank: int, **words: bool) -> None:
        testimony = pb.Testimony(epoch=self.epoch, rank=rank, lives=True, **words)
        self.take(self.membership.testified(self.member(witness), testimony, self.now_s))

    def probes(self, name: str) -> int:
        return sum(event.HasField("probe") for event in self.told[self.member(name)])


# -- stopped -----------------------------------------------------------------------------------------------------------
def test_one_that_is_stopped_is_given_up_after_the_limit() -> None:
    story = Hung(limit_s=3.0, most=3)
    story.come_all("abc")
    story.stop("b")
    story.look(3, "abc")
    assert story.lost() == []
    story.look(1, "abc")
    assert story.lost() == [1]
    assert "has not run for 3 s" in story.goodbyes("a1")[0].sentence
    assert re.search(ends_with(WorldCode.DECLARED_LOST, "HOROVOD_ELASTIC_HUNG_SECONDS"), story.refusal("b"))
    story.again("ac")
    assert story.names("a") == "ac"


def test_one_that_ran_for_a_moment_is_not() -> None:
    story = Hung(most=2)
    story.come_all("ab")
    for turns in range(5):
        story.stopped["b"] = turns
        story.look(3, "ab")
    story.stopped.clear()
    story.look(1, "ab")
    story.stop("b")
    story.look(3, "ab")
    assert story.lost() == []


@pytest.mark.parametrize(("limit_s", "elastic"), [(0.0, True), (3.0, False)])
def test_nobody_is_given_up_without_a_limit(limit_s: float, elastic: bool) -> None:
    story = Hung(limit_s=limit_s, elastic=elastic, most=2)
    story.come_all("ab")
    assert story.membership.to_look_at(JOB) == []
    story.stop("b")
    story.look(100, "ab")
    story.testify("a", 1, stopped=True)
    assert story.lost() == []


def test_a_job_that_was_stopped_as_a_whole_goes_on_though_its_processes_are_continued_one_by_one() -> None:
    story = Hung(most=4)
    story.come_all("abcd")
    story.stop("abcd")
    story.look(100, "abcd")
    del story.stopped["a"]
    story.look(3, "abcd")
    assert story.lost() == []
    del story.stopped["b"], story.stopped["c"]
    story.look(1, "abcd")
    assert story.lost() == [3]


def test_a_spare_that_is_stopped_with_the_job_is_nobody_who_waits_for_its_end() -> None:
    story = Hung(most=2)
    story.come_all("ab")
    story.come("c")
    assert story.membership.to_look_at(JOB) == ["a1", "b1", "c1"]
    story.stop("abc")
    story.look(100, "abc")
    assert story.lost() == []
    del story.stopped["c"]
    story.look(4, "abc")
    assert story.lost() == [0, 1]
    assert story.names("c") == "c"


def test_members_elsewhere_show_that_they_run_by_an_answer() -> None:
    """The coordinator sees only b, which is stopped."""
    story = Hung(most=2)
    story.come_all("ab")
    story.stop("b")
    story.look(10, "")
    assert story.lost() == []
    assert story.probes("a") == 10
    assert story.probes("b") == 0
    story.look(4, "a")  # it answers
    assert story.lost() == [1]


def test_survivors_that_wait_already_are_asked_as_well() -> None:
    story = Hung(most=2)
    story.come_all("ab")
    story.stop("b")
    story.go("a")
    story.come("a")
    story.look(2, "")
    assert story.probes("a") == 2
    story.look(4, "a")
    assert story.lost() == [0, 1]
    assert story.names("a") == "a"


def test_a_judge_that_was_stopped_begins_anew() -> None:
    story = Hung(most=2)
    story.come_all("ab")
    story.stop("b")
    story.look(3, "ab")
    story.membership.restart_limits(story.now_s)
    story.look(3, "ab")
    assert story.lost() == []


def test_a_member_of_its_host_says_that_it_is_stopped() -> None:
    story = Hung(most=3)
    for name, namespace in [("a", "here"), ("b", "here"), ("c", "there")]:
        story.come(name, namespace=namespace)
    story.testify("c", 1, stopped=True)
    story.testify("a", 1)
    assert story.lost() == []
    story.testify("a", 1, stopped=True)
    assert story.lost() == [1]


def test_the_word_of_its_agent_that_it_has_ended_is_better() -> None:
    story = Hung(most=2)
    story.membership._agent_s = lambda job, rank: 0.5
    story.come_all("ab", host="h")
    story.stop("b")
    story.look(3, "ab")
    ended = RankEnded(JOB, 1, "h", ord("b"), "it was ended by SIGKILL", 0)
    story.disconnect("b1")
    story.take(story.membership.rank_ended(ended, story.now_s))
    assert "SIGKILL" in story.goodbyes("a1")[0].sentence


def test_an_agent_says_so_each_second() -> None:
    story = Hung(most=2)
    story.come("a", host="here", pid=7)
    story.come("b", host="there", pid=8)
    sights = Sights(lambda member_id, cause: None)

    def told(host: str, pid: int, turns: int | None) -> None:
        ranks = [agents_pb2.RankStatus(rank=1, pid=pid, stopped_turns=turns)]
        sights.told_by_agent(host, agents_pb2.JobReport(job=JOB, ranks=ranks), story.membership, story.now_s)

    def stopped() -> dict[str, int]:
        return dict(sights.of(JOB, story.membership, story.now_s).stopped)

    told("here", 8, 5)
    told("there", 7, 5)
    assert stopped() == {}
    told("there", 8, 5)
    assert stopped() == {"b1": 5}
    told("there", 8, None)
    assert stopped() == {}
    told("there", 8, 6)
    story.pass_time(3.0)
    assert stopped() == {}


def test_a_stop_that_an_agent_has_told_of_lasts_until_its_last_word() -> None:
    """After that the process may go on, which the next word says a second later."""
    story = Hung(limit_s=3.0, most=2)
    story.come_all("ab")
    stop = {"runs": {"a1"}, "stopped": {"b1": 5}}
    began_s = story.now_s + 0.5
    for seconds, word_s in ((0.5, 0.0), (1.0, 1.0), (1.0, 2.0), (1.4, 2.0)):
        story.pass_time(seconds, **stop, stopped_at_s={"b1": began_s + word_s})
        assert story.lost() == []
    story.pass_time(0.1, **stop, stopped_at_s={"b1": began_s + 3.0})
    assert story.lost() == [1]


def test_a_coordinator_that_sees_a_process_run_needs_no_word_of_its_agent() -> None:
    story = Hung(most=2)
    story.come("a", host="here", pid=7)
    story.come("b", host="here", pid=8)
    sights = Sights(lambda member_id, cause: None)
    ranks = [agents_pb2.RankStatus(rank=1, pid=8, stopped_turns=5)]
    sights.told_by_agent("here", agents_pb2.JobReport(job=JOB, ranks=ranks), story.membership, story.now_s)
    assert sights.of(JOB, story.membership, story.now_s).stopped == {"b1": 5}
    sights._processes.look = lambda members: ({"b1"}, {})  # type: ignore[method-assign]
    seen = sights.of(JOB, story.membership, story.now_s)
    assert (seen.stopped, "b1" in seen.runs) == ({}, True)


# -- cut off -----------------------------------------------------------------------------------------------------------
def test_a_host_that_acknowledges_nothing_to_a_peer_nor_to_the_coordinator_is_lost() -> None:
    story = Hung(limit_s=4.0, most=2)
    story.come_all("ab")
    assert story.membership.doubted(JOB) == []
    story.accuse("a", 1)
    assert story.membership.doubted(JOB) == ["a1", "b1"]
    story.look(2, "", silent="b")
    assert story.lost() == []
    story.look(1, "", silent="b")
    assert story.lost() == [1]
    assert ACKNOWLEDGES_NOTHING in story.goodbyes("a1")[0].sentence


def test_a_host_behind_the_same_link_of_which_no_peer_has_said_anything() -> None:
    story = Hung(limit_s=4.0, most=3)
    story.come_all("abc")
    story.accuse("a", 1)
    story.look(3, "", silent="bc")
    assert story.lost() == [1, 2]


def test_a_host_that_answers_now_and_then_is_not() -> None:
    story = Hung(limit_s=4.0, most=2)
    story.come_all("ab")
    story.accuse("a", 1)
    for _ in range(10):
        story.look(2, "", silent="b")
        story.look(1, "")
    assert story.lost() == []


def test_one_connection_that_acknowledges_nothing_is_no_reason() -> None:
    story = Hung(most=2)
    story.come_all("ab")
    story.look(100, "", silent="b")
    assert story.lost() == []


def test_a_member_whose_host_is_gone_before_it_has_its_world() -> None:
    story = Hung(limit_s=4.0, most=2)
    story.hold = True
    story.come_all("ab")
    received = story.membership.received
    story.membership.received = lambda member_id, epoch: None if member_id == "b1" else received(member_id, epoch)  # type: ignore[method-assign]
    story.form()
    assert story.membership.doubted(JOB) == ["b1"]
    story.look(3, "", silent="b")
    assert story.lost() == [1]


@pytest.mark.parametrize("is_accused_first", [False, True])
def test_one_that_leaves_and_hears_nothing_any_more_is_not_awaited_for_long(is_accused_first: bool) -> None:
    story = Hung(limit_s=4.0, most=3)
    story.come_all("abc")
    if is_accused_first:
        story.accuse("a", 2)
    story.go("c")
    if not is_accused_first:
        story.accuse("a", 2)
    story.go("a")
    story.go("b")
    story.come("a")
    story.look(8, "")
    assert not story.has_world("a2")  # nobody has accused b
    story.come("b")
    assert story.names("a") == "ab"


# -- who wakes up ------------------------------------------------------------------------------------------------------
def test_one_that_was_given_up_joins_as_new_once_another_world_stands() -> None:
    story = Hung(most=3)
    story.come_all("abc")
    story.stop("a")
    story.look(4, "abc")
    story.again("bc")
    assert story.names("b") == "bc"
    refused = story.attach("a1")
    assert refused is not None
    assert refused.reason == pb.REFUSAL_REASON_LOST
    story.stopped.clear()
    assert story.come("a") == ""
    assert story.parked("a")[-1]
    story.pass_time(2.0)
    story.again("bc")
    assert story.names("a") == "bca"
    assert (list(story.world("b2").newcomers), list(story.world("b3").newcomers)) == ([], [2])


def test_one_that_wakes_up_when_the_work_is_done_is_told_so() -> None:
    story = Hung(most=2)
    story.come_all("ab")
    story.stop("a")
    story.look(4, "ab")
    story.again("b")
    story.leave("b2")
    story.stopped.clear()
    assert re.search(ends_with(WorldCode.JOB_DONE), story.come("a"))
    assert story.come("c") == ""  # who has never been there begins anew


def test_one_that_is_back_before_another_world_stands_is_a_survivor() -> None:
    story = Hung(fewest=2, most=2)
    story.come_all("ab")
    story.stop("a")
    story.look(4, "ab")
    story.again("b")
    story.stopped.clear()
    story.come("a")
    assert story.names("a") == "ab"
    assert not story.world("a2").newcomers
