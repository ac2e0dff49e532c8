"""The life of a job's worlds, told as small stories without clock and socket."""

import re
from typing import Any

import pytest
from coordinator_builders import request
from error_codes import ends_with
from event_words import WAS_LOST, tells
from hypothesis import given
from hypothesis import strategies as st
from membership_story import SECRET, Story

from horovod.base.errors import LaunchCode, WorldCode, without_code
from horovod.base.protocol import PROTOCOL_VERSION


@pytest.fixture
def story() -> Story:
    return Story()


# -- forming ---------------------------------------------------------------------------------------------------------


def test_a_world_forms_when_everybody_is_there(story: Story) -> None:
    assert story.join("m0", host="node-b", options={"fusion": "64"}) == ""
    assert not story.has_world("m0")
    assert story.join("m1", host="node-a", options={"fusion": "64"}) == ""
    world = story.world("m0")
    assert world == story.world("m1")
    assert (world.job, world.epoch, world.secret, dict(world.options)) == ("digits", 1, SECRET, {"fusion": "64"})
    assert [(m.member_id, world.hosts[m.host].identity.name, m.segment_address) for m in world.members] == [
        ("m0", "node-b", "segment of m0"),
        ("m1", "node-a", "segment of m1"),
    ]
    assert [(list(m.interfaces), list(m.ports)) for m in world.members] == [([0], [4000])] * 2
    assert [host.interfaces[0].address for host in world.hosts] == ["127.0.0.1"] * 2
    assert (list(world.local_ranks), list(world.cross_ranks)) == ([0, 0], [0, 1])
    assert world.members[1].pid == request("m1").pid


def test_requested_ranks_are_honoured(story: Story) -> None:
    story.join("m0", rank=1)
    story.join("m1", rank=0)
    assert [member.member_id for member in story.world("m0").members] == ["m1", "m0"]


def test_progress_names_what_is_missing_and_comes_once(story: Story) -> None:
    story.join("m0", size=3)
    story.join("m1", size=3)
    (first,) = story.progress("m0")
    assert tells(first, "1 of 3", "digits", "2 more"), "the first at once"
    story.pass_time(0.2)
    (second,) = story.progress("m0")[1:]
    assert tells(second, "2 of 3", "1 more")
    assert story.progress("m1") == story.progress("m0")[1:]
    story.pass_time(1000.0)
    assert len(story.progress("m0")) == 2


def test_a_launcher_gives_up_a_world_that_cannot_form(story: Story) -> None:
    story.join("m0", size=3)
    sentence = "Rank 1 raised ValueError."
    story.take(story.membership.give_up("digits", sentence))
    assert [event.refused.sentence for event in story.told["m0"] if event.HasField("refused")] == [sentence]
    assert story.closed == ["m0"]
    assert story.join("late", size=3) == sentence
    assert story.join("m1", job="digits-2", size=1) == ""


def test_a_world_that_stands_is_not_given_up(story: Story) -> None:
    story.join("m0")
    story.join("m1")
    story.take(story.membership.give_up("digits", "Rank 2 raised ValueError."))
    assert story.closed == []
    assert not any(event.HasField("refused") for event in story.told["m0"])


def test_a_launcher_ends_a_job_whatever_its_world() -> None:
    forming, standing = Story(), Story()
    for number, story in enumerate((forming, standing)):
        for member in range(number + 1):
            story.join(f"m{member}")
        story.take(story.membership.end("digits", "the driver was interrupted [rank-failed]", story.now_s))
        refusals = [event.refused.sentence for event in story.told["m0"] if event.HasField("refused")]
        assert [tells(sentence.lower(), "the driver was interrupted") for sentence in refusals] == [True]
        assert re.search(ends_with(LaunchCode.RANK_FAILED, "the driver was interrupted"), story.join("late"))
    assert [gone.rank for gone in standing.goodbyes("m1")] == [0]


def test_progress_names_missing_ranks(story: Story) -> None:
    story.join("m0", size=5, rank=3)
    (progress,) = story.progress("m0")
    assert tells(progress, "1 of 5", "ranks 0-2 and 4")


