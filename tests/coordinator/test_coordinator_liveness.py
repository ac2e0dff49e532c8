"""When a member of a running world counts as lost, and how one that was away comes back: by evidence and by proof."""

import re

import pytest
from error_codes import ends_with
from event_words import NO_WORLD_YET, NOT_BACK, WAS_LOST, tells
from membership_story import SECRET, Story

from horovod.base.errors import WorldCode
from horovod.coordinator.core.ending import AGENT_S, RankEnded
from horovod.coordinator.core.world.life import ENDED_S, PROCESS_ENDED
from horovod.coordinator.core.world.liveness import DORMANT_S
from horovod.coordinator.services.ticks import JudgeClock
from horovod.protos.v1 import membership_pb2 as pb


@pytest.fixture
def story() -> Story:
    """Three members of one world: m0 and m1 on node-a, where processes see each other, m2 elsewhere."""
    made = Story(grace_s=10.0)
    made.join("m0", size=3, pid=1, namespace="boot/1", start_time=11)
    made.join("m1", size=3, pid=2, namespace="boot/1", start_time=12)
    made.join("m2", size=3, pid=3, host="node-b", namespace="boot/2", start_time=13)
    return made


def report(story: Story, witness: str, rank: int, process_ended: bool = False, epoch: int = 1) -> None:
    message = pb.PeerLost(epoch=epoch, rank=rank, process_ended=process_ended)
    story.take(story.membership.peer_lost(witness, message, story.now_s))


def say(story: Story, witness: str, rank: int, lives: bool, epoch: int = 1) -> None:
    message = pb.Testimony(epoch=epoch, rank=rank, lives=lives)
    story.take(story.membership.testified(witness, message, story.now_s))


def probes(story: Story, member_id: str) -> list[pb.Probe]:
    return [event.probe for event in story.told[member_id] if event.HasField("probe")]


# -- agents ------------------------------------------------------------------------------------------------------------
SAW = "its agent saw its process end: signal 9 (SIGKILL)"


@pytest.fixture
def agents_story() -> Story:
    """Two members that agents have started, on two hosts."""
    made = Story(grace_s=10.0, agent_s=lambda job, rank: AGENT_S)
    made.join("m0", size=2, pid=1, host="h1", rank=0)
    made.join("m1", size=2, pid=2, host="h2", rank=1)
    return made


def ended(story: Story, rank: int = 1, host: str = "h2", pid: int = 2) -> None:
    story.take(story.membership.rank_ended(RankEnded("digits", rank, host, pid, SAW), story.now_s))


def causes(story: Story) -> list[str]:
    return [gone.sentence.partition(" was lost: ")[2] for gone in story.goodbyes("m0")]


@pytest.mark.parametrize("agent_first", [True, False])
def test_what_the_agent_saw_is_the_cause_whoever_is_first(agents_story: Story, agent_first: bool) -> None:
    if agent_first:
        ended(agents_story)
        assert causes(agents_story) == [], "its goodbye may be on its way"
    agents_story.disconnect("m1")
    report(agents_story, "m0", 1)
    if not agent_first:
        assert causes(agents_story) == [], "its agent knows more"
        ended(agents_story)
    assert causes(agents_story) == [f"{SAW}."]


@pytest.mark.parametrize("patience_s", [AGENT_S, 0.125])
def test_a_silent_agent_is_not_waited_for(agents_story: Story, patience_s: float) -> None:
    agents_story.membership._jobs["digits"].liveness._agent_s = lambda job, rank: patience_s
    agents_story.disconnect("m1")
    report(agents_story, "m0", 1)
    report(agents_story, "m0", 1)
    assert agents_story.looks == [(patience_s, "digits")]
    agents_story.pass_time(patience_s - 0.0625)
    assert causes(agents_story) == []
    agents_story.pass_time(0.0625)
    (cause,) = causes(agents_story)
    assert tells(cause, "rank 0")


def test_a_rank_that_said_goodbye_before_its_process_ended_is_not_lost(agents_story: Story) -> None:
    ended(agents_story)
    agents_story.leave("m1")
    agents_story.pass_time(100.0)
    (gone,) = agents_story.goodbyes("m0")
    assert gone.orderly


