"""Run lists of job files as stories: the barrier between lines, failures, coordinators and hosts that change."""

from __future__ import annotations

import re
from typing import Any

import pytest
from error_codes import ends_with
from event_words import WOULD_WAIT, tells
from test_cluster import ENDING, FAILED, RUNNING, STOPPED, SUCCEEDED, Story

from horovod.base.errors import ClusterCode, LaunchCode, code_of
from horovod.coordinator.core.cluster.cluster import Cluster
from horovod.coordinator.core.cluster.job import refusal_of
from horovod.coordinator.core.cluster.placement import Capacity, Resources, place
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

LINES = (("prepare", False), ("train", True), ("close", False))


class LinesStory(Story):
    """Two workers of two processes, one on each host."""

    def begin(self, workers: int = 2, lines: tuple[tuple[str, bool], ...] = LINES) -> None:
        for number in range(workers):
            self.agent(f"h{number + 1}")
        spec = jobs_pb2.JobSpec(processes=2 * workers, processes_per_worker=2)
        for number, (shown, distributed) in enumerate(lines, 1):
            spec.lines.add(
                command=["sh", "-c", shown],
                shown=shown,
                distributed=distributed,
                title=f"line {number} of {len(lines)}",
            )
        assert refusal_of(spec) == ""
        self.do(self.cluster.submit("job", spec, self.now_s, self.now_s))
        self.reach()

    def ranks(self, host: str) -> list[int]:
        share = next(share for share in self.record.shares if share.agent == host)
        distributed = self.record.spec.lines[self.record.line].distributed
        return list(share.slots) if distributed else [share.slots[0]]

    def told_of(self, host: str, line: int, codes: tuple[int, ...], **more: Any) -> pb.JobReport:
        """What a host says whose processes of that line have ended so."""
        report = pb.JobReport(job="job", line=line, **{"lines_done": line + (not any(codes)), **more})
        for rank, code in zip(self.ranks(host), codes, strict=True):
            report.ranks.add(rank=rank, pid=100 + rank, ended=True, code=code)
        return report

    def finished(self, host: str, line: int, *codes: int, **more: Any) -> None:
        self.do(self.cluster.report(host, self.told_of(host, line, codes, **more), self.now_s, self.now_s))

    def over(self, host: str, line: int, **more: Any) -> None:
        report = pb.JobReport(job="job", line=line, over=True, **{"lines_done": line, **more})
        self.do(self.cluster.report(host, report, self.now_s, self.now_s))

    @property
    def record(self) -> jobs_pb2.JobRecord:
        return self.saved["job"]


@pytest.fixture
def story() -> LinesStory:
    return LinesStory()


def test_a_line_begins_when_all_workers_have_finished_the_one_before(story: LinesStory) -> None:
    story.begin()
    starts = [message for _, kind, message in story.sent if kind == "start"]
    assert [[line.shown for line in start.lines] for start in starts] == [["prepare", "train", "close"]] * 2
    story.told()
    story.finished("h1", 0, 0)
    assert story.told() == []
    story.finished("h2", 0, 0)
    assert story.record.line == 1  # saved before it is told
    assert story.told() == [("h1", "run_line"), ("h2", "run_line")]
    assert not story.record.outcomes
    story.finished("h2", 1, 0, 0)
    story.finished("h2", 1, 0, 0)  # the same again
    assert story.told() == []
    assert [outcome.rank for outcome in story.record.outcomes] == [2, 3]
    story.finished("h1", 1, 0, 0)
    assert story.told() == [("h1", "run_line"), ("h2", "run_line")]
    story.finished("h1", 2, 0, over=True)
    assert story.record.state == RUNNING
    story.finished("h2", 2, 0, over=True)
    assert (story.record.state, story.record.exit_code, story.record.sentence) == (SUCCEEDED, 0, "")


def test_only_processes_with_ranks_are_told_of_to_the_worlds(story: LinesStory) -> None:
    story.begin()
    story.finished("h1", 0, 0)
    story.finished("h2", 0, 0)
    assert story.ended == []
    story.finished("h1", 1, 0, 0)
    assert story.ended == [("job", 0), ("job", 1)]


