"""Worlds of elastic jobs: when one forms, who is in it, and how it changes. Without clock and socket."""

from __future__ import annotations

import re

import pytest
from error_codes import ends_with
from membership_story import SECRET, Story

from horovod.base.errors import WorldCode, code_of
from horovod.coordinator.core.ending import Attendance, RankEnded
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.core.world.rendezvous import DECISION_S
from horovod.protos.v1 import membership_pb2 as pb


class Elastic(Story):
    """Of one elastic job. A process has a letter; each of its attempts to join is a member: the letter and a number."""

    def __init__(self, fewest: int = 1, most: int = 4, size: int = 0, settle_s: float = 1.0) -> None:
        super().__init__()
        self._request = {"sizes": (fewest, most), "size": size, "settle_s": settle_s}
        self._attempts: dict[str, int] = {}

    def member(self, name: str) -> str:
        return f"{name}{self._attempts[name]}"

    def come(self, name: str, **fields: object) -> str:
        """The process joins, as the member of its last world where it was in one. The refusal, or ""."""
        old = self.member(name) if name in self._attempts else None
        self._attempts[name] = self._attempts.get(name, 0) + 1
        if old is not None and self.has_world(old):
            fields["rejoin"] = old
        return self.join(self.member(name), **{"pid": sum(name.encode()), **self._request, **fields})

    def come_all(self, names: str, **fields: object) -> None:
        for name in names:
            assert self.come(name, **fields) == ""

    def go(self, name: str) -> None:
        """The process leaves its world, to join the next one."""
        self.leave(self.member(name), returns=True)

    def again(self, names: str) -> None:
        """All leave before the first of them joins again."""
        for name in names:
            self.go(name)
        for name in names:
            assert self.come(name) == ""

    def names(self, name: str) -> str:
        """The members of the latest world of the process, by rank."""
        return "".join(one.member_id[0] for one in self.world(self.member(name)).members)

    def newcomers(self, name: str) -> list[int]:
        events = self.told.get(self.member(name), [])
        return [event.newcomers.count for event in events if event.HasField("newcomers")]

    def parked(self, name: str) -> list[bool]:
        events = self.told.get(self.member(name), [])
        return [event.progress.parked for event in events if event.HasField("progress")]


# -- the first world ---------------------------------------------------------------------------------------------------
def test_it_begins_at_once_with_the_most() -> None:
    story = Elastic(most=3)
    story.come_all("abc")
    assert story.names("c") == "abc"
    assert story.world("a1").sizes == pb.Sizes(fewest=1, most=3)


def test_it_begins_with_fewer_once_nobody_new_has_come_for_the_settle_time() -> None:
    story = Elastic(fewest=2, settle_s=1.0)
    story.come_all("a")
    story.pass_time(5.0)
    story.come_all("b")
    story.pass_time(0.9)
    story.come_all("c")
    story.pass_time(0.9)
    assert not story.has_world("a1")
    assert story.looks[-2] == (pytest.approx(6.9), "digits")
    story.pass_time(0.2)
    assert story.names("a") == "abc"


def test_it_waits_for_as_many_as_its_launcher_has_started() -> None:
    story = Elastic(fewest=1, size=3)
    story.come_all("ab")
    story.pass_time(9.0)
    assert not story.has_world("a1")
    assert "1 more" in story.progress("a1")[-1]
    story.come_all("c")
    assert story.names("a") == "abc"


def test_what_is_missing_is_told() -> None:
    story = Elastic(fewest=3, most=4, size=4)
    story.come_all("ab")
    story.pass_time(1.0)
    assert "2 more" in story.progress("a1")[-1]
    story.pass_time(11.0)
    story.pass_time(1.0)
    assert "1 more" in story.progress("a1")[-1]
    story.come_all("c")
    story.pass_time(11.0)
    story.lose("a1")
    story.again("bc")
    story.pass_time(1.0)
    assert "1 more" in story.progress("b2")[-1]


def test_it_begins_without_those_that_are_too_late() -> None:
    story = Elastic(fewest=2, size=3)
    story.come_all("ab")
    story.pass_time(11.0)
    assert story.names("a") == "ab"
    story.come_all("c")
    assert story.parked("c")[-1]


def test_the_numbers_of_a_launcher_order_it() -> None:
    story = Elastic(most=3)
    for name, number in [("b", 4), ("c", 7), ("a", 2)]:
        story.come(name, rank=number)
    assert story.names("a") == "abc"


