"""Jobs on agents as stories: what is decided when agents come and go, jobs queue, ranks end. No clock, no socket."""

from __future__ import annotations

import re
from typing import Any

from error_codes import ends_with
from event_words import WAITS_FOR_HOSTS, WAITS_FOR_ROOM, tells

from horovod.base.errors import ClusterCode, LaunchCode, code_of, coded
from horovod.coordinator.core.cluster.cluster import Cluster
from horovod.coordinator.core.cluster.effects import Command, Save
from horovod.coordinator.core.cluster.job import refusal_of
from horovod.coordinator.core.ending import RankEnded
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2, membership_pb2

QUEUED, CONNECTING, RUNNING, ENDING, SUCCEEDED, FAILED, STOPPED = range(7)


class Story:
    """A cluster whose clock is moved by hand, and what it was told to send."""

    def __init__(self) -> None:
        self.cluster = Cluster("1.0", 2, away_grace_s=10.0)
        self.now_s = 100.0
        self.wall_ahead_s = 0.0  # of the wall clock, which people set
        self.sent: list[tuple[str, str, Any]] = []
        self.saved: dict[str, jobs_pb2.JobRecord] = {}
        self.ended: list[tuple[str, int]] = []

    @property
    def wall_s(self) -> float:
        return self.now_s + self.wall_ahead_s

    def do(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Command):
                kind = effect.command.WhichOneof("command")
                self.sent.append((effect.agent, kind, getattr(effect.command, kind)))
            elif isinstance(effect, Save):
                self.saved[effect.job] = jobs_pb2.JobRecord.FromString(effect.record)
            elif isinstance(effect, RankEnded):
                self.ended.append((effect.job, effect.rank))

    def told(self) -> list[tuple[str, str]]:
        """What was sent since the last call, by agent and kind."""
        sent, self.sent = self.sent, []
        return [(agent, kind) for agent, kind, _ in sent]

    def agent(
        self, name: str, slots: int = 2, jobs: tuple[pb.JobReport, ...] = (), instance: str = "", **more: Any
    ) -> None:
        register = pb.Register(
            protocol_version=2, version="1.0", name=name, instance=instance or name, slots=slots, jobs=jobs, **more,
            cpus=64, memory_bytes=1 << 40, probe_port=1,
            interfaces=[membership_pb2.Interface(address=f"10.0.0.{name[1:]}", name="eth0")],
        )  # fmt: skip
        assert self.cluster.refuses(register) is None
        self.do(self.cluster.attach(register, self.now_s, self.wall_s))

    def away(self, name: str) -> None:
        self.do(self.cluster.detached(name, name, self.now_s))

    def submit(self, job: str, processes: int, **fields: Any) -> None:
        spec = jobs_pb2.JobSpec(command=["x"], processes=processes, **fields)
        assert refusal_of(spec) == ""
        self.do(self.cluster.submit(job, spec, self.now_s, self.wall_s))

    def reach(self) -> None:
        """Answers every probe: all hosts reach each other."""
        for agent, kind, probe in list(self.sent):
            if kind == "probe":
                self.do(self.cluster.reached(agent, probe.probe, probe.targets, self.now_s, self.wall_s))

    def report(self, agent: str, job: str, codes: dict[int, int | None], over: bool = False, error: str = "") -> None:
        found = report(job, codes, over, error)
        found.share = self.share_number(agent, job)
        self.do(self.cluster.report(agent, found, self.now_s, self.wall_s))

    def share_number(self, agent: str, job: str) -> int:
        """That of the share which the host has now."""
        known = self.cluster.jobs.get(job)
        share = known.share_of(agent) if known is not None else None
        return share.generation if share is not None else 0

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(self.cluster.tick(self.now_s, self.wall_s))

    def state(self, job: str) -> int:
        return self.cluster.jobs[job].record.state

    def sentence(self, job: str) -> str:
        return self.cluster.jobs[job].record.sentence


def report(job: str, codes: dict[int, int | None], over: bool = False, error: str = "") -> pb.JobReport:
    """codes: by rank; None while it runs."""
    found = pb.JobReport(job=job, over=over, error=error)
    for rank, code in codes.items():
        one = found.ranks.add(rank=rank, pid=1000 + rank, ended=code is not None)
        if code is not None:
            one.code, one.stopped = code, code == -15
    return found


def running_on_two() -> Story:
    story = Story()
    story.agent("h1")
    story.agent("h2")
    story.submit("j", 4)
    story.reach()
    story.report("h1", "j", {0: None, 1: None})
    story.report("h2", "j", {2: None, 3: None})
    story.told()
    return story


