"""Slots that elastic jobs give back: to jobs that wait, and where a host has fewer than it had. No clock, no socket."""

from __future__ import annotations

from elastic_story import Elastic, two_of_two
from event_words import SLOTS_COME_BACK, tells
from test_cluster import QUEUED, RUNNING, SUCCEEDED, report

from horovod.protos.v1 import jobs_pb2


def grown() -> Elastic:
    """A job that asked for one process, and has got four."""
    story = Elastic()
    story.agent("h1")
    story.agent("h2")
    story.submit_elastic(1)
    story.runs("h1")
    story.runs("h2")
    assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}
    story.sent.clear()
    return story


def test_a_job_that_waits_gets_the_last_slots_of_one_that_has_grown() -> None:
    story = grown()
    story.submit("other", 2)
    assert story.leaves() == [("h2", [(2, 1), (3, 1)])]
    assert (story.state("other"), story.state("j")) == (QUEUED, RUNNING)
    assert story.sentence("other").endswith(SLOTS_COME_BACK)
    assert tells(story.sentence("j"), "Slots 2 and 3 on host h2", "job other")
    story.tick(1)
    story.runs("h2", {2: None, 3: 143})
    assert story.slots() == {"h1": [0, 1], "h2": [2]}
    assert story.told() == [], "neither is it replaced, nor does the job grow again"
    story.runs("h2", {2: -9, 3: 143})
    assert story.slots() == {"h1": [0, 1], "h2": []}
    assert (story.state("other"), story.state("j")) == (RUNNING, RUNNING)
    record = story.saved["j"]
    assert (record.replacements, list(record.outcomes), list(record.shares[1].left)) == (0, [], [2, 3])
    assert [(agent, kind) for agent, kind in story.told() if kind == "start"] == [("h2", "start")]
    # When there is room again, the job grows again: in the share that is still there.
    story.report("h2", "other", {0: 0, 1: 0}, over=True)
    generation = story.cluster.jobs["j"].record.generation
    assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}
    assert story.starts() == [("h2", 4, [(2, generation), (3, generation)])]
    for agent, slots in story.slots().items():
        story.runs(agent, dict.fromkeys(slots, 0), over=True)
    assert story.state("j") == SUCCEEDED


def test_no_more_is_taken_back_than_is_needed_and_nothing_that_the_job_asked_for() -> None:
    story = grown()
    story.submit("other", 1)
    assert story.leaves() == [("h2", [(3, 1)])]
    story.submit("third", 2)  # it waits behind the first
    story.tick(1)
    assert story.leaves() == []
    story.runs("h2", {2: None, 3: 143})
    assert story.state("other") == RUNNING
    assert story.leaves() == [("h1", [(1, 1)]), ("h2", [(2, 1)])]
    story.submit("large", 4)
    story.tick(1)
    assert story.leaves() == []


def test_nothing_is_taken_back_where_it_would_not_do() -> None:
    story = grown()
    story.submit("large", 4)
    assert story.leaves() == []
    assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}


def test_slots_are_taken_back_on_the_hosts_that_are_needed() -> None:
    story = grown()
    story.submit("other", 1, hosts=[jobs_pb2.HostSlots(name="h1", slots=2)])
    assert story.leaves() == [("h1", [(1, 1)])]


def test_a_job_may_keep_its_slots() -> None:
    story = Elastic()
    story.agent("h1")
    story.submit_elastic(1, policy=jobs_pb2.Policy(keeps_slots=True))
    story.runs("h1")
    story.submit("other", 1)
    assert story.leaves() == []


def test_the_youngest_job_gives_first() -> None:
    story = Elastic()
    story.agent("h1", slots=4)
    story.submit_elastic(1, most=2)
    story.submit("k", 1, policy=jobs_pb2.Policy(replaces_failed=True, fewest=1, most=2))
    story.runs("h1")
    story.report("h1", "k", {0: None, 1: None})
    story.sent.clear()
    story.submit("other", 1)
    assert [(what.job, list(what.ranks)) for _, kind, what in story.sent if kind == "leave"] == [("k", [1])]