# -- members are lost --------------------------------------------------------------------------------------------------
def test_the_others_go_on_without_waiting() -> None:
    story = Elastic(most=4)
    story.come_all("abcd")
    story.lose("a1")
    story.lose("c1")
    assert [gone.rank for gone in story.goodbyes("b1")] == [0, 2]
    story.go("b")
    story.come("b")
    assert not story.has_world("b2")  # d is in the world still
    story.go("d")
    assert not story.has_world("b2")  # and now on its way
    story.come("d")
    assert story.names("b") == story.names("d") == "bd"
    assert story.ended == [("digits", 1)]


def test_too_few_wait_for_others() -> None:
    story = Elastic(fewest=2, most=2)
    story.come_all("ab")
    story.lose("a1")
    story.again("b")
    story.pass_time(5.0)
    assert not story.has_world("b2")
    assert story.parked("b") == [False]
    story.come_all("c")
    assert story.names("c") == "bc"


def test_one_that_is_lost_on_its_way_is_not_waited_for() -> None:
    story = Elastic(most=3)
    story.come_all("abc")
    story.go("a")
    story.go("b")
    story.come("a")
    story.lose("c1")
    assert not story.has_world("a2")
    story.take(story.membership.process_ended("b1", "its process ended", story.now_s))
    assert story.names("a") == "a"


def test_no_world_forms_between_two_attempts_of_one_process() -> None:
    story = Elastic(most=3)
    story.come_all("abc")
    story.hold = True
    story.again("abc")
    assert story.come("a", rejoin="a1") == ""  # the end of a2's stream has not been seen
    story.disconnect("a2")
    story.form()
    assert story.names("a") == "abc"


def test_a_process_with_a_number_of_its_launcher_tries_again() -> None:
    story = Elastic(most=2)
    story.come("a", rank=0, start_time=5)
    assert code_of(story.come("b", rank=0, start_time=5)) is WorldCode.INVALID_RANK
    assert story.come("a", rank=0, start_time=5) == ""
    assert story.closed == ["a1"]
    story.come("b", rank=1)
    assert story.names("a") == "ab"


@pytest.mark.parametrize(("broke", "seconds"), [(None, 20.0), (False, 20.0), (True, 3.0)])
def test_one_that_does_not_join_again_is_waited_for_a_while(broke: bool | None, seconds: float) -> None:
    """broke: how its last stream ends."""
    story = Elastic(most=2)
    story.come_all("ab")
    story.again("a")
    story.go("b")
    if broke is not None:
        story.take(story.membership.disconnected("b1", story.now_s, broke=broke))
    story.pass_time(seconds - 1)
    story.membership.restart_limits(story.now_s)  # the coordinator was stopped
    story.pass_time(seconds - 1)
    assert not story.has_world("a2")
    story.pass_time(2.0)
    assert story.names("a") == "a"
    assert {"a1", "b1"} <= set(story.closed)


def test_one_that_stands_still_on_its_way_is_not_waited_for() -> None:
    story = Elastic(most=2)
    story.come_all("ab", options={"hung_seconds": "3"})
    story.go("b")
    story.again("a")
    for _ in range(3):
        story.pass_time(1.0, stopped={"b1": 7})  # nobody is known to run
    for _ in range(3):
        story.pass_time(1.0, runs={"a2"}, stopped={"b1": 7})
    assert not story.has_world("a2")
    story.pass_time(1.0, runs={"a2"}, stopped={"b1": 7})
    assert story.names("a") == "a"


def test_one_whose_slot_has_a_later_process_is_not_waited_for() -> None:
    story = Elastic(most=2)
    story.come("a", rank=0, incarnation=1)
    story.come("b", rank=1, incarnation=1)
    story.go("a")
    story.go("b")
    story.come("c", rank=1, incarnation=2)
    story.come("a", rank=0, incarnation=1)
    assert story.names("c") == "ac"
    assert "b1" in story.closed


@pytest.mark.parametrize(("incarnation", "forms"), [(1, False), (2, True)])
def test_an_agent_says_that_one_ended_on_its_way(incarnation: int, forms: bool) -> None:
    story = Elastic(most=2)
    story.come("a", rank=0, incarnation=1)
    story.come("b", rank=1, incarnation=2)
    story.go("b")
    story.go("a")
    story.come("a", rank=0, incarnation=1)
    ended = RankEnded("digits", 1, "node-a", 77, "it was killed", incarnation)  # with the pid of a shell above it
    story.take(story.membership.rank_ended(ended, story.now_s))
    assert story.has_world("a2") is forms