def test_without_a_goodbye_the_agents_word_is_enough(agents_story: Story) -> None:
    ended(agents_story)
    agents_story.pass_time(ENDED_S + 0.1)
    assert causes(agents_story) == [f"{SAW}."]


@pytest.mark.parametrize(("rank", "host", "pid"), [(1, "h1", 2), (0, "h2", 7), (1, "h3", 7)])
def test_an_agent_speaks_of_its_own_processes_only(agents_story: Story, rank: int, host: str, pid: int) -> None:
    ended(agents_story, rank, host, pid)
    agents_story.pass_time(100.0)
    assert agents_story.gone == []


def test_a_process_below_the_one_that_was_started_is_that_rank(agents_story: Story) -> None:
    ended(agents_story, pid=77)  # a shell around it
    agents_story.disconnect("m1")
    assert causes(agents_story) == [f"{SAW}."]


def test_the_pid_counts_where_ranks_have_changed() -> None:
    story = Story()
    story.join("m0", size=2, pid=1, host="h1")
    story.join("m1", size=2, pid=2, host="h1")
    ended(story, rank=5, host="h1", pid=2)  # it was started as rank 5 of a larger world
    story.disconnect("m1")
    assert causes(story) == [f"{SAW}."]


# -- away --------------------------------------------------------------------------------------------------------------
def test_nobody_hears_of_a_member_that_is_away_and_comes_back_within_the_grace(story: Story) -> None:
    story.disconnect("m2")
    story.pass_time(9.9)
    assert story.attach("m2") is None
    story.pass_time(1000.0)
    assert story.goodbyes("m0") == []
    assert story.goodbyes("m1") == []
    assert not story.told["m2"][-1].attached.gone


def test_the_grace_begins_anew_with_every_break(story: Story) -> None:
    for _ in range(3):
        story.disconnect("m2")
        story.pass_time(9.0)
        assert story.attach("m2") is None
    assert story.gone == []


def test_a_member_that_stays_away_is_lost_and_is_told_so_when_it_comes_at_last(story: Story) -> None:
    story.disconnect("m2")
    story.pass_time(10.5)
    (gone,) = story.goodbyes("m0")
    assert gone.sentence.startswith(f"Rank 2 (pid 3) on host node-b {WAS_LOST}")
    assert tells(gone.sentence, f"{NOT_BACK} 10 s")
    for cause in ("HOROVOD_REATTACH_GRACE_SECONDS", "stopped", "GIL", "host", "network"):
        assert cause in gone.sentence
    refused = story.attach("m2")
    assert refused is not None
    assert refused.reason == pb.REFUSAL_REASON_LOST
    assert re.search(ends_with(WorldCode.DECLARED_LOST, "Rank 2 (pid 3) on host node-b"), refused.sentence)


def test_silence_is_no_evidence(story: Story) -> None:
    for _ in range(100):
        story.pass_time(1000.0)
    assert story.gone == []


def test_a_member_that_comes_back_hears_what_it_missed(story: Story) -> None:
    story.disconnect("m2")
    story.leave("m1", "the script ended")
    assert story.attach("m2") is None
    (gone,) = story.told["m2"][-1].attached.gone
    assert (gone.rank, gone.orderly) == (1, True)


def test_a_member_that_never_had_its_world_can_not_come_back(story: Story) -> None:
    other = Story()
    other.hold = True
    other.join("m0")
    other.join("m1")
    other.take([])
    effects = other.membership.formed(other.formations[0], 1, SECRET, other.now_s)  # not delivered
    assert [type(effect).__name__ for effect in effects] == ["Formed", "Send", "Send"]
    other.disconnect("m1")
    (gone,) = other.goodbyes("m0")
    assert NO_WORLD_YET in gone.sentence


# -- witnesses ---------------------------------------------------------------------------------------------------------
def test_whoever_the_coordinator_sees_to_live_is_never_lost(story: Story) -> None:
    story.disconnect("m2")
    for _ in range(1000):
        story.pass_time(9.0, "m2")
    assert story.gone == []
    story.pass_time(10.5)
    assert story.gone == [(1, 2)]


