"""horovodrun ps, logs, stop and wait on two agents; what the table looks like."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from agents import Agents
from error_codes import ends_with
from event_words import WAITS_FOR_ROOM

from horovod import __version__
from horovod.base.errors import ClusterCode, LaunchCode
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.base.telemetry.logs import TextFormatter
from horovod.launch.cluster.client import Access
from horovod.launch.cluster.job_commands import as_story, as_table
from horovod.launch.cluster.submission import submit
from horovod.protos.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2, story_pb2
from horovod.worker.agent.output import Console, Writer
from horovod.worker.runtime.logs import Handler

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
    assert listing["jobs"][0]["reason"].startswith(WAITS_FOR_ROOM)
    assert listing["hosts"][0]["free_slots"] == 0
    with go.open("w"):  # when rank 0 is there
        pass
    done = run("wait", *agents.options, job)
    assert done.returncode == 3
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 0 on host h1 (pid "), done.stderr)
    assert run("logs", *agents.options, "-f", "--rank", "1", job).stdout == "[1]<stdout>:rank 1 begins\n"
    assert run("wait", *agents.options, waiting).returncode == 0


# Writes a terminal's clipboard (OSC 52), its title (in C1 form too), clears it, forges a line, turns the writing.
HOSTILE = "a\x1b]52;c;cm0gLXJmIC8=\x07\x9d0;t\x9c\x1b[2J\r\nforged\u202etxt"


def harmless(text: str) -> bool:
    """Whether a terminal shows it and does nothing else."""
    return all(one.isprintable() or one == "\n" for one in text)


@contextlib.contextmanager
def hostile_agent(coordinator: str, token: str) -> Iterator[None]:
    """An agent that has the cluster's token and registers under a name that is a program for terminals."""
    closed = threading.Event()

    def messages() -> Iterator[agents_pb2.AgentMessage]:
        about = {"protocol_version": PROTOCOL_VERSION, "version": __version__, "instance": "1", "slots": 4}
        yield agents_pb2.AgentMessage(register=agents_pb2.Register(name=HOSTILE, unfit=HOSTILE, **about))
        closed.wait()

    with grpc.insecure_channel(coordinator) as channel:
        call = agents_pb2_grpc.AgentsStub(channel).Attach(
            messages(), metadata=[("authorization", f"Bearer {token}")], timeout=60
        )
        assert next(call).HasField("registered")
        yield
        call.cancel()
        closed.set()


def test_no_command_shows_a_terminal_what_it_would_obey(agents: Agents, horovodrun: Run) -> None:
    """Whoever submits a job or serves a host writes names and sentences that others read."""
    token = agents.coordinator.token or ""
    spec = jobs_pb2.JobSpec(name=HOSTILE, command=["true", HOSTILE], user=HOSTILE, processes=64, project=HOSTILE)
    job = submit(Access([agents.coordinator.address], token), spec).id
    with hostile_agent(agents.coordinator.address, token):
        shown = [
            horovodrun(*command, environ=agents.environ)
            for command in (
                ["ps", *agents.options],
                ["ps", *agents.options, job],
                ["ps", *agents.options, "--output-format", "json"],
                ["ps", *agents.options, HOSTILE],
                ["wait", *agents.options, "--timeout", "0.1", job],
                ["logs", *agents.options, HOSTILE],
                ["stop", *agents.options, job],
                ["stop", *agents.options, job],
                ["wait", *agents.options, job],
                ["logs", *agents.options, job],
                [*agents.options, "--verbose", "--detach", "-np", "1", "--job-name", HOSTILE, "true"],
                [*agents.options, "-np", "1", "-H", f"{HOSTILE}:1", "true"],
            )
        ]
    for run in shown:
        assert harmless(run.stdout + run.stderr), (run.args, run.stdout, run.stderr)
    table, _, listing = (run.stdout for run in shown[:3])
    assert "a\\x1b]52;c;cm0gLXJmIC8=\\x07" in table
    assert not re.search("^forged", "".join(run.stdout + run.stderr for run in shown), re.MULTILINE)
    assert HOSTILE in {host["host"] for host in json.loads(listing)["hosts"]}, "programs get the names as they are"


def test_what_is_noted_and_logged_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    entry = story_pb2.StoryEntry(sentence=HOSTILE)
    listing = jobs_pb2.Listing(worlds=[story_pb2.JobStory(job=HOSTILE, entries=[entry])])
    record = logging.LogRecord("horovod", logging.WARNING, "", 0, "host %s", (HOSTILE,), None)
    rank_log = Handler()
    for text in (
        as_table(listing, 0.0),
        as_story(listing, 0.0),
        TextFormatter().format(record),
        rank_log.format(record),
    ):
        assert harmless(text)
        assert "\\x1b]52;" in text
    with os.fdopen(os.memfd_create("terminal"), "w+") as terminal:
        writer = Writer()
        console = Console(writer, descriptors=(terminal.fileno(), terminal.fileno()))
        console.note(f"horovodrun: {HOSTILE}\nand a second line")
        console.close()
        terminal.seek(0)
        noted = terminal.read()
    assert harmless(noted)
    assert noted.endswith("\nand a second line\n")


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