def host_goes(agent_s: float = 1.0) -> Elastic:
    """A world of a and b on one host, c and d on another one, of a launcher that gives up whole hosts."""
    story = Elastic(most=4)
    story.membership = Membership(agent_s=lambda job, rank: agent_s, host_goes=lambda job, slot, incarnation: True)
    for number, (name, host) in enumerate(zip("abcd", "xxyy", strict=True)):
        story.come(name, host=host, rank=number, incarnation=1)
    return story


def come_again(story: Elastic, names: str) -> list[str]:
    return [story.come(name, host="xxyy"["abcd".index(name)], rank="abcd".index(name), incarnation=1) for name in names]


def end(story: Elastic, *slots: int) -> None:
    for slot in slots:
        ended = RankEnded("digits", slot, "x", 0, "its host is not used any more")
        story.take(story.membership.rank_ended(ended, story.now_s))


@pytest.mark.parametrize(("joins", "failed"), [("bcd", True), ("cdb", True), ("bcd", False)])
def test_no_world_has_the_other_processes_of_a_host_that_its_launcher_gives_up(joins: str, failed: bool) -> None:
    story = host_goes()
    story.leave("a1", "its program ended", failed=failed)  # sys.exit(3) is no error to the process itself
    for name in "bcd":
        story.go(name)
    assert come_again(story, joins) == ["", "", ""]
    assert not story.has_world("c2"), "the launcher has not decided yet"
    story.hold = True  # worlds form once all is told
    end(story, 0, 1)
    story.form()
    assert story.names("c") == "cd"
    (refusal,) = come_again(story, "b")
    assert code_of(refusal) is WorldCode.REPLACED


def test_a_process_whose_launcher_has_given_up_its_host_does_not_join_again() -> None:
    story = host_goes()
    end(story, 0, 1)
    story.disconnect("a1")
    for name in "bcd":
        story.go(name)
    refusal, *others = come_again(story, "bcd")
    assert code_of(refusal) is WorldCode.REPLACED
    assert others == ["", ""]
    assert story.names("c") == "cd"


def test_a_launcher_that_does_not_decide_is_not_waited_for_long() -> None:
    story = host_goes()
    story.leave("a1", "its program ended with an error", failed=True)
    for name in "bcd":
        story.go(name)
    come_again(story, "bcd")
    story.pass_time(1.0)
    assert not story.has_world("c2")
    assert "(slot 0)" in story.progress("c2")[-1]
    story.pass_time(DECISION_S)
    assert story.names("c") == "bcd"


def test_nobody_waits_for_a_launcher_whose_agent_is_gone() -> None:
    """No agent tells it of the end of a process before it gives the host up."""
    story = host_goes(agent_s=0.0)
    story.leave("a1", "its program ended with an error", failed=True)
    for name in "bcd":
        story.go(name)
    come_again(story, "bcd")
    assert story.names("c") == "bcd"


def test_the_time_in_which_a_coordinator_was_stopped_does_not_count() -> None:
    story = Elastic(most=2)
    story.come_all("ab")
    story.go("a")
    story.again("b")
    story.now_s += 30.0
    story.membership.restart_limits(story.now_s)
    story.pass_time(1.0)
    story.come("a")
    assert story.names("a") == "ab"


def test_the_host_of_one_on_its_way_is_not_lost() -> None:
    story = Elastic(most=2)
    story.come_all("ab")
    story.lose("a1")
    story.go("b")
    assert story.membership.attendance("digits") == Attendance(away=frozenset({"node-a"}))


def test_one_that_leaves_for_good_is_not_waited_for() -> None:
    story = Elastic(most=3)
    story.come_all("abc")
    story.leave("b1", "the script ended")
    story.again("ac")
    assert story.names("a") == "ac"


def test_who_takes_over_waits_for_those_on_their_way() -> None:
    story = Elastic(most=3)
    story.come_all("abc")
    story.go("a")
    story.go("b")
    story.lose("c1")
    gone = story.membership.gone("digits")
    assert gone is not None
    story.membership = Membership()
    members = story.membership.restore(story.formations[0].record(1, SECRET), gone, story.now_s)
    assert [one.member_id for one in members] == ["a1", "b1"]
    story.come("b")
    assert not story.has_world("b2")
    story.come("a")
    assert story.names("a") == "ab"


