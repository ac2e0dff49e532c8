"""Members of elastic worlds that say that they will leave: who is told what, and who is in the next world."""

from __future__ import annotations

from event_words import ENDS_FOR_ALL, tells
from membership_story import SECRET
from test_elastic_worlds import Elastic

from horovod.base.errors import WorldCode, code_of
from horovod.coordinator.core.world.membership import Membership
from horovod.protos.v1 import membership_pb2 as pb


class Drained(Elastic):
    def say(self, name: str, reason: str = "it got SIGTERM", epoch: int | None = None) -> None:
        leaving = pb.Leaving(epoch=epoch or self.world(self.member(name)).epoch, reason=reason)
        self.take(self.membership.leaving(self.member(name), leaving, self.now_s))

    def heard(self, name: str) -> list[list[int]]:
        """The ranks that this process was told to leave, each time."""
        events = self.told.get(self.member(name), [])
        return [list(event.leavers.ranks) for event in events if event.HasField("leavers")]

    def sentence(self, name: str) -> str:
        return [event.leavers.sentence for event in self.told[self.member(name)] if event.HasField("leavers")][-1]

    def leave_for_good(self, names: str) -> None:
        for name in names:
            self.leave(self.member(name), "it got SIGTERM", failed=True)


def test_the_others_form_the_next_world_without_the_one_that_leaves() -> None:
    story = Drained(most=3)
    story.come_all("abc")
    story.say("a")
    assert story.heard("a") == story.heard("b") == story.heard("c") == [[0]]
    assert tells(story.sentence("b"), "Rank 0 (pid 97) on host node-a", "digits", "SIGTERM", "2 members")
    story.go("b")
    story.come("b")
    story.leave_for_good("a")
    assert not story.has_world("b2")  # c has not left
    story.go("c")
    story.come("c")
    assert story.names("b") == "bc"
    assert [gone.orderly for gone in story.goodbyes("c1")] == [True, True]


def test_what_is_said_in_a_burst_is_told_once_more() -> None:
    story = Drained(most=4)
    story.come_all("abcd")
    for name in "abc":
        story.say(name)
    assert story.heard("d") == [[0]]
    assert len(story.looks) == 1 + 2 * len("abcd")  # as many as newcomers ask for, and one
    story.pass_time(0.1)
    assert len(story.heard("d")) == 1
    story.pass_time(0.2)
    assert story.heard("d") == [[0], [0, 1, 2]]
    story.say("a")  # again
    story.pass_time(1.0)
    assert len(story.heard("d")) == 2
    story.go("d")
    story.leave_for_good("abc")
    story.come("d")
    assert story.names("d") == "d"


def test_when_all_leave_nobody_has_done_the_work() -> None:
    story = Drained(most=2)
    story.come_all("ab")
    story.say("a")
    story.pass_time(1.0)
    story.come_all("c")
    story.say("b")
    assert ENDS_FOR_ALL in story.sentence("a")
    assert "1 process" in story.sentence("a")
    story.leave_for_good("ab")
    story.pass_time(1.1)
    assert story.names("c") == "c"
    assert code_of(story.come("d")) is not WorldCode.JOB_DONE


def test_too_few_wait_for_others() -> None:
    story = Drained(fewest=2, most=3)
    story.come_all("ab")
    story.pass_time(1.1)
    story.say("b")
    assert tells(story.sentence("a"), "at least 2 members")
    story.leave_for_good("b")
    story.again("a")
    assert not story.has_world("a2")
    assert "1 more" in story.progress("a2")[-1]
    story.come_all("c")
    assert story.names("a") == "ac"


def test_a_spare_takes_the_place() -> None:
    story = Drained(fewest=2, most=2)
    story.come_all("abc")
    story.say("a")
    assert "2 members" in story.sentence("b")
    story.go("b")
    story.leave_for_good("a")
    story.come("b")
    assert story.names("b") == "bc"


def test_one_that_has_to_go_before_the_commit_is_lost() -> None:
    story = Drained(most=2)
    story.come_all("ab")
    story.say("b")
    story.lose("b1")
    assert [gone.orderly for gone in story.goodbyes("a1")] == [False]
    story.again("a")
    assert story.names("a") == "a"
    story.pass_time(1.0)
    assert story.heard("a") == []  # nobody leaves this world


def test_it_is_told_again_to_a_member_that_comes_back_and_by_who_takes_over() -> None:
    story = Drained(most=3)
    story.come_all("abc")
    story.say("a")
    story.told["b1"].pop()
    story.disconnect("b1")
    assert story.attach("b1", pid=ord("b")) is None
    assert story.heard("b") == [[0]]
    gone = story.membership.gone("digits")
    assert gone is not None
    story.membership = Membership()
    story.membership.restore(story.formations[0].record(1, SECRET), gone, story.now_s)
    assert story.attach("a1", pid=ord("a")) is None
    story.say("a")
    assert story.attach("c1", pid=ord("c")) is None
    assert story.heard("c")[-1] == [0]


def test_who_is_in_no_elastic_world_leaves_nothing() -> None:
    story = Drained(most=2)
    story.come_all("ab")
    story.say("a", epoch=7)
    story.take(story.membership.leaving("nobody", pb.Leaving(epoch=1), story.now_s))
    assert story.heard("b") == []
    fixed = Drained()
    for name in "ab":
        fixed.come(name, sizes=None, size=2)
    fixed.say("a")
    assert fixed.heard("b") == []


def test_a_launcher_takes_back_the_place_of_a_process() -> None:
    story = Drained(most=3)
    for number, name in enumerate("ab"):
        story.come(name, rank=number, incarnation=number + 1)
    story.pass_time(20)

    def ask(slot: int, incarnation: int) -> None:
        story.take(story.membership.ask_to_leave("digits", slot, incarnation, "its host goes", story.now_s))

    ask(1, 1)  # of an earlier process
    ask(2, 1)
    assert story.heard("a") == []
    ask(1, 2)
    ask(1, 2)
    story.pass_time(1.0)
    assert story.heard("a") == story.heard("b") == [[1]]
    assert "(its host goes)" in story.sentence("a")
