"""Hosts of elastic jobs that are lost, drained, set aside, used again, or supplied by a launcher, as stories."""

from __future__ import annotations

import pytest
from elastic_story import Elastic, two_of_two
from event_words import DRAINED, tells
from test_cluster import RUNNING, SUCCEEDED, report

from horovod.coordinator.core.elastic.hosts import Cooldown
from horovod.coordinator.core.ending import AGENT_S
from horovod.protos.v1 import jobs_pb2


def test_it_goes_on_without_a_host_that_is_lost() -> None:
    story = two_of_two()
    story.away("h2")
    story.tick(11)
    assert story.state("j") == RUNNING
    assert story.slots() == {"h1": [0, 1]}
    assert "no room" in story.sentence("j")
    assert story.told() == []
    story.runs("h1", {0: 0, 1: 0}, over=True)
    assert story.state("j") == SUCCEEDED


@pytest.mark.parametrize("failed", [2, 3])
def test_nothing_is_started_where_some_failed_and_the_others_are_lost(failed: int) -> None:
    story = two_of_two()
    story.runs("h2", {failed: 1}, over=True)
    assert story.slots() == {"h1": [0, 1]}
    assert story.starts() == []
    story.agent("h3")
    story.reach()
    assert story.slots() == {"h1": [0, 1], "h3": [2, 3]}


def test_a_lost_host_that_comes_back_ends_what_it_still_runs_and_gets_no_more_of_the_job() -> None:
    story = two_of_two()
    story.away("h2")
    story.tick(11)
    story.agent("h2", jobs=(report("j", {2: None, 3: None}),))
    assert [kind for _, kind in story.told() if kind != "probe"] == ["signal"]
    story.report("h2", "j", {2: -15, 3: -15}, over=True)
    story.reach()
    assert story.slots() == {"h1": [0, 1]}
    story.submit("other", 2)
    assert story.told()[-1] == ("h2", "start")


COOLS = jobs_pb2.Policy(cooldown_least_seconds=20, cooldown_most_seconds=60)


def test_a_lost_host_is_used_again_after_its_cooldown() -> None:
    story = two_of_two(policy=COOLS)
    for least_s, most_s in ((20, 40), (40, 60), (60, 60)):
        story.away("h2")
        story.tick(11)
        assert story.slots() == {"h1": [0, 1]}
        assert 0 <= story.aside_s("h2") - least_s <= most_s - least_s
        story.agent("h2")
        story.tick(story.aside_s("h2") - 1)
        assert story.slots() == {"h1": [0, 1]}
        story.sent.clear()
        story.tick(1.5)
        story.reach()
        assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}
        generation = story.cluster.jobs["j"].record.generation
        assert story.starts() == [("h2", 4, [(2, generation), (3, generation)])]
        story.runs("h2")
    story.runs("h2", {2: 0, 3: 0}, over=True)
    story.runs("h1", {0: 0, 1: 0}, over=True)
    assert story.state("j") == SUCCEEDED


@pytest.mark.parametrize(
    ("times", "chance", "delay_s"), [(0, 0.0, 2), (0, 0.5, 3), (1, 0.25, 4.5), (2, 1.0, 9), (1000, 0.0, 9)]
)
def test_a_cooldown_doubles_up_to_its_most(times: int, chance: float, delay_s: float) -> None:
    assert Cooldown(2, 9).delay_s(times, chance) == delay_s