def test_a_host_that_has_fewer_slots_loses_the_last_ones() -> None:
    story = two_of_two(policy=jobs_pb2.Policy(leave_seconds=5))
    story.do(story.cluster.slots("h1", 1, story.now_s, story.wall_s))
    ((_, _, leave),) = [one for one in story.sent if one[1] == "leave"]
    assert (list(leave.ranks), leave.grace_seconds) == ([1], 5)
    assert "since host h1 has 1 slot now" in story.sentence("j")
    story.agent("h1", slots=1, jobs=(report("j", {0: None, 1: None}),))  # its stream had broken
    assert story.leaves() == [("h1", [(1, 1)]), ("h1", [(1, 1)])]
    story.runs("h1", {0: None, 1: 0})
    assert story.slots() == {"h1": [0], "h2": [2, 3]}
    story.tick(1)
    assert story.slots() == {"h1": [0], "h2": [2, 3]}
    story.do(story.cluster.slots("h1", 0, story.now_s, story.wall_s))
    story.runs("h1", {0: -15})
    assert story.slots() == {"h1": [], "h2": [2, 3]}
    story.agent("h3")
    story.reach()
    assert story.slots() == {"h1": [], "h2": [2, 3], "h3": [0, 1]}
    story.runs("h3")
    story.away("h1")
    story.tick(61)
    story.runs("h3", {0: 0, 1: 0}, over=True)
    story.runs("h2", {2: 0, 3: 0}, over=True)
    assert story.state("j") == SUCCEEDED


def test_a_host_that_was_to_be_left_and_is_gone_may_come_back() -> None:
    story = two_of_two()
    story.do(story.cluster.slots("h2", 0, story.now_s, story.wall_s))
    story.away("h2")
    story.tick(11)
    assert story.slots() == {"h1": [0, 1]}
    assert not story.cluster.jobs["j"].record.hosts_aside
    assert story.cluster.jobs["j"].record.replacements == 0
    story.agent("h2")
    story.reach()
    assert story.slots() == {"h1": [0, 1], "h2": [2, 3]}


def test_a_slot_that_is_to_leave_says_nothing_of_the_job_that_ends_meanwhile() -> None:
    story = grown()
    story.submit("other", 1)
    story.runs("h1", {0: 0, 1: None})
    story.runs("h2", {2: None, 3: 143})
    story.runs("h1", {0: 0, 1: 0}, over=True)
    story.runs("h2", {2: 0}, over=True)
    assert (story.state("j"), story.state("other")) == (SUCCEEDED, RUNNING)


def test_another_coordinator_knows_which_slots_are_to_leave() -> None:
    story = grown()
    story.submit("other", 1)
    other = Elastic()
    other.cluster.load(story.saved.values(), other.now_s)
    other.agent("h2", jobs=(report("j", {2: None, 3: None}),))
    assert other.leaves() == [("h2", [(3, 1)])]
    other.agent("h1", jobs=(report("j", {0: None, 1: None}),))
    other.runs("h2", {2: None, 3: 143})
    assert (other.slots(), other.state("other")) == ({"h1": [0, 1], "h2": [2]}, RUNNING)


def test_an_agent_that_drains_does_not_wait_for_a_job_without_processes_there() -> None:
    story = grown()
    story.do(story.cluster.drain("h2"))
    story.do(story.cluster.slots("h2", 0, story.now_s, story.wall_s))
    story.sent.clear()
    story.runs("h2", {2: 143, 3: 143})
    assert story.told() == [("h2", "finish")]
    story.report("h2", "j", {}, over=True)
    assert story.told() == [("h2", "forget")]
    story.away("h2")
    story.runs("h1", {0: 0, 1: 0}, over=True)
    assert story.state("j") == SUCCEEDED