def test_a_member_on_its_host_is_asked_and_its_word_counts_for_another_grace(story: Story) -> None:
    story.disconnect("m1")
    (probe,) = probes(story, "m0")
    assert (probe.epoch, probe.rank, probe.pid, probe.start_time) == (1, 1, 2, 12)
    assert not any(event.HasField("probe") for event in story.told["m2"]), "it can't see that process"
    for _ in range(100):
        say(story, "m0", 1, lives=True)
        story.pass_time(9.0)
    assert story.gone == []
    assert len(probes(story, "m0")) == 101
    story.pass_time(2.0)
    assert story.gone == [(1, 1)]


def test_a_witness_that_sees_the_end_is_believed_at_once(story: Story) -> None:
    story.disconnect("m1")
    say(story, "m0", 1, lives=False)
    (gone,) = story.goodbyes("m0")
    assert gone.sentence.startswith(f"Rank 1 (pid 2) on host node-a {WAS_LOST}")
    assert PROCESS_ENDED in gone.sentence


def test_the_word_of_a_member_that_can_not_see_the_process_counts_for_nothing(story: Story) -> None:
    story.disconnect("m1")
    for lives in (True, False):
        say(story, "m2", 1, lives)
        say(story, "m1", 1, lives)
        say(story, "m0", 1, lives, epoch=7)
        say(story, "stranger", 1, lives)
    assert story.gone == []
    story.pass_time(10.5)
    assert story.gone == [(1, 1)]


# -- evidence ----------------------------------------------------------------------------------------------------------
def test_a_process_that_ended_is_lost_as_soon_as_its_stream_has_ended(story: Story) -> None:
    story.take(story.membership.process_ended("m2", PROCESS_ENDED, story.now_s))
    assert story.gone == [], "its goodbye may be on the way"
    story.disconnect("m2")
    assert story.gone == [(1, 2)]
    story.disconnect("m1")
    story.take(story.membership.process_ended("m1", PROCESS_ENDED, story.now_s))
    assert story.gone == [(1, 2), (1, 1)], "in either order"


def test_a_goodbye_that_is_read_after_the_end_of_the_process_counts(story: Story) -> None:
    story.take(story.membership.process_ended("m2", PROCESS_ENDED, story.now_s))
    story.leave("m2", "the script ended")
    (gone,) = story.goodbyes("m0")
    assert gone.orderly


def test_a_process_that_ended_while_others_hold_its_connection_open_is_lost_a_little_later(story: Story) -> None:
    story.take(story.membership.process_ended("m2", PROCESS_ENDED, story.now_s))
    story.pass_time(1.5)
    assert story.gone == [(1, 2)]


@pytest.mark.parametrize("report_first", [True, False])
def test_broken_connections_to_a_peer_and_to_the_coordinator_are_enough(story: Story, report_first: bool) -> None:
    if report_first:
        report(story, "m0", 2)
        story.pass_time(100.0)
        assert story.gone == [], "it is connected here, so it is not lost"
        story.disconnect("m2")
    else:
        story.disconnect("m2")
        report(story, "m0", 2)
    (gone,) = story.goodbyes("m1")
    assert tells(gone.sentence, "rank 0 (pid 1) on host node-a", "the coordinator")


def test_a_peer_on_its_host_that_saw_the_process_end_is_believed(story: Story) -> None:
    report(story, "m0", 1, process_ended=True)
    story.disconnect("m1")
    assert story.gone == [(1, 1)]
    report(story, "m0", 2, process_ended=True)  # which it can't have seen
    story.pass_time(100.0)
    assert story.gone == [(1, 1)]


def test_reports_of_another_epoch_of_strangers_and_of_oneself_are_ignored(story: Story) -> None:
    story.disconnect("m2")
    report(story, "m0", 2, epoch=9)
    report(story, "stranger", 2)
    report(story, "m2", 2)
    report(story, "m0", 77)
    assert story.gone == []