def test_progress_tells_of_somebody_who_was_refused(story: Story) -> None:
    story.join("m0", options={"fusion": "1"})
    refusal = story.join("m1", options={"fusion": "2"}, pid=77)
    story.pass_time(1.0)
    assert tells(story.progress("m0")[-1], "pid 77 on host node-a")
    assert without_code(refusal).rstrip(".") in story.progress("m0")[-1]
    story.join("m2", options={"fusion": "1"})
    assert story.has_world("m0")


def test_a_waiting_member_that_goes_away_is_no_longer_counted(story: Story) -> None:
    story.join("m0", size=3)
    story.join("m1", size=3)
    story.disconnect("m0")
    story.pass_time(1.0)
    assert tells(story.progress("m1")[-1], "1 of 3", "2 more")
    assert story.goodbyes("m1") == []


def test_a_member_lost_while_the_store_gives_the_epoch_undoes_the_formation(story: Story) -> None:
    story.hold = True
    story.join("m0")
    story.join("m1")
    assert story.membership.is_forming(story.formations[0])
    story.lose("m1")
    assert not story.membership.is_forming(story.formations[0])
    story.form()
    assert not story.has_world("m0")
    story.join("m2")
    story.form()
    assert [member.member_id for member in story.world("m0").members] == ["m0", "m2"]
    assert story.world("m0").epoch == 2


def test_jobs_do_not_see_each_other(story: Story) -> None:
    story.join("m0", job="one")
    story.join("m1", job="two")
    story.join("m2", job="two")
    assert story.has_world("m1")
    assert not story.has_world("m0")
    story.lose("m1")
    assert story.goodbyes("m0") == []


# -- refusals --------------------------------------------------------------------------------------------------------


FIRST, SECOND = "(pid 4) on host node-a", "(pid 5) on host node-b"


@pytest.mark.parametrize(
    ("fields", "code", "facts"),
    [
        ({"version": 7}, WorldCode.OTHER_VERSION, [f"protocol {PROTOCOL_VERSION}", "protocol 7", f"rank 1 {SECOND}"]),
        ({"release": "1.97.3"}, WorldCode.OTHER_VERSION, [f"rank 0 {FIRST}", f"rank 1 {SECOND} has Horovod 1.97.3"]),
        ({"size": 3}, WorldCode.MEMBERS_DISAGREE, ["3 members", f"rank 0 {FIRST}", "expects 2", "HOROVOD_SIZE"]),
        ({"size": 0}, WorldCode.INVALID_SIZE, ["1 to 65536", "asks for 0"]),
        ({"rank": 0}, WorldCode.INVALID_RANK, ["Rank 0 of job 'digits'", FIRST, SECOND]),
        ({"rank": 2}, WorldCode.INVALID_RANK, ["0 to 1"]),
        ({"rank": None}, WorldCode.INVALID_RANK, [f"Rank 0 {FIRST}", "process with pid 5 on host node-b"]),
        ({"job": ""}, WorldCode.INVALID_REQUEST, ["job", "''"]),
        ({"job": "a\nb"}, WorldCode.INVALID_REQUEST, ["job", r"'a\nb'"]),
        ({"host": ""}, WorldCode.INVALID_REQUEST, ["host.name"]),
        (
            {"options": {"x": "1"}},
            WorldCode.MEMBERS_DISAGREE,
            ["fusion", f"rank 0 {FIRST} has '64'", f"rank 1 {SECOND}"],
        ),
        ({"options": {"fusion": "8"}}, WorldCode.MEMBERS_DISAGREE, [f"rank 0 {FIRST} has '64'", f"{SECOND} has '8'"]),
        ({"options": {f"o{index}": "" for index in range(300)}}, WorldCode.INVALID_REQUEST, ["256"]),
        ({"options": {"fusion": "6" * 5000}}, WorldCode.INVALID_REQUEST, ["4096"]),
        ({"member_id": "m0"}, WorldCode.MEMBER_ID_IN_USE, ["'m0'"]),
        ({"member_id": ""}, WorldCode.INVALID_REQUEST, ["member_id"]),
    ],
)
def test_refused_in_words(story: Story, fields: dict[str, Any], code: WorldCode, facts: list[str]) -> None:
    story.join("m0", pid=4, rank=0, options={"fusion": "64"})
    usual: dict[str, Any] = {"member_id": "m1", "pid": 5, "rank": 1, "host": "node-b", "options": {"fusion": "64"}}
    refusal = story.join(**usual | fields)
    assert re.search(ends_with(code, *facts), refusal)
    assert story.told.get("m1", []) == []
    assert story.join("m2", pid=6, rank=1, options={"fusion": "64"}) == "", "a refused member harms nobody"
    assert story.has_world("m0")


