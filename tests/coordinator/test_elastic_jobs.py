"""The size of elastic jobs on agents: where they begin and grow, and what becomes of them with too few, as stories."""

from __future__ import annotations

from typing import Any

import pytest
from elastic_story import Elastic, two_of_two, without_hosts
from test_cluster import FAILED, RUNNING, STOPPED, SUCCEEDED, Story, report

from horovod.base.errors import ClusterCode, code_of
from horovod.coordinator.core.cluster.job import refusal_of
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2


def test_it_begins_with_as_many_as_there_is_room_for() -> None:
    story = Elastic()
    story.agent("h1", slots=3)
    story.submit_elastic(1, most=2)
    assert story.starts() == [("h1", 2, [(0, 1), (1, 1)])]


def test_it_grows_on_a_host_that_comes() -> None:
    story = two_of_two()
    story.away("h2")
    story.tick(11)
    story.agent("h3", slots=8)
    story.reach()
    assert story.slots() == {"h1": [0, 1], "h3": [2, 3]}
    generation = story.cluster.jobs["j"].record.generation
    assert story.starts() == [("h3", 4, [(2, generation), (3, generation)])]
    story.runs("h3")
    story.runs("h1", {0: 0, 1: 0}, over=True)
    story.runs("h3", {2: 0, 3: 0}, over=True)
    assert story.state("j") == SUCCEEDED


def test_it_leaves_room_to_a_job_that_waits() -> None:
    story = two_of_two()
    story.away("h2")
    story.tick(11)
    story.submit("other", 3)
    story.agent("h3", slots=2)
    story.reach()
    assert story.slots() == {"h1": [0, 1]}
    story.agent("h4", slots=1)
    story.reach()
    assert story.state("other") == RUNNING
    story.agent("h5", slots=1)
    story.reach()
    assert story.slots() == {"h1": [0, 1], "h5": [2]}


def test_it_grows_on_its_own_hosts() -> None:
    story = Elastic()
    story.agent("h1", slots=4)
    story.submit("other", 2)
    story.submit_elastic(1)
    assert story.slots() == {"h1": [0, 1]}
    story.runs("h1")
    story.sent.clear()
    story.report("h1", "other", {0: 0, 1: 0}, over=True)
    generation = story.cluster.jobs["j"].record.generation
    assert story.starts() == [("h1", 4, [(0, 1), (1, 1), (2, generation), (3, generation)])]


def test_too_few_are_waited_for_a_while() -> None:
    story = Elastic()
    story.agent("h1")
    story.agent("h2")
    story.submit_elastic(4, fewest=3)
    story.runs("h1")
    story.runs("h2")
    story.away("h2")
    story.tick(11)
    assert story.state("j") == RUNNING
    story.tick(59)
    assert story.state("j") == RUNNING
    story.sent.clear()
    story.tick(2)
    assert story.told() == [("h1", "end")]
    story.runs("h1", {0: 1, 1: 1}, over=True)
    assert story.state("j") == FAILED
    assert "at least 3" in story.sentence("j")


def test_what_begins_while_there_are_too_few_is_not_told_of_a_smaller_world() -> None:
    story = without_hosts(fewest=2)
    story.sent.clear()
    story.agent("h2", slots=1)
    assert [size for _, size, _ in story.starts()] == [2]


def test_a_job_without_hosts_can_be_stopped() -> None:
    story = without_hosts()
    story.do(story.cluster.signal("j", 15, True, story.now_s, story.wall_s))
    assert story.state("j") == STOPPED


def test_another_coordinator_does_not_wait_for_ever() -> None:
    story = without_hosts()
    other = Elastic()
    other.cluster.load(story.saved.values(), other.now_s)
    other.tick(1)
    assert other.state("j") == RUNNING
    other.tick(61)
    assert other.state("j") == FAILED
    assert code_of(other.sentence("j")) is ClusterCode.TOO_FEW_PROCESSES


def test_without_any_process_it_waits_for_a_host() -> None:
    story = without_hosts()
    assert story.state("j") == RUNNING
    assert story.slots() == {}
    story.sent.clear()
    story.agent("h2", slots=1)
    assert story.starts() == [("h2", 1, [(0, 2 + 1)])]
    story.away("h2")
    story.tick(11)
    story.tick(61)
    assert story.state("j") == FAILED
    assert code_of(story.sentence("j")) is ClusterCode.TOO_FEW_PROCESSES


def test_a_failed_process_is_replaced_on_its_host() -> None:
    story = two_of_two()
    story.runs("h2", {2: -9, 3: None})
    (start,) = story.starts()
    assert start[:2] == ("h2", 4)
    assert start[2] == [(2, 2), (3, 1)]


@pytest.mark.parametrize(("fields", "host"), [({"labels": {"gpu": "yes"}}, "h3"), ({"hosts": ["h1", "h4"]}, "h4")])
def test_it_grows_only_where_it_may_run(fields: dict[str, Any], host: str) -> None:
    story = Elastic()
    if hosts := fields.get("hosts"):
        fields = {"hosts": [jobs_pb2.HostSlots(name=name, slots=1) for name in hosts]}
    _agent(story, "h1", {"gpu": "yes"})
    _agent(story, "h2", {})
    story.submit_elastic(1, **fields)
    assert story.slots() == {"h1": [0]}
    story.runs("h1")
    _agent(story, "h3", {"gpu": "yes"} if host == "h3" else {})
    _agent(story, "h4", {})
    story.reach()
    assert story.slots() == {"h1": [0], host: [1]}


def _agent(story: Story, name: str, labels: dict[str, str]) -> None:
    register = pb.Register(protocol_version=2, version="1.0", name=name, instance=name, slots=1, labels=labels)
    register.cpus, register.memory_bytes, register.probe_port = 64, 1 << 40, 1
    register.interfaces.add(address=f"10.0.0.{name[1:]}", name="eth0")
    story.do(story.cluster.attach(register, story.now_s, story.wall_s))


def test_another_coordinator_goes_on_with_a_job_that_has_shrunk() -> None:
    story = two_of_two()
    story.away("h1")
    story.tick(11)
    other = Elastic()
    other.cluster.load(story.saved.values(), other.now_s)
    other.agent("h2", jobs=(report("j", {2: None, 3: None}),))
    assert other.slots() == {"h2": [2, 3]}
    other.agent("h5")
    other.reach()
    assert other.slots() == {"h2": [2, 3], "h5": [0, 1]}


@pytest.mark.parametrize(
    "policy",
    [
        {"fewest": 3, "most": 4},
        {"fewest": 1, "most": 1},
        {"most": 4},
        {"fewest": 1, "replaces_failed": False},
        {"fewest": 1, "patience_seconds": -1.0},
        {"fewest": 1, "cooldown_least_seconds": 2.0, "cooldown_most_seconds": 1.0},
        {"fewest": 2, "most": 3, "spares": 2},
        {"fewest": 2, "spares": 1},
    ],
)
def test_sizes_that_make_no_sense(policy: dict[str, Any]) -> None:
    spec = jobs_pb2.JobSpec(command=["x"], processes=2, policy=jobs_pb2.Policy(**{"replaces_failed": True, **policy}))
    assert code_of(refusal_of(spec)) is ClusterCode.INVALID_JOB