def test_late_words_of_a_lost_share_are_not_those_of_the_next_one() -> None:
    story = two_of_two(policy=COOLS)
    story.away("h2")
    story.tick(11)
    old = report("j", {2: None, 3: None})
    story.agent("h2", jobs=(old,))
    story.tick(61)
    assert story.slots() == {"h1": [0, 1]}, "what is left of the lost share has not ended"
    old = report("j", {2: -15, 3: -15}, over=True)
    story.do(story.cluster.report("h2", old, story.now_s, story.wall_s))
    story.reach()
    assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}
    (forget,) = [what for agent, kind, what in story.sent if (agent, kind) == ("h2", "forget")]
    assert forget.share == 0
    (start,) = [what for _, kind, what in story.sent if kind == "start"]
    assert start.share == story.cluster.jobs["j"].record.generation
    story.do(story.cluster.report("h2", old, story.now_s, story.wall_s))  # once more
    assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}
    story.agent("h2", jobs=(old,), instance="h2")  # its stream broke before the order came
    assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}
    assert story.starts()[-1][2] == [(2, start.share), (3, start.share)]


def test_how_long_a_loss_waits_for_the_word_of_an_agent() -> None:
    story = Elastic()
    story.agent("h1", slots=1)
    story.agent("h2", slots=1, word_seconds=0.125)
    assert story.cluster.agent_s("j", 0) == 0, "no such job"
    story.submit_elastic(2)
    assert [story.cluster.agent_s("j", slot) for slot in (0, 1, 2)] == [AGENT_S, 0.125, 0]
    story.away("h2")
    assert story.cluster.agent_s("j", 1) == 0
    for promised in (float("nan"), float("inf"), -1.0):
        story.agent("h2", slots=1, word_seconds=promised)
        assert story.cluster.agent_s("j", 1) == AGENT_S, promised


def test_a_host_on_which_processes_fail_at_their_start_is_set_aside() -> None:
    story = two_of_two()
    for _ in range(2):
        story.tick(5)
        story.runs("h2", {2: None, 3: 127})
        assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}
        story.runs("h2")
    story.tick(5)
    story.runs("h2", {2: None, 3: 127})
    assert story.slots() == {"h1": [0, 1], "h2": [2]}
    assert tells(story.sentence("j"), "Host h2", "3 processes")
    story.agent("h3")
    story.reach()
    assert story.slots() == {"h1": [0, 1], "h2": [2], "h3": [3]}
    story.runs("h3")
    for agent, slots in story.slots().items():
        story.runs(agent, dict.fromkeys(slots, 0), over=True)
    assert story.state("j") == SUCCEEDED


def test_a_program_that_fails_everywhere_is_no_fault_of_a_host() -> None:
    story = two_of_two()
    for _ in range(5):
        story.runs("h1", {0: None, 1: 1})
        story.runs("h2", {2: None, 3: 1})
        assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}
        story.runs("h1")
        story.runs("h2")


@pytest.mark.parametrize("code", [143, -15])
def test_it_goes_on_without_a_host_that_is_drained(code: int) -> None:
    story = two_of_two()
    story.do(story.cluster.drain("h2"))
    story.runs("h2", {2: code})
    assert story.starts() == []
    assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}  # one process is on its way still
    story.agent("h3", slots=1)
    story.reach()
    story.runs("h2", {2: code, 3: code}, over=True)
    assert story.sentence("j").startswith(f"Host h2 {DRAINED}")
    assert tells(story.sentence("j"), "2 processes")
    story.reach()
    assert story.slots() == {"h1": [0, 1], "h3": [2]}
    record = story.cluster.jobs["j"].record
    assert record.replacements == 0
    assert story.starts() == [("h3", 3, [(2, record.generation)])]
    story.runs("h3", {2: 0})
    assert story.state("j") == RUNNING


def test_a_host_that_is_drained_while_the_work_gets_done_is_no_failure() -> None:
    story = two_of_two()
    story.do(story.cluster.drain("h2"))
    story.runs("h2", {2: 143})
    story.runs("h1", {0: 0, 1: 0}, over=True)
    story.runs("h2", {2: 143, 3: 143}, over=True)
    assert story.state("j") == SUCCEEDED


def test_processes_of_a_fixed_number_are_not_drained() -> None:
    story = Elastic()
    story.agent("h1")
    story.submit("j", 2, policy=jobs_pb2.Policy(replaces_failed=True, most_replacements=1))
    story.runs("h1")
    story.do(story.cluster.drain("h1"))
    story.runs("h1", {0: 143, 1: None})
    assert story.cluster.jobs["j"].record.replacements == 1


