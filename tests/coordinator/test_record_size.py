"""Records that every store takes: what is refused, what is kept in the shortest form, how a job ends otherwise."""

from __future__ import annotations

import random
import re

import pytest
from error_codes import ends_with
from test_cluster import FAILED, QUEUED, RUNNING, Story, running_on_two

from horovod.base.errors import ClusterCode, coded
from horovod.coordinator.core.cluster.job import refusal_of
from horovod.coordinator.core.cluster.job_record import LISTED_BYTES, MAX_RECORD_BYTES, listed, room_for, stored
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

UNKEPT = coded(ClusterCode.TOO_LARGE_FOR_STORE, "It can't be kept.")

LONG = "x" * 1_500_000


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        (jobs_pb2.JobSpec(command=["true"], environment={"LONG": LONG}), ["environment", "env -u LONG "]),
        (jobs_pb2.JobSpec(command=["true", LONG]), ["command", "file"]),
        (jobs_pb2.JobSpec(lines=[jobs_pb2.Line(command=[LONG], distributed=True)]), ["run list"]),
        (jobs_pb2.JobSpec(command=["true"], hosts=[jobs_pb2.HostSlots(name=LONG, slots=1)]), ["list of hosts"]),
        (jobs_pb2.JobSpec(command=["true"], processes=1 << 16), ["65536 processes"]),
    ],
)
def test_what_is_long_is_named(spec: jobs_pb2.JobSpec, facts: list[str]) -> None:
    spec.processes = spec.processes or 1
    assert re.search(ends_with(ClusterCode.JOB_TOO_LARGE, *facts), refusal_of(spec))


def test_thousands_of_processes_have_room() -> None:
    assert room_for(20_000, shares=2_500) > 500_000


def test_every_record_of_a_job_that_was_taken_fits() -> None:
    """However its processes end and whatever agents say of it."""
    chance, sizes = random.Random(3), set()
    for _ in range(20):
        processes = chance.choice([1, 100, 5_000, 15_000])
        replaces = chance.random() < 0.5
        record = jobs_pb2.JobRecord(id="j" * 47, number=1 << 60, submitted_at=1.5, started_at=1.5, ended_at=1.5)
        record.spec.command.append("true")
        record.spec.processes = processes
        if chance.random() < 0.5:
            record.spec.directory = "x" * 100_000
        record.spec.policy.replaces_failed = replaces
        record.spec.environment["E"] = "x" * (room_for(processes, processes, replaces) - 100_300)
        for rank in [one for one in range(processes) for _ in range(1 + replaces)]:
            text = "é" * chance.choice([0, 1, 100, 5000 if rank < 1000 else 50])
            record.outcomes.add(
                rank=rank, pid=chance.choice([1, (1 << 31) - 1, -1, 1 << 62]), code=-(1 << 31), stopped=True,
                ended_at=1.7e9, lost=text, incarnation=(1 << 18) if replaces else 0,
            )  # fmt: skip
        record.sentence = "é" * 500_000
        record.exit_code, record.stop_signal, record.line = -1, 64, 999
        kept = jobs_pb2.JobRecord.FromString(stored(record))
        assert kept.ByteSize() <= MAX_RECORD_BYTES
        assert [(one.rank, bool(one.lost)) for one in kept.outcomes] == [
            (one.rank, bool(one.lost)) for one in record.outcomes
        ]
        assert listed(record).ByteSize() <= LISTED_BYTES + 16 * processes
        sizes.add((processes, replaces))
    assert len(sizes) > 4


def test_a_short_record_is_kept_and_listed_as_it_is() -> None:
    record = jobs_pb2.JobRecord(id="j")
    record.outcomes.add(rank=1, lost="a cause " * 100, pid=-1)
    assert jobs_pb2.JobRecord.FromString(stored(record)) == record
    assert listed(record) is record


def test_a_job_that_the_names_of_its_hosts_make_too_long_ends_and_the_next_one_runs() -> None:
    story = Story()
    story.submit("large", 1, environment={"E": "x" * (room_for(1) - 200)})
    story.submit("next", 1)
    story.agent("h" + "1" * 300, slots=1)
    assert story.state("large") == FAILED
    assert re.search(ends_with(ClusterCode.JOB_TOO_LARGE, "1 hosts"), story.sentence("large"))
    assert story.saved["large"].sentence == story.sentence("large")
    assert not story.saved["large"].shares
    assert story.state("next") == RUNNING
    assert [kind for _, kind in story.told()] == ["start"]


def test_a_job_that_the_store_does_not_take_is_no_job() -> None:
    story = Story()
    story.agent("h1", slots=1)
    story.submit("refused", 1)
    story.submit("next", 1)
    assert story.state("next") == QUEUED
    story.do(story.cluster.withdraw("refused", story.now_s, story.wall_s))
    assert story.state("next") == RUNNING
    assert story.cluster.withdraw("refused", story.now_s, story.wall_s) == []


def test_a_running_job_that_can_not_be_kept_any_more_is_ended() -> None:
    story = running_on_two()
    story.cluster.jobs["j"].record.spec.environment["SECRET"] = "s"
    story.do(story.cluster.unkept("j", UNKEPT, story.now_s, story.wall_s))
    assert sorted(story.told()) == [("h1", "end"), ("h2", "end")]
    assert not story.saved["j"].spec.environment
    story.do(story.cluster.unkept("j", "Once more.", story.now_s, story.wall_s))
    assert story.told() == []
    story.report("h1", "j", {0: -15, 1: -15}, over=True)
    story.report("h2", "j", {2: -15, 3: -15}, over=True)
    assert (story.state("j"), story.sentence("j")) == (FAILED, UNKEPT)
    assert story.saved["j"].state == FAILED
    assert [kind for _, kind in story.told()] == ["forget", "forget"]


def test_what_was_not_started_of_a_job_that_can_not_be_kept_is_over() -> None:
    """Its start was to follow the record; what was started all the same is ended as what nobody wants."""
    story = Story()
    story.agent("h1")
    story.submit("j", 2)
    story.do(story.cluster.unkept("j", UNKEPT, story.now_s, story.wall_s))
    assert (story.state("j"), story.sentence("j")) == (FAILED, UNKEPT)
    story.told()
    story.do(story.cluster.report("h1", report_of(running=2), story.now_s, story.wall_s))
    assert story.told() == [("h1", "signal")]


def report_of(running: int) -> pb.JobReport:
    found = pb.JobReport(job="j")
    for rank in range(running):
        found.ranks.add(rank=rank, pid=1000 + rank)
    return found