# -- proofs ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "code", "fact"),
    [
        ({"secret": b"t" * 32}, WorldCode.UNPROVEN_MEMBER, "2"),
        ({"rank": 1}, WorldCode.UNKNOWN_WORLD, "Rank 1"),
        ({"job": "dig its"}, WorldCode.UNKNOWN_WORLD, "world 1 of job 'dig its'"),
        ({"epoch": 9}, WorldCode.UNKNOWN_WORLD, "world 9"),
        ({"job": "other"}, WorldCode.UNKNOWN_WORLD, "world 1 of job 'other'"),
        ({"protocol_version": 1}, WorldCode.OTHER_VERSION, "(protocol 1)"),
    ],
)
def test_whoever_can_not_prove_to_be_the_member_changes_nothing(
    story: Story, changes: dict[str, object], code: WorldCode, fact: str
) -> None:
    story.disconnect("m2")
    refused = story.attach("m2", **changes)  # type: ignore[arg-type]
    assert refused is not None
    assert re.search(ends_with(code, fact), refused.sentence)
    assert refused.reason == pb.REFUSAL_REASON_UNKNOWN_WORLD
    story.pass_time(10.5)
    assert story.gone == [(1, 2)]


def test_a_member_of_an_epoch_that_is_over_is_told_so(story: Story) -> None:
    for old in ("m0", "m1", "m2"):
        story.join(f"new {old}", size=3, rejoin=old)
    refused = story.attach("m2")
    assert refused is not None
    assert refused.reason == pb.REFUSAL_REASON_LOST
    assert re.search(ends_with(WorldCode.EPOCH_OVER, "World 1", "'digits'", "world 2 now"), refused.sentence)
    for new in ("new m0", "new m1", "new m2"):
        story.leave(new)
    refused = story.attach("m2")
    assert refused is not None
    assert refused.reason == pb.REFUSAL_REASON_LOST


# -- a judge who was stopped -------------------------------------------------------------------------------------------
def test_the_clock_of_a_coordinator_that_was_stopped_stands_still() -> None:
    clock = JudgeClock(100.0, tick_s=1.0, most_s=5.0)
    assert not clock.tick(101.0)
    assert clock.read(101.0) == clock.read(100.5) == 101.0, "it never goes back"
    assert clock.read(103.0) == 103.0, "a tick that is late"
    assert clock.read(3601.0) == 103.0
    assert clock.tick(3601.0), "it jumped"
    assert clock.read(3601.0) == 103.0
    assert not clock.tick(3602.0)
    assert clock.read(3602.5) == 104.5
    assert clock.tick(9000.0)
    assert clock.read(9000.0) == 105.0, "a tick's time and no more"


def test_limits_begin_anew_after_a_jump(story: Story) -> None:
    story.disconnect("m2")
    story.pass_time(9.0)
    story.membership.restart_limits(story.now_s)
    story.pass_time(9.0)
    assert story.gone == []
    story.pass_time(2.0)
    assert story.gone == [(1, 2)]


# -- a world of which nobody is connected ------------------------------------------------------------------------------
def test_when_all_are_away_nobody_waits_for_a_verdict(story: Story) -> None:
    for member_id in ("m0", "m1", "m2"):
        story.disconnect(member_id)
    story.pass_time(1000.0)
    for member_id in ("m0", "m1", "m2"):
        assert story.attach(member_id) is None
    story.pass_time(1000.0)
    assert story.gone == []
    for member_id in ("m0", "m1", "m2"):
        story.disconnect(member_id)
    story.pass_time(DORMANT_S + 1)
    assert story.ended == [("digits", 1)], "but not for ever"


def test_whoever_wants_to_join_waits_for_the_end_of_a_world_of_which_members_are_away(story: Story) -> None:
    assert re.search(ends_with(WorldCode.JOB_RUNS_ALREADY, "digits", "3 members"), story.join("early", size=1))
    for member_id in ("m0", "m1", "m2"):
        story.disconnect(member_id)
    assert story.join("new", size=1) == ""
    assert tells(story.progress("new")[-1], "world 1", "rank 0")
    story.pass_time(10.5)
    assert story.ended == [("digits", 1)]
    assert story.world("new").epoch == 2


def test_whoever_waited_for_the_end_of_a_world_that_is_whole_again_is_refused(story: Story) -> None:
    story.disconnect("m0")
    story.disconnect("m1")
    assert story.join("new", size=1) == ""
    story.attach("m0")
    assert "new" not in story.closed
    story.attach("m1")
    refused = story.told["new"][-1].refused
    assert re.search(ends_with(WorldCode.JOB_RUNS_ALREADY, "3 members"), refused.sentence)
    assert "new" in story.closed
    story.pass_time(100.0)
    assert story.gone == []