def test_a_host_that_was_drained_may_be_used_again() -> None:
    story = two_of_two()
    story.do(story.cluster.drain("h2"))
    story.runs("h2", {2: 143, 3: 143}, over=True)
    assert not story.cluster.jobs["j"].record.hosts_aside
    story.away("h2")
    story.agent("h2")
    story.reach()
    assert story.used() == {"h1": [0, 1], "h2": [2, 3]}


def test_a_process_that_a_drained_host_has_not_started_is_no_loss() -> None:
    story = two_of_two()
    story.runs("h2", {2: 1, 3: None})
    replacements = story.cluster.jobs["j"].record.replacements
    story.do(story.cluster.drain("h2"))
    story.runs("h2", {3: 143}, over=True)
    record = story.cluster.jobs["j"].record
    assert (record.replacements, list(record.hosts_aside)) == (replacements, [])
    assert story.used() == {"h1": [0, 1]}


def supplied() -> Elastic:
    """A job of two processes on each of two hosts that its launcher supplies."""
    story = Elastic()
    story.agent("h2")
    story.agent("h1")
    policy = jobs_pb2.Policy(replaces_failed=True, fewest=1, most=4, patience_seconds=60, supplied_hosts=True)
    story.submit("j", 4, policy=policy, hosts=[jobs_pb2.HostSlots(name=name, slots=2) for name in ("h2", "h1")])
    story.reach()
    story.runs("h1")
    story.runs("h2")
    story.sent.clear()
    return story


def test_a_supplied_host_goes_with_its_failed_process() -> None:
    story = supplied()
    assert story.used() == {"h2": [0, 1], "h1": [2, 3]}, "in the order in which the job names them"
    story.runs("h2", {0: -9, 1: None})
    assert story.used() == {"h1": [2, 3]}
    assert story.ended == [("j", 0), ("j", 1)], "its world awaits neither"
    assert [(agent, kind) for agent, kind, _ in story.sent] == [("h2", "signal")]
    story.reach()
    assert story.used() == {"h1": [2, 3]}, "and nothing is started there"


def test_a_supplied_host_is_used_again_once_its_agent_has_come_anew() -> None:
    story = supplied()
    story.runs("h2", {0: -9, 1: -9})
    story.away("h2")
    story.agent("h2")
    story.reach()
    assert story.used() == {"h1": [2, 3], "h2": [0, 1]}


def test_a_host_that_the_job_does_not_name_may_be_supplied_later() -> None:
    story = supplied()
    story.runs("h2", {0: 1, 1: None})
    story.agent("h3", slots=1)
    story.reach()
    assert story.used() == {"h1": [2, 3], "h3": [0]}


def test_a_supplied_host_is_not_blamed_for_what_happened_on_another_one() -> None:
    story = supplied()
    story.runs("h2", {0: -9, 1: -9})
    story.runs("h1", {2: 1, 3: None})
    assert story.used() == {"h1": [2, 3]}
    assert [ranks for agent, _, ranks in story.starts() if agent == "h1"] == [[(2, 3), (3, 1)]]


def test_a_supplied_host_whose_new_agent_comes_before_the_loss_is_used_again() -> None:
    story = supplied()
    story.away("h2")
    story.agent("h2", instance="another")
    story.reach()
    story.tick(1)
    story.reach()
    assert story.used() == {"h1": [2, 3], "h2": [0, 1]}


def test_a_supplied_host_that_went_in_order_is_not_set_aside() -> None:
    story = supplied()
    story.do(story.cluster.slots("h1", 0, story.now_s, story.wall_s))
    story.runs("h1", {2: 143, 3: 143})
    assert story.used() == {"h2": [0, 1]}
    assert not story.cluster.jobs["j"].record.hosts_aside
