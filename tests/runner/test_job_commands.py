"""horovodrun ps, logs, stop and wait on two agents; what the table looks like."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import Agents
from error_codes import ends_with

from horovod.base.errors import ClusterCode, LaunchCode
from horovod.launch.cluster.job_commands import as_table
from horovod.protos.v1 import jobs_pb2

Program = Callable[[str], list[str]]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(tmp_path) as agents:
        agents.add("h1")
        yield agents


def test_the_life_of_a_detached_job(agents: Agents, horovodrun: Run, program: Program, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    source = f"print('rank', rank, 'begins')\nopen({str(go)!r}).read() if rank == 0 else 0\nsys.exit(3 * (rank == 0))"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return horovodrun(*arguments, environ=agents.environ)

    job = run(*agents.options, "--detach", "-np", "2", *program(source)).stdout.strip()
    assert job.startswith("program-")
    waiting = run(*agents.options, "--detach", "--job-name", "second", "-np", "1", "true").stdout.strip()
    listing = json.loads(run("ps", *agents.options, "--output-format", "json").stdout)
    assert [(one["id"], one["state"]) for one in listing["jobs"]] == [(waiting, "queued"), (job, "running")]
    assert listing["jobs"][0]["reason"].startswith("It waits for room: it asks for 1 slot, and there is room for 0")
    assert listing["hosts"][0]["free_slots"] == 0
    with go.open("w"):  # when rank 0 is there
        pass
    done = run("wait", *agents.options, job)
    assert done.returncode == 3
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 0 on host h1 (pid "), done.stderr)
    assert run("logs", *agents.options, "-f", "--rank", "1", job).stdout == "[1]<stdout>:rank 1 begins\n"
    assert run("wait", *agents.options, waiting).returncode == 0


def test_stopping_and_unknown_jobs(agents: Agents, horovodrun: Run) -> None:
    job = horovodrun(*agents.options, "--detach", "-np", "1", "sleep", "1000", environ=agents.environ).stdout.strip()
    done = horovodrun("wait", *agents.options, "--timeout", "0.1", job, environ=agents.environ)
    assert done.returncode == 124
    assert re.search(ends_with(ClusterCode.JOB_NOT_OVER, job), done.stderr)
    assert horovodrun("stop", *agents.options, job, environ=agents.environ).returncode == 0
    assert horovodrun("wait", *agents.options, job, environ=agents.environ).returncode == 128 + 15
    done = horovodrun("logs", *agents.options, "no-such", environ=agents.environ)
    assert done.returncode == 1
    assert re.search(ends_with(ClusterCode.UNKNOWN_JOB, "'no-such'"), done.stderr)


def test_the_table() -> None:
    listing = jobs_pb2.Listing()
    job = listing.jobs.add(id="train-1", state=jobs_pb2.JOB_STATE_FAILED, exit_code=1, submitted_at=100, ended_at=230)
    job.spec.command.extend(["python", "train.py", "--epochs", "90", "--learning-rate", "0.1"])
    job.spec.processes, job.spec.user, job.sentence = 4, "ada", "Rank 1 ended with exit code 1."
    job.shares.add(agent="h1", slots=range(4))
    listing.agents.add(name="h1", slots=4, free_slots=4, gpus=0, state="ready")
    assert as_table(listing, now_s=1000) == (
        "JOB      STATE       RANKS  HOSTS  USER  AGE    COMMAND\n"
        "train-1  failed (1)  4      h1     ada   2m10s  python train.py --epochs 90 --learnin...\n"
        "\n"
        "train-1: Rank 1 ended with exit code 1.\n"
        "\n"
        "HOST  STATE  SLOTS  FREE  GPUS\n"
        "h1    ready  4      4     0\n"
    )