def test_a_job_on_one_host_needs_no_probe() -> None:
    story = Story()
    story.agent("h1")
    story.submit("j", 2)
    agent, kind, start = story.sent[-1]
    assert (agent, kind, story.state("j")) == ("h1", "start", RUNNING)
    assert [(one.rank, one.local_rank, one.local_size, one.cross_size) for one in start.ranks] == [
        (0, 0, 2, 1),
        (1, 1, 2, 1),
    ]
    story.report("h1", "j", {0: 0, 1: 0}, over=True)
    assert story.state("j") == SUCCEEDED
    assert story.saved["j"].state == SUCCEEDED
    assert story.told()[-1] == ("h1", "forget")


def test_hosts_are_asked_whether_they_reach_each_other_once() -> None:
    story = Story()
    story.agent("h1")
    story.agent("h2")
    story.submit("j", 4)
    assert story.state("j") == CONNECTING
    assert [(agent, kind) for agent, kind, _ in story.sent] == [("h1", "probe"), ("h2", "probe")]
    story.reach()
    assert story.told()[2:] == [("h1", "start"), ("h2", "start")]
    assert [list(share.interfaces) for share in story.saved["j"].shares] == [["eth0"], ["eth0"]]
    story.report("h1", "j", {0: 0, 1: 0}, over=True)
    story.report("h2", "j", {2: 0, 3: 0}, over=True)
    story.told()
    story.submit("k", 4)
    assert story.told() == [("h1", "start"), ("h2", "start")]


def test_hosts_that_do_not_reach_each_other_run_nothing() -> None:
    story = Story()
    story.agent("h1")
    story.agent("h2")
    story.submit("j", 4)
    for agent, _, probe in list(story.sent):
        targets = [] if agent == "h1" else probe.targets
        story.do(story.cluster.reached(agent, probe.probe, targets, story.now_s, story.now_s))
    assert story.state("j") == FAILED
    assert re.search(ends_with(ClusterCode.HOSTS_UNREACHABLE, "h1", "h2", "10.0.0.2 (eth0)"), story.sentence("j"))
    assert "start" not in [kind for _, kind in story.told()]


def test_a_job_is_placed_once_where_the_one_before_it_can_not_run() -> None:
    """Job b fails while it is placed, since its hosts are known not to reach each other, and c takes its room."""
    story = Story()
    story.agent("h1", slots=1)
    story.agent("h2", slots=1)
    story.submit("first", 2)
    for agent, _, probe in list(story.sent):
        targets = [] if agent == "h1" else probe.targets
        story.do(story.cluster.reached(agent, probe.probe, targets, story.now_s, story.now_s))
    story.submit("x", 1)
    story.submit("y", 1)
    story.submit("b", 2)
    story.submit("c", 1)
    story.report("h1", "x", {0: 0}, over=True)
    story.told()
    story.report("h2", "y", {0: 0}, over=True)
    assert [story.state(job) for job in ("b", "c")] == [FAILED, RUNNING]
    assert [(agent, kind) for agent, kind in story.told() if kind == "start"] == [("h1", "start")]
    assert [share.agent for share in story.cluster.jobs["c"].record.shares] == ["h1"]


def test_a_probe_without_an_answer_is_one_that_reached_nothing() -> None:
    story = Story()
    story.agent("h1")
    story.agent("h2")
    story.submit("j", 4)
    story.tick(16)
    assert story.state("j") == FAILED


def test_the_queue_is_first_in_first_out() -> None:
    story = Story()
    story.agent("h1", slots=4)
    story.submit("a", 3)
    story.submit("b", 2)
    story.submit("c", 1)  # there is room for it, but b was first
    assert [story.state(job) for job in "abc"] == [RUNNING, QUEUED, QUEUED]
    assert story.sentence("b").startswith(WAITS_FOR_ROOM)
    assert tells(story.sentence("b"), "2 slots", "h1:1")
    assert tells(story.sentence("c"), "job b")
    story.report("h1", "a", {0: 0, 1: 0, 2: 0}, over=True)
    assert [story.state(job) for job in "abc"] == [SUCCEEDED, RUNNING, RUNNING]


def test_a_job_that_no_host_could_hold_keeps_nobody_waiting() -> None:
    story = Story()
    story.agent("h1")
    story.submit("a", 8)
    story.submit("b", 2)
    assert [story.state(job) for job in "ab"] == [QUEUED, RUNNING]
    assert story.sentence("a").startswith(WAITS_FOR_HOSTS)
    assert tells(story.sentence("a"), "8 slots")
    story.agent("h2", slots=8)
    assert story.state("a") == RUNNING


def test_slots_gpus_and_memory_belong_to_one_job() -> None:
    story = Story()
    story.agent("h1", slots=4)
    story.submit("a", 1, needs=jobs_pb2.Needs(memory_bytes=1 << 39))
    story.submit("b", 1, needs=jobs_pb2.Needs(memory_bytes=1 << 39))
    story.submit("c", 1, needs=jobs_pb2.Needs(memory_bytes=1))
    assert [story.state(job) for job in "abc"] == [RUNNING, RUNNING, QUEUED]
    assert story.cluster.free_slots("h1") == 2