def test_a_failing_line_stops_the_rest(story: LinesStory) -> None:
    story.begin()
    story.finished("h1", 0, 0)
    story.told()
    story.finished("h2", 0, 7, over=True)
    assert story.record.state == ENDING
    assert ("h1", "end") in story.told()
    story.over("h1", 0, lines_done=1)
    assert (story.record.state, story.record.exit_code) == (FAILED, 7)
    failed = ends_with(LaunchCode.RANK_FAILED, "Line 1 of 3 (`prepare`)", "worker 1", "h2", 102, "exit code 7")
    assert re.search(failed, story.record.sentence)


def test_a_rank_that_fails_is_named_with_its_line(story: LinesStory) -> None:
    story.begin()
    story.finished("h1", 0, 0)
    story.finished("h2", 0, 0)
    story.finished("h2", 1, 0, 3, over=True, lines_done=1)
    story.over("h1", 0, lines_done=1)  # it was ended before it had heard of the second line
    failed = ends_with(LaunchCode.RANK_FAILED, "Line 2 of 3 (`train`)", "rank 3", "h2", 103, "exit code 3")
    assert re.search(failed, story.record.sentence)


def test_stopping_between_two_lines(story: LinesStory) -> None:
    story.begin()
    story.finished("h1", 0, 0)
    story.do(story.cluster.signal("job", 15, True, story.now_s, story.now_s))
    story.over("h1", 0, lines_done=1)
    story.finished("h2", 0, -15, over=True, lines_done=0)
    assert (story.record.state, story.record.exit_code) == (STOPPED, 143)


def test_a_keeper_that_ends_between_two_lines_is_a_failure(story: LinesStory) -> None:
    story.begin()
    story.finished("h1", 0, 0)
    story.over("h1", 0, lines_done=1, error="no agent came back for it")
    story.finished("h2", 0, 0)
    assert story.record.line == 0
    story.over("h2", 0, lines_done=1)
    assert story.record.state == FAILED
    failed = ends_with(LaunchCode.RANK_FAILED, "Line 1 of 3 (`prepare`)", "worker 0", "h1", 100, "no agent came back")
    assert re.search(failed, story.record.sentence)


def test_a_host_that_is_lost_after_it_has_finished_its_line(story: LinesStory) -> None:
    story.begin()
    story.finished("h1", 0, 0)
    story.away("h1")
    story.now_s += 11
    story.do(story.cluster.tick(story.now_s, story.now_s))
    assert story.record.state == ENDING
    story.finished("h2", 0, 0)
    story.over("h2", 0, lines_done=1)
    assert story.record.state == FAILED
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "worker 0", "host h1", 100, "10 s"), story.record.sentence)


@pytest.mark.parametrize("told", [False, True])
def test_another_coordinator_goes_on_between_two_lines(story: LinesStory, told: bool) -> None:
    """The first one was killed after its record of the second line, whether or not the hosts have heard of it."""
    story.begin()
    story.finished("h1", 0, 0)
    story.finished("h2", 0, 0)
    report = pb.JobReport(job="job", line=1, lines_done=1) if told else story_before(story)
    story.cluster = Cluster("1.0", 2, away_grace_s=10.0)
    story.cluster.load(story.saved.values(), story.now_s)
    story.told()
    for host in ("h1", "h2"):
        story.agent(host, jobs=(report,))
    assert [one for one in story.told() if one[1] == "run_line"] == [("h1", "run_line"), ("h2", "run_line")]
    assert story.record.line == 1
    story.finished("h1", 1, 0, 0)
    story.finished("h2", 1, 0, 0)
    assert story.record.line == 2


def story_before(story: LinesStory) -> pb.JobReport:
    return pb.JobReport(job="job", line=0, lines_done=1)


