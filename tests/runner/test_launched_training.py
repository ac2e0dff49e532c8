"""Launched programs that train: the launcher, the embedded coordinator and the engine together."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from error_codes import ends_with
from event_words import WAS_LOST, tells
from launching import DEADLINE_S, LAUNCHER, shared_memory

import horovod
from horovod.base.errors import EngineCode, LaunchCode

Run = Callable[..., CompletedProcess[str]]
Program = Callable[[str], list[str]]

BASICS = """
from horovod.common import basics as hvd
hvd.init()
print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
hvd.shutdown()
"""
# Without PyTorch, whose import takes longer than all the rest; examples and test_functions_train_too have it.
ENGINE = """
from array import array
from horovod._core import OpSpec
from horovod.common import basics as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.worker.runtime.context import current

def allreduce(values, name="noname"):
    data = array("f", values)
    pointer = data.buffer_info()[0]
    current().engine.submit(OpSpec(0), "allreduce." + name, [(pointer, pointer, 7, (len(data),))]).result()
    return data.tolist()

hvd.init()
"""
SUM = ENGINE + "print(allreduce([float(hvd.rank() + 1)] * 3), hvd.rank(), hvd.size())"


def test_a_world_has_the_ranks_of_the_launcher(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "3", *program(BASICS))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:{rank} 3 {rank} 3 0 1" for rank in range(3)]


def test_two_names_of_this_machine_make_two_hosts(horovodrun: Run, program: Program) -> None:
    done = horovodrun("-np", "3", "-H", "127.0.0.1:2,127.0.0.2:1", *program(BASICS))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:0 3 0 2 0 2",
        "[1]<stdout>:1 3 1 2 0 1",
        "[2]<stdout>:2 3 0 1 1 2",
    ]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_reduce(horovodrun: Run, program: Program, transport: str) -> None:
    before = shared_memory()
    done = horovodrun("-np", "2", *program(SUM), environ={"HOROVOD_TRANSPORT": transport})
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:[3.0, 3.0, 3.0] {rank} 2" for rank in range(2)]
    assert shared_memory() <= before


@pytest.mark.parametrize("options", ["ro", "size=4k"], ids=["read-only", "full"])
def test_shared_memory_needs_no_dev_shm(program: Program, options: str) -> None:
    """Segments have no names in a file system (docs/adr/0001), so one that can't be written to does no harm."""
    namespace = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mounted = f"mount -t tmpfs -o {options} none /dev/shm"
    if subprocess.run([*namespace, mounted], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no mount namespaces (unshare --mount)")
    fill = "(cat /dev/zero > /dev/shm/full; ! echo x > /dev/shm/x) 2> /dev/null"
    done = subprocess.run(
        [*namespace, f'{mounted} && {fill} && exec "$@"', "sh", *LAUNCHER, "-np", "2", *program(SUM)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "HOROVOD_TRANSPORT": "shm"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:[3.0, 3.0, 3.0] {rank} 2" for rank in range(2)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_rank_is_named_by_the_others_and_by_the_launcher(
    horovodrun: Run, program: Program, transport: str
) -> None:
    source = (
        ENGINE
        + """
for step in range(1000):
    if step == 3 and hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        allreduce([1.0] * 4, "x")
    except HorovodInternalError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(9)
"""
    )
    before = shared_memory()
    done = horovodrun("-np", "2", *program(source), environ={"HOROVOD_TRANSPORT": transport})
    assert done.returncode == 137
    name = socket.gethostname()
    launcher = done.stderr.splitlines()[-1]
    facts = [f"Rank 1 on host {name}", "signal 9 (SIGKILL);", "rank 0 ", "exit code 9"]
    assert re.search(ends_with(LaunchCode.RANK_FAILED, *facts), launcher)
    survivor = next(line for line in done.stderr.splitlines() if line.startswith("[0]<stderr>:"))
    assert "rank 1" in survivor.lower()
    assert name in survivor
    assert shared_memory() <= before


def test_functions_train_too() -> None:
    def total() -> list[float]:
        import torch

        import horovod.torch as hvd

        hvd.init()
        result = hvd.allreduce(torch.full((2,), float(hvd.rank())), op=hvd.Sum).tolist()
        hvd.shutdown()
        return result

    assert horovod.run(total, num_proc=2) == [[1.0, 1.0], [1.0, 1.0]]


def test_a_program_that_never_joins_is_no_hang(horovodrun: Run, program: Program, tmp_path: Path) -> None:
    source = """
from horovod.common import basics as hvd
if rank == 0:
    signal.pause()
hvd.init()
"""
    done = horovodrun("-np", "2", "--start-timeout", "2", *program(source))
    assert done.returncode != 0
    assert re.search(ends_with(LaunchCode.RANK_FAILED, "Rank 1 on host"), done.stderr)
    assert "rank 0" in "\n".join(line for line in done.stderr.splitlines() if line.startswith("[1]"))


def test_plain_programs_need_no_horovod(horovodrun: Run) -> None:
    done = horovodrun("-np", "2", sys.executable, "-S", "-c", "print('x')", environ={"PYTHONPATH": os.devnull})
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:x", "[1]<stdout>:x"]


@pytest.mark.parametrize("way", ["variable", "option"])
def test_rank_0_writes_the_timeline(horovodrun: Run, program: Program, tmp_path: Path, way: str) -> None:
    path = tmp_path / "timeline.json"
    options = ["--timeline-filename", str(path)] if way == "option" else []
    environ = {"HOROVOD_TIMELINE": str(path)} if way == "variable" else {}
    done = horovodrun(
        "-np", "2", "--timeline-mark-cycles", *options, *program(SUM + "\nhvd.shutdown()"), environ=environ
    )
    assert (done.returncode, done.stderr) == (0, "")
    events = json.loads(path.read_text())
    spans = [event["name"] for event in events if event["ph"] == "B"]
    assert spans == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "SHM_EAGER_ALLREDUCE"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "Horovod",
        "allreduce.noname",
    ]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["CYCLE_START"]


def test_a_timeline_that_cannot_be_written_ends_the_job(horovodrun: Run, program: Program, tmp_path: Path) -> None:
    path = tmp_path / "none" / "timeline.json"
    done = horovodrun("-np", "2", *program(ENGINE), environ={"HOROVOD_TIMELINE": str(path)})
    assert done.returncode != 0
    assert tells(done.stderr, path, f"[{EngineCode.TIMELINE}]")


def test_the_others_hear_how_a_process_ended(horovodrun: Run, program: Program) -> None:
    """horovodrun is also the agent of its host: the coordinator believes it how a process has ended.

    An operation may fail first for what the data plane sees, which is only that the process has ended.
    """
    source = """
from horovod.worker.runtime import context
from horovod.worker.runtime.errors import MemberLostError
member = context.init()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    member.session.member.check(60)
except MemberLostError as error:
    print(error)
"""
    done = horovodrun("-np", "2", *program(source))
    assert done.returncode == 128 + 9
    assert re.search(rf"{WAS_LOST}: .*agent.*SIGKILL", done.stdout), done.stdout