def test_the_first_failure_ends_the_ranks_on_all_hosts() -> None:
    story = running_on_two()
    story.report("h1", "j", {0: None, 1: 3})
    assert story.state("j") == ENDING
    assert story.told() == [("h1", "end"), ("h2", "end")]
    assert story.ended == [("j", 1)]
    story.report("h1", "j", {0: -15, 1: 3}, over=True)
    assert story.state("j") == ENDING
    story.report("h2", "j", {2: 1, 3: 1}, over=True)
    record = story.saved["j"]
    assert (record.state, record.exit_code) == (FAILED, 3)
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 1", "h1", 1001, "exit code 3"), record.sentence)


def test_a_report_that_comes_twice_changes_nothing() -> None:
    story = running_on_two()
    story.report("h1", "j", {0: None, 1: 3})
    before = story.saved["j"]
    story.told()
    story.report("h1", "j", {0: None, 1: 3})
    assert story.told() == []
    assert story.saved["j"] == before


def test_a_host_that_stays_away_is_lost() -> None:
    story = running_on_two()
    story.away("h2")
    story.tick(5)
    assert story.state("j") == RUNNING
    story.tick(6)
    assert story.state("j") == ENDING
    assert story.told() == [("h1", "end")]
    story.report("h1", "j", {0: 1, 1: 1}, over=True)
    record = story.saved["j"]
    assert (record.state, record.exit_code) == (FAILED, 255)
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 2", "host h2", 1002, "10 s"), record.sentence)


def test_a_host_that_comes_back_goes_on() -> None:
    story = running_on_two()
    story.away("h2")
    story.tick(9)
    story.agent("h2", jobs=(report("j", {2: None, 3: 0}),), instance="another")
    story.tick(9)
    assert story.state("j") == RUNNING
    assert story.told() == []


def test_a_host_that_was_started_again_has_lost_its_ranks() -> None:
    story = running_on_two()
    story.away("h2")
    story.agent("h2", instance="after the boot")
    assert story.told() == [("h1", "end")]


def test_a_lost_host_that_comes_back_later_is_told_to_end_its_ranks() -> None:
    story = running_on_two()
    story.away("h2")
    story.tick(11)
    story.report("h1", "j", {0: 1, 1: 1}, over=True)
    story.told()
    story.agent("h2", jobs=(report("j", {2: None, 3: None}),))
    assert story.told() == [("h2", "signal")]
    assert story.cluster.free_slots("h2") == 0  # until they have ended
    story.report("h2", "j", {2: -15, 3: -15}, over=True)
    assert story.told() == [("h2", "forget")]
    assert story.cluster.free_slots("h2") == 2


def test_stopping() -> None:
    story = running_on_two()
    story.do(story.cluster.signal("j", 2, True, story.now_s, story.now_s))
    assert [(agent, kind, command.signal) for agent, kind, command in story.sent] == [
        ("h1", "signal", 2),
        ("h2", "signal", 2),
    ]
    story.report("h1", "j", {0: -2, 1: -2}, over=True)
    story.report("h2", "j", {2: -2, 3: -2}, over=True)
    assert (story.saved["j"].state, story.saved["j"].exit_code) == (STOPPED, 130)


def test_a_wall_clock_that_jumps_ends_nothing() -> None:
    """Limits follow the clock that only runs; the wall clock is for people who read when something was."""
    for jump_s in (-86_400.0, 86_400.0, 1e9):
        story = Story()
        story.agent("h1")
        story.agent("h2")
        story.submit("j", 4)
        story.wall_ahead_s = jump_s
        story.reach()
        story.report("h1", "j", {0: None, 1: None})
        story.report("h2", "j", {2: None, 3: None})
        story.away("h1")
        story.tick(9)
        assert story.state("j") == RUNNING  # 9 s of 10
        story.agent("h1", jobs=(report("j", {0: None, 1: None}),), instance="h1")
        story.wall_ahead_s = 0.0
        story.report("h1", "j", {0: 7, 1: -15}, over=True)
        story.wall_ahead_s = jump_s
        story.report("h2", "j", {2: -15, 3: -15}, over=True)
        assert story.state("j") == FAILED
        assert story.cluster.jobs["j"].record.exit_code == 7
        failed = ends_with(LaunchCode.RANK_FAILED, "Rank 0", "h1", 1000, "exit code 7", "ranks 1-3")
        assert re.search(failed, story.sentence("j"))