def test_one_process_too_many(story: Story) -> None:
    story.hold = True
    story.join("m0")
    story.join("m1")
    assert re.search(ends_with(WorldCode.TOO_MANY_MEMBERS, "'digits'", "2 members"), story.join("m2"))
    story.form()
    refusal = story.join("m3", pid=99)
    facts = "'digits'", "2 members", "world 1", "rank 0 (pid ", "HOROVOD_JOB"
    assert re.search(ends_with(WorldCode.JOB_RUNS_ALREADY, *facts), refusal)


# -- living and dying ------------------------------------------------------------------------------------------------


def test_a_lost_member_is_told_to_all_others(story: Story) -> None:
    story.join("m0", size=3)
    story.join("m1", size=3, host="node-b", pid=4242)
    story.join("m2", size=3)
    rank = [member.member_id for member in story.world("m1").members].index("m1")
    story.lose("m1", "it was killed by signal 9")
    for other in ("m0", "m2"):
        (gone,) = story.goodbyes(other)
        assert (gone.epoch, gone.rank, gone.host, gone.orderly) == (1, rank, "node-b", False)
        assert tells(gone.sentence, f"Rank {rank} (pid 4242) on host node-b {WAS_LOST}", "it was killed by signal 9")
    assert story.goodbyes("m1") == []
    assert story.gone == [(1, rank)]
    story.lose("m1")
    story.leave("m1")
    assert len(story.goodbyes("m0")) == 1, "gone once is gone"


def test_an_orderly_goodbye(story: Story) -> None:
    story.join("m0")
    story.join("m1", pid=7)
    story.leave("m1", "the script ended")
    (gone,) = story.goodbyes("m0")
    assert gone.orderly
    assert tells(gone.sentence, "Rank 1 (pid 7) on host node-a", "the script ended")
    assert story.closed == ["m1"]
    assert story.ended == []
    story.leave("m0")
    assert story.ended == [("digits", 1)]
    assert story.membership.world_of("digits") is None


def test_waiting_members_are_not_timed_out(story: Story) -> None:
    story.join("m0")
    story.pass_time(1e9)
    story.join("m1")
    assert story.has_world("m0")


def test_strangers(story: Story) -> None:
    story.join("m0")
    story.join("m1")
    stranger = story.membership.stranger
    assert stranger("digits", 1, "m1", 1) == ""
    assert re.search(ends_with(WorldCode.UNPROVEN_MEMBER, "'m1'", "rank 1", "rank 0"), stranger("digits", 1, "m1", 0))
    assert re.search(ends_with(WorldCode.EPOCH_OVER, "World 2", "world 1 now"), stranger("digits", 2, "m1", 1))
    assert re.search(ends_with(WorldCode.UNPROVEN_MEMBER, "'who'", "world 1"), stranger("digits", 1, "who", 1))
    assert re.search(ends_with(WorldCode.EPOCH_OVER, "'other'", "world 1"), stranger("other", 1, "m1", 1))


# -- the next world --------------------------------------------------------------------------------------------------


def test_the_next_world_of_a_job_has_a_higher_epoch(story: Story) -> None:
    for epoch in (1, 2, 3):
        story.join(f"a{epoch}", pid=1)
        story.join(f"b{epoch}", pid=2)
        assert story.world(f"a{epoch}").epoch == epoch
        story.leave(f"a{epoch}")
        story.leave(f"b{epoch}")