# -- others come -------------------------------------------------------------------------------------------------------
def test_newcomers_are_parked_and_taken_in_together() -> None:
    story = Elastic(most=4, settle_s=1.0)
    story.come_all("ab")
    story.pass_time(1.0)
    story.come_all("c", host="node-b")
    story.pass_time(0.5)
    story.come_all("d")
    story.pass_time(0.9)
    assert story.newcomers("a") == []
    story.pass_time(0.2)
    assert story.newcomers("a") == story.newcomers("b") == [2]
    assert story.parked("c")[-1]
    assert story.parked("d")[-1]
    story.again("ba")
    assert story.names("c") == "abdc"  # host by host, the longest-standing first
    assert story.newcomers("a") == []


def test_who_comes_beyond_the_most_waits_for_a_place() -> None:
    story = Elastic(most=2)
    story.come_all("ab")
    story.come_all("c")
    story.pass_time(10.0)
    assert story.newcomers("a") == []
    assert "for a place" in story.progress("c1")[-1]
    story.lose("b1")
    story.again("a")
    assert story.names("c") == "ac"


def test_a_first_world_leaves_over_who_came_too_late() -> None:
    story = Elastic(most=2)
    story.hold = True
    story.come_all("abc")
    story.form()
    assert story.names("a") == "ab"
    story.hold = False
    assert not story.has_world("c1")
    assert story.parked("c")[-1]


def test_a_spare_process_that_goes_away_disturbs_no_world() -> None:
    story = Elastic(most=2)
    story.hold = True
    story.come_all("abc")
    story.disconnect("c1")
    assert len(story.formations) == 1
    story.form()
    assert story.names("a") == "ab"


def test_all_members_of_a_world_that_can_never_form_are_refused_before_others_form_one() -> None:
    story = Elastic(most=2)
    story.hold = True
    story.come_all("abc")
    story.pass_time(2.0)
    story.take(story.membership.unformable(story.formations[0], "It is too large.", story.now_s))
    assert [list(formation.requests) for formation in story.formations[1:]] == [["c1"]]


def test_a_member_whose_stream_was_away_is_told_of_newcomers_when_it_is_back() -> None:
    story = Elastic(most=3)
    story.come_all("ab")
    story.pass_time(1.1)
    story.disconnect("a1")
    story.come_all("c")
    story.pass_time(1.1)
    assert story.told["a1"].pop().HasField("newcomers")  # it was away
    assert story.attach("a1", pid=sum(b"a")) is None
    assert story.newcomers("a") == [1]


def test_a_newcomer_that_goes_away_changes_nothing() -> None:
    story = Elastic(most=3)
    story.come_all("ab")
    story.pass_time(1.1)
    story.come_all("c")
    story.pass_time(1.1)
    story.disconnect("c1")
    story.again("ab")
    assert story.names("a") == "ab"


def test_a_later_process_of_a_slot_shows_that_the_earlier_one_is_gone() -> None:
    story = Elastic(most=2, size=2)
    story.come("a", rank=0, incarnation=1)
    story.come("b", rank=1, incarnation=1)
    story.come("c", rank=0, incarnation=2)
    assert [gone.rank for gone in story.goodbyes("b1")] == [0]
    story.again("b")
    assert story.names("c") == "bc"
    assert code_of(story.come("d", rank=0, incarnation=1)) is WorldCode.REPLACED


@pytest.mark.parametrize("failed", [False, True])
def test_who_waits_when_the_work_is_done_does_not_do_it_again(failed: bool) -> None:
    story = Elastic(most=3)
    story.come_all("ab")
    story.pass_time(1.1)
    story.come_all("c")
    story.leave("a1", "its program ended", failed=failed)
    story.lose("b1") if failed else story.leave("b1", "its program ended")
    story.pass_time(1.1)
    assert story.has_world("c1") is failed  # where all have failed, others may do better
    if not failed:
        (refused,) = [event.refused for event in story.told["c1"] if event.HasField("refused")]
        assert code_of(refused.sentence) is WorldCode.JOB_DONE
        assert "c1" in story.closed
        assert code_of(story.come("e", rank=2, incarnation=2)) is WorldCode.JOB_DONE  # its launcher did not know yet
        story.come_all("d")  # somebody starts the job anew
        story.pass_time(1.1)
        assert story.names("d") == "d"