def test_the_environment_is_erased_with_the_end() -> None:
    """It may hold secrets, and the record stays in the store for long."""
    story = Story()
    story.agent("h1")
    story.submit("j", 2, environment={"API_KEY": "secret"})
    assert story.sent[-1][2].environment["API_KEY"] == "secret"
    story.report("h1", "j", {0: 0, 1: None})
    assert story.saved["j"].spec.environment["API_KEY"] == "secret"  # another coordinator may have to start it
    story.report("h1", "j", {1: 7}, over=True)
    story.submit("k", 20, environment={"API_KEY": "secret"})
    story.do(story.cluster.signal("k", 15, True, story.now_s, story.now_s))
    for job, state in (("j", FAILED), ("k", STOPPED)):
        assert story.saved[job].state == story.state(job) == state
        assert not story.saved[job].spec.environment
        assert not story.cluster.jobs[job].record.spec.environment


def test_stopping_one_that_waits_takes_no_slot() -> None:
    story = Story()
    story.submit("j", 2)
    story.do(story.cluster.signal("j", 15, True, story.now_s, story.now_s))
    story.agent("h1")
    assert story.state("j") == STOPPED
    assert story.sent == []


def test_another_coordinator_goes_on_from_the_records() -> None:
    story = running_on_two()
    story.submit("k", 2)
    later = Story()
    later.cluster.load(
        [jobs_pb2.JobRecord.FromString(record.SerializeToString()) for record in story.saved.values()], 0
    )
    later.now_s = 5
    later.agent("h1", jobs=(report("j", {0: None, 1: None}),))
    assert later.told() == []
    assert [later.state("j"), later.state("k")] == [RUNNING, QUEUED]
    later.tick(6)  # h2 has not come
    assert later.state("j") == ENDING
    later.report("h1", "j", {0: -15, 1: 1}, over=True)
    assert later.told() == [("h1", "end"), ("h1", "forget"), ("h1", "start")]


def test_another_coordinator_waits_for_hosts_that_keep_the_output_of_what_is_over() -> None:
    """Who reads it now must not hear that there is no more."""
    story = running_on_two()
    story.report("h1", "j", {0: 0, 1: 0}, over=True)
    story.report("h2", "j", {2: 0, 3: 0}, over=True)
    story.submit("queued", 9)
    assert story.saved["j"].state == SUCCEEDED
    other = Story()
    other.cluster.load(story.saved.values(), other.now_s)
    assert set(other.cluster.agents) == {"h1", "h2"}
    other.tick(11)
    assert not other.cluster.agents


def test_a_start_that_did_not_arrive_is_sent_again() -> None:
    story = Story()
    story.agent("h1")
    story.submit("j", 2)
    story.told()
    story.away("h1")
    story.agent("h1")
    assert story.told() == [("h1", "start")]


def test_an_agent_that_can_not_start_it() -> None:
    story = Story()
    story.agent("h1")
    story.submit("j", 2)
    story.report("h1", "j", {}, over=True, error="host h1 can't start it: no space left on device")
    assert story.saved["j"].state == FAILED
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 0", "h1", "no space left"), story.sentence("j"))


def test_the_code_of_what_an_agent_says_is_that_of_the_job() -> None:
    story = Story()
    story.agent("h1")
    story.submit("j", 2)
    error = coded(ClusterCode.CODE_NOT_HERE, "the coordinator does not have its code any more")
    story.report("h1", "j", {}, over=True, error=error)
    assert re.search(ends_with(ClusterCode.CODE_NOT_HERE, "Rank 0", "h1", "any more."), story.sentence("j"))


def test_agents_that_are_refused() -> None:
    story = Story()
    story.agent("h1")
    same = pb.Register(protocol_version=2, version="1.0", name="h1", instance="other")
    refused = story.cluster.refuses(same)
    assert refused is not None
    assert not refused.final
    assert code_of(refused.sentence) is ClusterCode.AGENT_NAME_TAKEN
    assert story.cluster.refuses(pb.Register(protocol_version=2, version="1.7", name="h2")) is None
    old = story.cluster.refuses(pb.Register(protocol_version=1, version="0.9", name="h2"))
    assert old is not None
    assert old.final
    assert re.search(ends_with(ClusterCode.AGENT_VERSION, "h2", "0.9", "protocol 1", "1.0", "protocol 2"), old.sentence)


def test_a_host_that_drains_gets_no_more_jobs() -> None:
    story = Story()
    story.agent("h1")
    story.do(story.cluster.drain("h1"))
    story.submit("j", 1)
    assert story.state("j") == QUEUED


def test_a_host_that_goes_while_others_are_asked_sends_the_job_back_to_the_queue() -> None:
    story = Story()
    story.agent("h1")
    story.agent("h2")
    story.submit("j", 4)
    story.away("h2")
    story.tick(11)
    assert story.state("j") == QUEUED
    story.told()
    story.agent("h3")
    assert story.state("j") == CONNECTING