def test_processes_that_join_again_keep_their_ranks(story: Story) -> None:
    for name, pid in (("a1", 1), ("b1", 2), ("c1", 3)):
        story.join(name, size=3, pid=pid)
    for name in ("a1", "b1", "c1"):
        story.leave(name)
    for name, old in (("new2", None), ("c2", "c1"), ("a2", "a1")):  # b was replaced
        story.join(name, size=3, rejoin=old)
    assert [member.member_id for member in story.world("a2").members] == ["a2", "c2", "new2"]


def test_a_fast_member_may_join_again_before_a_slow_one_said_goodbye(story: Story) -> None:
    story.join("old0", pid=1)
    story.join("old1", pid=2)
    story.leave("old0")
    assert story.join("new0", pid=1) == "", "the world breaks up, so anybody may wait for the next"
    assert tells(story.progress("new0")[-1], "1 more", "world 1", "rank 1 (pid 2) on host node-a")
    story.leave("old1")
    assert story.ended == [("digits", 1)]
    story.join("new1", pid=2)
    assert story.world("new0").epoch == 2


def test_a_join_may_overtake_the_same_process_goodbye(story: Story) -> None:
    story.join("old0", pid=1)
    story.join("old1", pid=2)
    assert story.join("new0", rejoin="old0") == ""
    assert story.join("new1", rejoin="old1") == ""
    assert story.world("new0").epoch == 2
    assert story.ended == [("digits", 1)]
    assert sorted(story.closed) == ["old0", "old1"]
    story.leave("old0")
    story.lose("old1")
    assert story.goodbyes("new0") == [], "late goodbyes belong to the old world"
    assert story.membership.stranger("digits", 2, "new1", 1) == ""


def test_new_processes_wait_for_the_rest_of_a_world_that_breaks_up(story: Story) -> None:
    story.join("old0", pid=1)
    story.join("old1", pid=2)
    story.lose("old0")
    assert story.join("new0", pid=11) == ""
    assert story.join("new1", pid=12) == ""
    assert not story.has_world("new0")
    assert "still has rank 1 (pid 2)" in story.progress("new0")[-1]
    story.lose("old1")
    assert story.world("new0").epoch == 2


def test_survivors_and_a_replacement_form_the_next_world(story: Story) -> None:
    for name, pid in (("old0", 1), ("old1", 2), ("old2", 3)):
        story.join(name, size=3, pid=pid)
    story.lose("old1")
    story.join("new0", size=3, pid=1, rejoin="old0")
    story.join("new1", size=3, pid=22)
    story.join("new2", size=3, pid=3, rejoin="old2")
    assert {member.pid for member in story.world("new0").members} == {1, 22, 3}


@given(st.data())
def test_any_order_of_goodbyes_and_joins_ends_in_the_next_world(data: st.DataObject) -> None:
    """Each process says goodbye and joins again; only the order within a process is fixed, and not even that always."""
    story = Story()
    size = data.draw(st.integers(1, 4))
    for index in range(size):
        story.join(f"old{index}", size=size)
    ordered = data.draw(st.booleans())
    steps = [(kind, index) for index in range(size) for kind in ("leave", "join")]
    order = data.draw(st.permutations(steps))
    if ordered:
        kinds = {index: iter(("leave", "join")) for index in range(size)}
        order = [(next(kinds[index]), index) for _, index in order]
    for kind, index in order:
        if kind == "leave":
            story.leave(f"old{index}")
        else:
            assert story.join(f"new{index}", size=size, rejoin=f"old{index}") == ""
    for index in range(size):
        assert story.world(f"new{index}").epoch == 2
        assert story.goodbyes(f"new{index}") == []
    assert story.ended == [("digits", 1)]
    for index in range(size):
        story.leave(f"new{index}")
    assert story.ended == [("digits", 1), ("digits", 2)]
    assert story.membership._jobs == {}, "nothing is kept about a job that ended"
    assert story.membership._job_of == {}