def test_members_that_left_in_order_and_are_replaced_have_failed() -> None:
    """A program that ends with sys.exit(1) leaves like one that has done its work; its launcher knows better."""
    story = Elastic(most=2, size=2)
    story.come("a", rank=0, incarnation=1)
    story.come("b", rank=1, incarnation=1)
    story.leave("a1")
    story.leave("b1")
    assert story.come("c", rank=0, incarnation=2) == ""
    assert story.come("d", rank=1, incarnation=2) == ""
    assert story.names("c") == "cd"


def test_who_takes_over_knows_that_the_work_is_done() -> None:
    story = Elastic(most=2, size=2)
    story.come("a", rank=0, incarnation=1)
    story.come("b", rank=1, incarnation=1)
    story.leave("a1")
    gone = story.membership.gone("digits")
    assert gone is not None
    story.membership = Membership()
    story.membership.restore(story.formations[0].record(1, SECRET), gone, story.now_s)
    story.lose("b1")
    assert code_of(story.come("c", rank=2, incarnation=1)) is WorldCode.JOB_DONE


def test_a_process_keeps_its_local_rank_when_another_is_replaced() -> None:
    """The survivor's model stays on its GPU, and a newcomer's goes to the other one."""
    story = Elastic(most=2, size=2)
    story.come("a", rank=0, incarnation=1)
    story.come("b", rank=1, incarnation=1)
    story.lose("a1")
    story.go("b")
    story.come("b", rank=1, incarnation=1)
    assert list(story.world("b2").local_ranks) == [0]
    story.come("c", rank=0, incarnation=2)
    story.pass_time(2.0)
    story.go("b")
    story.come("b", rank=1, incarnation=1)
    assert story.names("c") == "bc"
    assert list(story.world("c1").local_ranks) == [1, 0]


def test_a_member_that_missed_the_end_goes_on() -> None:
    story = Elastic(most=3)
    story.come_all("abc")
    story.come_all("d")
    story.leave("a1", "its program ended")
    story.again("c")
    story.leave("b1", "its program ended")
    assert story.names("c") == "cd"


# -- who does not fit --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "code", "facts"),
    [
        ({"sizes": (3, 2)}, WorldCode.INVALID_SIZE, ("3 and 2",)),
        ({"sizes": (0, 2)}, WorldCode.INVALID_SIZE, ("0 and 2",)),
        ({"size": 9}, WorldCode.INVALID_SIZE, ("9 members", "1 to 4")),
        ({"settle_s": float("nan")}, WorldCode.INVALID_REQUEST, ("nan",)),
        ({"sizes": (1, 3)}, WorldCode.MEMBERS_DISAGREE, ("1 to 3", "1 to 4", "HOROVOD_MAX_SIZE")),
        ({"sizes": None, "size": 2}, WorldCode.MEMBERS_DISAGREE, ("2 members", "1 to 4")),
        ({"options": {"fusion": "2"}}, WorldCode.MEMBERS_DISAGREE, ("fusion",)),
        ({"release": "1.97.3"}, WorldCode.OTHER_VERSION, ("before 1.0.0", "1.97.3")),
    ],
)
@pytest.mark.parametrize("runs", [False, True])
def test_who_does_not_fit_is_refused(
    fields: dict[str, object], code: WorldCode, facts: tuple[str, ...], runs: bool
) -> None:
    story = Elastic(settle_s=0.0 if runs else 1.0)
    story.come_all("a")
    story.pass_time(0.1)
    assert story.has_world("a1") is runs
    refusal = story.come("b", **fields)
    assert code_of(refusal) is code
    assert re.search(ends_with(code, *facts), refusal)
    assert story.goodbyes("a1") == []


def test_a_newcomer_does_not_fit_a_world_of_which_all_are_on_their_way() -> None:
    story = Elastic(most=2)
    story.come_all("ab")
    story.go("a")
    story.go("b")
    assert code_of(story.come("c", options={"fusion": "2"})) is WorldCode.MEMBERS_DISAGREE
    story.come_all("ab")
    assert story.names("a") == "ab"


def test_a_newcomer_does_not_take_the_number_of_a_member() -> None:
    story = Elastic(most=3)
    for name, number in [("a", 0), ("b", 1), ("c", 2)]:
        story.come(name, rank=number)
    story.lose("b1")
    assert code_of(story.come("d", rank=0)) is WorldCode.INVALID_RANK
    assert story.come("e", rank=1) == ""
    for name in "ac":
        story.go(name)
    assert code_of(story.come("f", rank=2)) is WorldCode.INVALID_RANK
    story.come("a", rank=0)
    story.come("c", rank=2)
    assert story.names("a") == "ace"