def test_another_coordinator_finds_that_all_have_finished(story: LinesStory) -> None:
    """The first one was killed when it had heard of one host."""
    story.begin()
    story.finished("h1", 0, 0)
    before = jobs_pb2.JobRecord.FromString(story.record.SerializeToString())
    reports = [story.told_of(host, 0, (0,)) for host in ("h1", "h2")]
    story.cluster = Cluster("1.0", 2, away_grace_s=10.0)
    story.cluster.load([before], story.now_s)
    story.told()
    for host, report in zip(("h1", "h2"), reports, strict=True):
        story.agent(host, jobs=(report,))
    assert story.record.line == 1
    assert ("h1", "run_line") in story.told()


def test_a_host_between_two_lines_of_an_unknown_job_is_told_to_end(story: LinesStory) -> None:
    story.agent("h1", jobs=(pb.JobReport(job="other", line=0, lines_done=1),))
    assert ("h1", "signal") in story.told()


def test_workers_stay_whole() -> None:
    hosts = [Capacity("h1", 3), Capacity("h2", 5)]
    parts = place(Resources(6, together=2), hosts)
    assert [(part.host, part.first_rank, part.count) for part in parts] == [("h1", 0, 2), ("h2", 2, 4)]  # type: ignore[union-attr]
    assert tells(str(place(Resources(8, together=2), hosts)), "4 workers", "2 slots", "room for 3", "h1:1", "h2:2")
    assert place(Resources(2, together=1, worker_slots=3), hosts) == place(
        Resources(2, together=1, worker_slots=3), hosts[::-1]
    )
    gpus = [Capacity("h1", 8, gpus=("0", "1", "2"))]
    assert "room for 1" in str(place(Resources(4, gpus=1, together=2), gpus))


def test_slots_of_a_worker_are_taken_while_it_runs(story: LinesStory) -> None:
    story.agent("h1", slots=4)
    spec = jobs_pb2.JobSpec(processes=1, slots_per_worker=3)
    spec.lines.add(command=["x"], distributed=True)
    story.do(story.cluster.submit("job", spec, 0, 0))
    assert story.cluster.free_slots("h1") == 1


def test_where_a_job_would_go(story: LinesStory) -> None:
    story.agent("h1", slots=2)
    spec = jobs_pb2.JobSpec(processes=2, command=["x"])
    record = story.cluster.placement(spec)
    assert [(share.agent, list(share.slots)) for share in record.shares] == [("h1", [0, 1])]
    assert not story.cluster.jobs
    story.do(story.cluster.submit("first", spec, 0, 0))
    assert tells(story.cluster.placement(spec).sentence, WOULD_WAIT, "for room", "2 slots")
    spec.processes = 3
    assert tells(story.cluster.placement(spec).sentence, WOULD_WAIT, "for more hosts", "3 slots")


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"processes": 3, "processes_per_worker": 2}, ("3 processes", "2 processes")),
        ({"processes": 2, "processes_per_worker": 2, "slots_per_worker": 1}, ("2 processes", "not 1")),
        ({"processes": 2, "command": ["x"]}, ("command", "run list")),
        ({"processes": 2, "code": jobs_pb2.Code(sha256="../x", size=1)}, ("SHA-256",)),
    ],
)
def test_lists_that_make_no_sense(fields: dict[str, Any], facts: tuple[str, ...]) -> None:
    spec = jobs_pb2.JobSpec(**fields)
    spec.lines.add(command=["x"], distributed=True)
    assert re.search(ends_with(ClusterCode.INVALID_JOB, *facts), refusal_of(spec))
    spec.lines[0].distributed = False
    assert code_of(refusal_of(spec)) is ClusterCode.INVALID_JOB


def test_code_that_is_too_large() -> None:
    spec = jobs_pb2.JobSpec(processes=2, command=["x"], code=jobs_pb2.Code(sha256="0" * 64, size=1 << 40))
    assert re.search(ends_with(ClusterCode.CODE_TOO_LARGE, f"{1 << 40:,}", "64 MiB"), refusal_of(spec))
