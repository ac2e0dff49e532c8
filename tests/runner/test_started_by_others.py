"""Processes with the variables of another launcher form one world, or say what to do. No launcher is needed here:
tests/extended/runner has the real ones."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from certificates import Authority
from error_codes import ends_with
from event_words import tells
from launching import DEADLINE_S

from horovod.base.errors import AccessCode, ErrorCode, SettingCode, WorldCode
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.rendezvous import meeting
from horovod.worker.runtime.errors import StartError

SHOW = """
import os, sys
from horovod.common import basics as hvd
hvd.init()
print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), flush=True)
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder where processes meet: nobody else's, and no launcher's variables but those of the test."""
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_", "PBS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("HOROVOD_LOG_HIDE_TIME", "1")
    return runtime / "horovod"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start(source, VARIABLE=...) is a process that runs source."""
    started: list[subprocess.Popen[str]] = []

    def begin(source: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[str]"]


def openmpi(rank: int, size: int = 2, local_size: int = 2, run: str = "7") -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % local_size, "LOCAL_SIZE": local_size}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}, "PMIX_NAMESPACE": run}


def srun(rank: int, nodes: str = "localhost,other", node_count: int = 2) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": str(node_count),
        "SLURM_STEP_NODELIST": nodes,
    }


def torchrun(rank: int, local_size: int = 2, address: str = "localhost") -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(23_000 + os.getpid() % 100 * 64),
        "TORCHELASTIC_RUN_ID": str(os.getpid()),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


INDEXED_POD = {"JOB_COMPLETION_INDEX": "0", "HOROVOD_SIZE": "2", "HOSTNAME": "no-such-host-0"}


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


# -- worlds ------------------------------------------------------------------------------------------------------------
def test_two_processes_of_mpirun_form_a_world_again_and_again(start: Start, place: Path) -> None:
    source = SHOW + "hvd.shutdown()\nhvd.init()\nprint('again', hvd.size())"
    ranks = [start(source, **openmpi(rank)) for rank in (1, 0)]
    assert finish(ranks[0]) == (0, "1 2 1 2\nagain 2\n", "")
    assert finish(ranks[1]) == (0, "0 2 0 2\nagain 2\n", "")
    assert list(place.iterdir()) == []


def test_two_runs_at_once_do_not_meet(start: Start) -> None:
    processes = [start(SHOW, **openmpi(rank, run=run)) for run in ("7", "8") for rank in (0, 1)]
    assert [finish(process) for process in processes] == [(0, f"{rank} 2 {rank} 2\n", "") for rank in (0, 1)] * 2


def test_rank_0_ends_only_when_the_others_have_left(start: Start) -> None:
    """Else they would lose their coordinator, and their goodbyes would find none."""
    other = start(SHOW + "sys.stdin.readline()", **openmpi(1))
    first = start(SHOW + "hvd.shutdown()\nprint('left', flush=True)\nos.close(1)", **openmpi(0))
    assert first.stdout is not None
    assert [first.stdout.readline() for _ in range(3)] == ["0 2 0 2\n", "left\n", ""], "standard output is closed"
    descriptor = os.pidfd_open(first.pid)
    try:
        assert not select.select([descriptor], [], [], 1.0)[0], "rank 0 ended while rank 1 is still a member"
    finally:
        os.close(descriptor)
    assert other.communicate("\n", timeout=DEADLINE_S) == ("1 2 1 2\n", "")
    assert finish(first) == (0, "", "")


