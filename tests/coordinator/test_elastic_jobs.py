"""Jobs whose size changes, on agents that come and go, as stories. No clock, no socket."""

from __future__ import annotations

from typing import Any

import pytest
from test_cluster import FAILED, RUNNING, STOPPED, SUCCEEDED, Story, report

from horovod.base.errors import ClusterCode, code_of
from horovod.coordinator.core.cluster.job import refusal_of
from horovod.coordinator.core.elastic.cooldown import Cooldown
from horovod.coordinator.core.ending import AGENT_S
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2


class Elastic(Story):
    def submit_elastic(self, processes: int, fewest: int = 1, most: int = 4, **fields: Any) -> None:
        policy = jobs_pb2.Policy(replaces_failed=True, fewest=fewest, most=most, patience_seconds=60)
        policy.MergeFrom(fields.pop("policy", jobs_pb2.Policy()))
        self.submit("j", processes, policy=policy, **fields)
        self.reach()

    def slots(self) -> dict[str, list[int]]:
        return {share.agent: list(share.slots) for share in self.cluster.jobs["j"].record.shares}

    def leaves(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """What was to leave: where, and rank and incarnation of each process."""
        found = [(agent, what) for agent, kind, what in self.sent if kind == "leave"]
        self.sent.clear()
        return [(agent, list(zip(what.ranks, what.incarnations, strict=True))) for agent, what in found]

    def aside_s(self, agent: str) -> float:
        """For how long the host gets no process of the job from now on."""
        (found,) = [one for one in self.cluster.jobs["j"].record.hosts_aside if one.agent == agent]
        return found.until - self.wall_s

    def runs(self, agent: str, codes: dict[int, int | None] | None = None, over: bool = False) -> None:
        """The agent reports its processes of the job, all of which run unless `codes` says how they ended."""
        share = self.cluster.jobs["j"].share_of(agent)
        assert share is not None
        found = report("j", codes if codes is not None else dict.fromkeys(share.slots), over)
        found.share = share.generation
        for rank in found.ranks:
            rank.incarnation = dict(zip(share.slots, share.incarnations, strict=False)).get(rank.rank, 1)
        self.do(self.cluster.report(agent, found, self.now_s, self.wall_s))

    def used(self) -> dict[str, list[int]]:
        """The slots of each host that has some."""
        return {host: slots for host, slots in self.slots().items() if slots}

    def starts(self) -> list[tuple[str, int, list[tuple[int, int]]]]:
        """Of each start that was sent: where, the size, and rank and incarnation of each process."""
        found = [(agent, start) for agent, kind, start in self.sent if kind == "start"]
        self.sent.clear()
        return [(agent, start.size, [(one.rank, one.incarnation) for one in start.ranks]) for agent, start in found]


def two_of_two(**fields: Any) -> Elastic:
    story = Elastic()
    story.agent("h1")
    story.agent("h2")
    story.submit_elastic(4, **fields)
    story.runs("h1")
    story.runs("h2")
    story.sent.clear()
    return story


def without_hosts(fewest: int = 1) -> Elastic:
    """A job of two processes, whose one host was lost."""
    story = Elastic()
    story.agent("h1")
    story.submit_elastic(2, fewest=fewest)
    story.runs("h1")
    story.away("h1")
    story.tick(11)
    return story


def test_it_begins_with_as_many_as_there_is_room_for() -> None:
    story = Elastic()
    story.agent("h1", slots=3)
    story.submit_elastic(1, most=2)
    assert story.starts() == [("h1", 2, [(0, 1), (1, 1)])]


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
    assert story.sentence("j").startswith("Host h2 was drained, and 2 processes left the job.")
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
    assert "Host h2 gets no further process of this job, since 3 processes failed there" in story.sentence("j")
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
