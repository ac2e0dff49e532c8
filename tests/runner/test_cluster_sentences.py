"""The sentences of errors of clusters, whole, with their codes: what launchers, job files and agents say. Other tests
name the code and the facts.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod.base.protocol import RELAY_FRAME
from horovod.launch import commands
from horovod.launch.cluster.client import Access, ClusterClient, ClusterError, coordinators_of
from horovod.launch.cluster.job_file.archive import pack
from horovod.launch.cluster.job_file.job_file import _LOOK, JobFile
from horovod.launch.console.report import outcome_of
from horovod.launch.located import LineError
from horovod.protos.v1 import agents_pb2, jobs_pb2
from horovod.worker.agent import __main__ as agent
from horovod.worker.agent.code import CodeCache
from horovod.worker.agent.daemon import _only_one
from horovod.worker.agent.environment import lines_of
from horovod.worker.agent.relay import Repeated


def _exactly(sentence: str) -> str:
    return rf"\A{re.escape(sentence)}\Z"


RUN = "run:\n  - distributed: python train.py\n"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", [" is empty."]),
        ("workers: [1", [", line 1: this is not YAML: expected ',' or ']', but got '<stream end>'."]),
        (
            f"worker: 1\nworkers: 0\n{RUN}",
            [
                ", line 1: unknown key 'worker'; did you mean 'workers'?",
                ", line 2: 'workers' is 0: expected a whole number from 1 to 65536.",
            ],
        ),
        (f"workers: 1\nworkers: 2\n{RUN}", [", line 2: the key 'workers' is there already, in line 1."]),
        (
            f"workers: 1\nmemory: 16\n{RUN}",
            [
                ", line 2: 'memory' is 16: expected a text (memory that each worker needs, with its unit: 16 GiB).",
            ],
        ),
        (
            f"workers: 1\nprocesses: 2\ngpus: 3\n{RUN}",
            [", line 3: 3 GPUs can't be dealt out to 2 processes: expected a multiple of 2."],
        ),
        (
            f"workers: 1\ncode: .\ndirectory: /a\n{RUN}",
            [", line 3: 'directory' and 'code' exclude each other: code runs in a folder of its worker."],
        ),
        (
            "workers: 1\nrun:\n  - python train.py\n",
            [
                ", line 2: no line is distributed: write the line that trains as `- distributed: python train.py`.",
            ],
        ),
        (f"workers: 1\nenv:\n  A-B: 1\n{RUN}", [", line 3: 'A-B' is no name of an environment variable."]),
        (
            f"workers: 1\nenv:\n  SECRET:\n{RUN}",
            [
                (
                    ", line 3: SECRET has no value here, and there is no variable of that name in this shell. Export "
                    "it, or write a value."
                ),
            ],
        ),
    ],
)
def test_job_files(text: str, sentences: list[str], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    whole = "\n".join(f"{path}{sentence}" for sentence in sentences) + " [wrong-job-file]"
    with pytest.raises(LineError, match=_exactly(whole)):
        JobFile.read(path).spec({}, "ada", attended=True)


def test_a_framework_that_is_not_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, "pytorch", "no_such_module", "horovod"], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"The job file asks for pytorch, but {sys.executable} has no no_such_module. [no-python-environment]\n",
    )


def test_code(tmp_path: Path) -> None:
    def refused(folder: Path, sentence: str) -> None:
        with pytest.raises(ValueError, match=_exactly(sentence)):
            pack(folder, "job.yaml, line 4")

    refused(tmp_path / "none", f"job.yaml, line 4: there is no folder '{tmp_path}/none'. [code-not-packed]")
    (tmp_path / "out").symlink_to("../etc")
    refused(
        tmp_path,
        "job.yaml, line 4: 'out' is a link to '../etc', outside of the code, which other hosts do not have. Put a copy "
        "there, or name it in .horovodignore. [code-not-packed]",
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["ps"],
            (
                "Which coordinator? Name it with --coordinator host:port, or in HOROVOD_COORDINATOR. "
                "[no-coordinator-named]"
            ),
        ),
        (
            ["submit", "--coordinator", "a:1", "/no/such.yaml"],
            "The job file '/no/such.yaml' can't be read: No such file or directory. [wrong-job-file]",
        ),
    ],
)
def test_commands(
    argv: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOROVOD_COORDINATOR", raising=False)
    assert commands.run(argv) == 2
    assert capsys.readouterr().err == f"horovodrun: {sentence}\n"


def test_clients() -> None:
    async def submit(access: Access) -> str:
        async with ClusterClient(access, patience_s=0.0) as cluster:
            with pytest.raises(ClusterError) as error:
                await cluster.submit(jobs_pb2.JobSpec(command=["true"], processes=1))
            return str(error.value)

    text = asyncio.run(submit(Access(["127.0.0.1:1"])))
    assert text.startswith("The coordinator at 127.0.0.1:1 did not answer: ")  # and then in gRPC's words
    assert text.endswith(". The job may have been taken: `horovodrun ps` will show it. [cluster-silent]")
    sentence = (
        "--coordinator names no coordinator: expected host:port, or several separated by commas. [no-coordinator-named]"
    )
    with pytest.raises(ValueError, match=_exactly(sentence)):
        coordinators_of(" , ", "--coordinator")


def test_ends_of_jobs() -> None:
    failed = jobs_pb2.JobRecord(id="j", state=jobs_pb2.JOB_STATE_FAILED, sentence="Rank 1 ended.", exit_code=3)
    assert outcome_of(failed) == (3, "Rank 1 ended. [rank-failed]")
    failed.sentence = "It could not be placed. [cluster-refuses]"
    assert outcome_of(failed) == (3, failed.sentence)
    assert outcome_of(jobs_pb2.JobRecord(id="j", state=jobs_pb2.JOB_STATE_RUNNING)) == (
        1,
        "The coordinator ended the stream before job j was over: see `horovodrun ps`. [cluster-silent]",
    )


def test_an_agent_without_a_coordinator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("HOROVOD_COORDINATOR", raising=False)
    assert agent.main(["--slots", "1", "--gpus", "", "--state-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "horovod-worker: There is no coordinator to serve: give --coordinator host:port, or several separated by "
        "commas (or HOROVOD_COORDINATOR). [no-coordinator-named]\n"
    )
    with pytest.raises(SystemExit):
        agent.main(["--slots", "none"])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "horovod-worker: error: argument --slots: expected a number from 1 to 65536, not 'none' [wrong-command-line]"
    )


def _second_agent(folder: Path) -> None:
    with _only_one(folder), _only_one(folder):
        pass


def _no_environment(folder: Path) -> None:
    start = agents_pb2.StartShare(python_environment=str(folder))
    lines_of(start, {}, [], coordinator="a:1", host="h1")


def _wrong_code(folder: Path) -> None:
    async def fetch(name: str, index: int) -> bytes:
        return b"not this"

    asyncio.run(CodeCache(folder, fetch).unpack("0" * 64, 8, [], lambda: True))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            _second_agent,
            (
                "Another agent uses 'FOLDER'. Several agents on one host need names of their own (--name) or folders "
                "of their own (--state-dir). [agent-runs-already]"
            ),
        ),
        (
            _no_environment,
            "there is no Python environment 'FOLDER': 'FOLDER/bin/python' does not exist [no-python-environment]",
        ),
        (
            _wrong_code,
            "its code is not what its name says: something on the way has changed it [code-damaged]",
        ),
        (
            lambda folder: Repeated().passing(RELAY_FRAME + b"\xff"),
            "The coordinator has sent what this version's relay can't read. [relay-refused]",
        ),
    ],
)
def test_agents(call: Callable[[Path], object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=_exactly(sentence.replace("FOLDER", str(tmp_path)))):
        call(tmp_path)
