"""Joining again: only who proves the old world's secret can end or enter a world that is complete."""

import pytest
from coordinator_builders import request
from membership_story import Story

from horovod.base.errors import WorldCode, code_of


@pytest.fixture
def story() -> Story:
    made = Story()
    for name, pid in (("a", 1), ("b", 2)):
        made.join(name, pid=pid, host="node-a", namespace="boot/1", start_time=pid)
    return made


def test_claiming_the_host_and_pids_of_a_running_job_is_not_enough(story: Story) -> None:
    for name, pid in (("x", 1), ("y", 2)):
        refusal = story.join(name, pid=pid, host="node-a", namespace="boot/1", start_time=pid)
        assert code_of(refusal) is WorldCode.JOB_RUNS_ALREADY
    assert story.closed == story.ended == []
    assert story.membership.stranger("digits", 1, "a", 0) == ""


@pytest.mark.parametrize("wrong", ["secret", "rank", "epoch", "job", "member id"])
def test_a_proof_of_something_else_is_none(story: Story, wrong: str) -> None:
    world = story.world("a")
    asked = request("x", rejoin=(world, 0))
    if wrong == "secret":
        asked.rejoin.proof = b"p" * 32
    elif wrong == "rank":
        asked.rejoin.rank = 1
    elif wrong == "epoch":
        asked.rejoin.epoch = 0
    elif wrong == "job":
        asked.job = "other"
    else:
        asked.member_id = "another"  # a proof that was overheard
    refusal, effects = story.membership.join(asked, 0.0)
    story.take(effects)
    if wrong == "job":
        assert refusal == "", "a newcomer there"
    else:
        assert code_of(refusal) is WorldCode.JOB_RUNS_ALREADY
    assert story.membership.stranger("digits", 1, "a", 0) == ""


def test_a_used_member_id_is_refused_with_its_proof(story: Story) -> None:
    assert story.join("c", rejoin="a") == ""
    story.disconnect("c")
    assert code_of(story.join("c", rejoin="a")) is WorldCode.MEMBER_ID_IN_USE, (
        "somebody overheard the request and repeats it"
    )
    assert code_of(story.join("a", rejoin="a")) is WorldCode.MEMBER_ID_IN_USE
    assert story.join("d", rejoin="a") == ""
    assert story.join("e", rejoin="b") == ""
    assert [member.member_id for member in story.world("d").members] == ["d", "e"]


def test_a_newer_attempt_of_a_process_replaces_the_one_that_still_waits(story: Story) -> None:
    assert story.join("a2", rejoin="a", rank=0) == ""
    assert story.join("a3", rejoin="a", rank=0) == "", "not asked for twice: the same process"
    assert "a2" in story.closed
    assert story.join("b2", rejoin="b", rank=1) == ""
    assert [member.member_id for member in story.world("a3").members] == ["a3", "b2"]


def test_a_member_that_joined_again_and_went_away_is_waited_for_as_before(story: Story) -> None:
    story.join("a2", rejoin="a")
    story.disconnect("a2")
    assert code_of(story.join("stranger")) is WorldCode.JOB_RUNS_ALREADY, "the world is complete again"
    story.join("b2", rejoin="b")
    assert not story.has_world("b2")
    story.leave("a")
    story.join("new")
    assert story.world("b2").epoch == 2


def test_a_job_that_runs_is_remembered_however_many_others_form_worlds(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod.coordinator.core.world.membership.MAX_REMEMBERED_JOBS", 1)
    story.join("x", job="other", size=1)
    assert story.join("a2", rejoin="a") == ""


def test_ranks_are_kept_also_after_the_world_has_ended(story: Story) -> None:
    story.leave("a")
    story.leave("b")
    story.join("b2", rejoin="b")
    story.join("a2", rejoin="a")
    assert [member.member_id for member in story.world("a2").members] == ["a2", "b2"]


def test_a_proof_of_the_world_before_the_last_makes_a_newcomer(story: Story) -> None:
    old = story.world("a")
    story.join("a2", rejoin="a")
    story.join("b2", rejoin="b")
    assert code_of(story.join("a3", rejoin=(old, 0))) is WorldCode.JOB_RUNS_ALREADY
    story.leave("a2")
    assert story.join("a3", rejoin=(old, 0)) == ""
    story.join("b3", rejoin="b2")
    assert [member.member_id for member in story.world("b3").members] == ["b3", "a3"], "b2 was a member of the last"