def test_a_forked_child_of_rank_0_holds_nothing_of_its_coordinator(start: Start) -> None:
    """Else the others would not notice the end of a rank 0 that was killed."""
    source = (
        SHOW
        + """
import socket, stat
from horovod.worker.runtime.context import current

port = int(current().session.address.rpartition(":")[2])

def held():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family != socket.AF_UNIX and copy.getsockname()[1] == port:
                        found.append(name)
        except OSError:
            pass
    return found

print("rank 0", len(held()) > 0, flush=True)
child = os.fork()
if child == 0:
    print("child", held(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    # gRPC may close them itself in a child, but does not promise to.
    first = start(source, **openmpi(0), GRPC_ENABLE_FORK_SUPPORT="0")
    other = start(SHOW, **openmpi(1))
    assert finish(first)[:2] == (0, "0 2 0 2\nrank 0 True\nchild []\n")
    assert finish(other) == (0, "1 2 1 2\n", "")


def test_between_hosts_a_token_is_enough(start: Start) -> None:
    ranks = [start(SHOW, **srun(rank), HOROVOD_TOKEN="a-secret-of-this-job") for rank in (0, 1)]
    assert [finish(process) for process in ranks] == [(0, f"{rank} 2 {rank} 2\n", "") for rank in (0, 1)]


def test_between_hosts_with_certificates(start: Start, tmp_path: Path) -> None:
    ours = Authority(tmp_path / "tls")
    pair = ours.issue("host", "localhost")
    tls = {"HOROVOD_TLS_CA": ours.file, "HOROVOD_TLS_CERT": pair.cert, "HOROVOD_TLS_KEY": pair.key}
    ranks = [start(SHOW, **srun(rank), HOROVOD_TOKEN="a-secret-of-this-job", **tls) for rank in (0, 1)]
    assert [finish(process) for process in ranks] == [(0, f"{rank} 2 {rank} 2\n", "") for rank in (0, 1)]


def test_torchrun_on_two_hosts_needs_a_token_and_no_coordinator(start: Start) -> None:
    source = SHOW + (
        "from horovod.worker.runtime.context import current\n"
        "port = int(current().session.address.rpartition(':')[2]) - int(os.environ['MASTER_PORT'])\n"
        "print(16 <= port < 64)"
    )
    ranks = [start(source, **torchrun(rank, local_size=1), HOROVOD_TOKEN="a-secret-of-this-job") for rank in (0, 1)]
    assert [finish(process)[:2] for process in ranks] == [(0, f"{rank} 2 {rank} 2\nTrue\n") for rank in (0, 1)]


def test_rank_0_needs_a_certificate_between_hosts(start: Start, tmp_path: Path) -> None:
    ours = Authority(tmp_path / "tls")
    process = start(SHOW, **srun(0), HOROVOD_TOKEN="a-secret-of-this-job", HOROVOD_TLS_CA=ours.file)
    code, _, err = finish(process)
    assert code == 1
    assert re.search(
        ends_with(SettingCode.MISSING_SETTING, "HOROVOD_TLS_CA", "HOROVOD_TLS_CERT", "HOROVOD_TLS_KEY"), err
    )


def test_a_token_may_be_in_a_file(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-secret-of-this-job")
    file.chmod(0o600)
    for variables in (srun, openmpi):
        ranks = [start(SHOW, **variables(rank), HOROVOD_TOKEN_FILE=str(file)) for rank in (0, 1)]
        assert [finish(process)[:2] for process in ranks] == [(0, f"{rank} 2 {rank} 2\n") for rank in (0, 1)]


def test_with_a_coordinator_rank_and_size_follow(start: Start) -> None:
    with EmbeddedCoordinator() as coordinator:
        given = {"HOROVOD_COORDINATOR": coordinator.address}
        ranks = [start(SHOW, **openmpi(rank, local_size=1), **given) for rank in (0, 1)]
        assert [finish(process) for process in ranks] == [(0, f"{rank} 2 {rank} 2\n", "") for rank in (0, 1)]


def test_recognition_can_be_turned_off(start: Start) -> None:
    assert finish(start(SHOW, **openmpi(1), HOROVOD_CLUSTER="none")) == (0, "0 1 0 1\n", "")


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environ", "error", "fact"),
    [
        (openmpi(0, local_size=1), SettingCode.MISSING_SETTING, "`horovod-coordinator"),
        (
            openmpi(1, local_size=1),
            SettingCode.MISSING_SETTING,
            "(mpirun -x HOROVOD_COORDINATOR=HOST:29400 -x HOROVOD_TOKEN)",  # with no value, which all users would see
        ),
        (srun(0), SettingCode.MISSING_SETTING, "export HOROVOD_TOKEN=$(openssl rand -hex 32)"),
        (
            {**srun(1, nodes="no-such-host.invalid"), "HOROVOD_TOKEN": "a-secret-of-this-job"},
            WorldCode.INCOMPLETE_WORLD,
            " no-such-host.invalid:",
        ),
        (
            {**srun(1), "HOROVOD_TOKEN": "a-secret-of-this-job", "HOROVOD_START_TIMEOUT": "1"},
            WorldCode.INCOMPLETE_WORLD,
            "Connection refused",
        ),
        (torchrun(0, local_size=1), SettingCode.MISSING_SETTING, "HOROVOD_TOKEN on each host"),
        (INDEXED_POD, SettingCode.MISSING_SETTING, "headless service"),
        (
            {**torchrun(1, 1, address="no-such-host.invalid"), "HOROVOD_TOKEN": "a-secret-of-this-job"},
            WorldCode.INCOMPLETE_WORLD,
            " no-such-host.invalid:",
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"},
            SettingCode.LAUNCHER_VARIABLES,
            "HOROVOD_COORDINATOR",
        ),
        ({**openmpi(1), "HOROVOD_START_TIMEOUT": "1"}, WorldCode.INCOMPLETE_WORLD, "1 s of rank 1"),
    ],
)
def test_what_cannot_form_says_what_to_do(start: Start, environ: dict[str, str], error: ErrorCode, fact: str) -> None:
    code, out, err = finish(start(SHOW, **environ))
    assert (code, out) == (1, "")
    assert err.startswith("horovod: Horovod initialization failed. This process was started by ")
    assert re.search(ends_with(error, fact), err)
    assert err.count("\n") == 1


def test_a_second_rank_0_is_refused(start: Start) -> None:
    both = [start(SHOW, **openmpi(0), HOROVOD_START_TIMEOUT="100") for _ in range(2)]
    ended = next(process for process in _as_they_end(*both))
    assert re.search(ends_with(SettingCode.LAUNCHER_VARIABLES, "rank 0", "HOROVOD_CLUSTER=none"), finish(ended)[2])


def test_horovodrun_in_each_of_several_processes_is_worth_a_word(
    horovodrun: Callable[..., CompletedProcess[str]],
) -> None:
    command = ["-np", "1", sys.executable, "-c", SHOW]
    done = horovodrun(*command, environ=openmpi(0))
    assert done.stdout == "[0]<stdout>:0 1 0 1\n"
    assert done.stderr.startswith("horovodrun: ")
    assert tells(done.stderr, "2 processes", "mpirun")
    assert horovodrun(*command, environ=openmpi(1)).stderr == ""


def _as_they_end(*processes: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    by_descriptor = {os.pidfd_open(process.pid): process for process in processes}
    while by_descriptor:
        for descriptor in select.select(list(by_descriptor), [], [], DEADLINE_S)[0]:
            os.close(descriptor)
            yield by_descriptor.pop(descriptor)


# -- the file where they meet ------------------------------------------------------------------------------------------
MEETING = meeting.Meeting("127.0.0.1:1", "token", 1)


@pytest.fixture
def locked(tmp_path: Path, start: Start) -> Path:
    """A file of the right form that a living process has locked."""
    path = tmp_path / "file"
    source = (
        "import sys; from pathlib import Path; from horovod.rendezvous.meeting import *\n"
        f"published = publish(Path({str(path)!r}), Meeting('127.0.0.1:1', 'token', 1)); print(flush=True)\n"
        "sys.stdin.readline()"
    )
    process = start(source)
    assert process.stdout is not None
    assert process.stdout.readline()
    return path


def test_a_file_is_believed_while_its_writer_lives(locked: Path) -> None:
    assert locked.stat().st_mode & 0o777 == 0o600
    assert meeting.read(locked) == MEETING


def test_a_file_that_a_dead_process_left_behind_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps({"address": "127.0.0.1:1", "token": "token", "pid": 1}))
    path.chmod(0o600)
    assert meeting.read(path) is None
    assert meeting.read(tmp_path / "none") is None


def test_a_file_that_others_may_have_written_is_not_believed(locked: Path) -> None:
    locked.chmod(0o620)
    assert meeting.read(locked) is None
    link = locked.with_name("link")
    locked.chmod(0o600)
    link.symlink_to(locked)
    assert meeting.read(link) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_another_user_owns_is_not_believed(locked: Path, place: Path) -> None:
    os.chown(locked, 65534, -1)
    assert meeting.read(locked) is None
    place.mkdir(mode=0o700)
    os.chown(place, 65534, -1)
    with pytest.raises(StartError, match=ends_with(AccessCode.TOKEN_NOT_KEPT, "uid 65534")):
        meeting.folder()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"address": 1', "\xff"])
def test_nonsense_in_the_file_is_not_believed(locked: Path, text: str) -> None:
    locked.write_text(text)
    assert meeting.read(locked) is None


def test_a_file_is_taken_away_by_who_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("left behind")
    published = meeting.publish(path, MEETING)
    assert json.loads(path.read_text())["token"] == "token"
    assert [entry for entry in tmp_path.iterdir() if entry.is_file()] == [path]
    published.close()
    published.close()
    assert not path.exists()


def test_a_file_of_a_living_process_is_not_replaced(locked: Path) -> None:
    with pytest.raises(FileExistsError):
        meeting.publish(locked, MEETING)
    assert meeting.read(locked) == MEETING
    assert [entry for entry in locked.parent.iterdir() if entry.is_file()] == [locked]
