"""Programs started by the real mpirun, mpiexec.hydra, torchrun and srun, and in pods, without horovodrun.

Slurm's daemons are started here, for one host, where they are installed and the tests run as root.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.ports import free_ports

DEADLINE_S = 100
START_S = 60
PLACE = """
import os
from horovod.common import basics as hvd
hvd.init()
given = [os.environ[name] for name in os.environ["GIVEN"].split(",")]
assert given == [str(hvd.rank()), str(hvd.size()), str(hvd.local_rank())], given
line = f"{hvd.rank()} {hvd.size()} {hvd.local_rank()} {hvd.local_size()} {hvd.cross_rank()} {hvd.cross_size()}\\n"
os.write(1, line.encode())
"""
ALONE = """
import os
from horovod.common import basics as hvd
hvd.init()
os.write(1, f"{hvd.rank()} of {hvd.size()}\\n".encode())
"""
TRAIN = """
import os
import torch
import horovod.torch as hvd
torch.manual_seed(0)
hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
data = torch.randn(8, 4).chunk(hvd.size())[hvd.rank()]
for _ in range(5):
    optimizer.zero_grad()
    model(data).pow(2).mean().backward()
    optimizer.step()
os.write(1, (str(hvd.allgather(model.weight.detach()).unique(dim=0).shape[0]) + "\\n").encode())
"""
FAIL = """
import os, sys
from horovod.common import basics as hvd
hvd.init()
if hvd.rank() == 0:
    sys.exit("rank 0 gives up")
from array import array
data = array("f", [1.0])
pointer = data.buffer_info()[0]
from horovod._core import OpSpec
from horovod.worker.runtime.context import current
try:
    current().engine.submit(OpSpec(0), "allreduce.x", [(pointer, pointer, 7, (1,))]).result()
except RuntimeError as error:
    os.write(1, f"{error}\\n".encode())
"""
OPEN_MPI = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
MPICH = ["mpiexec.hydra"]


def run(command: list[str], *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "SLURM_"))}
    return subprocess.run(
        [*command, *arguments],
        env={**clean, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.fixture(params=["mpirun", "mpiexec.hydra"])
def mpi(request: pytest.FixtureRequest) -> tuple[list[str], str]:
    """The command, and the variables that have rank, size and local rank."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed (Debian: openmpi-bin, mpich)")
    if request.param == "mpirun":
        if "Open MPI" not in subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout:
            pytest.skip("mpirun is not Open MPI's")
        return OPEN_MPI, ",".join(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK"))
    return MPICH, "PMI_RANK,PMI_SIZE,MPI_LOCALRANKID"


def test_ranks_are_those_of_the_launcher(mpi: tuple[list[str], str]) -> None:
    command, given = mpi
    done = run([*command, "-np", "3"], *python(PLACE), GIVEN=given)
    assert lines(done) == [f"{rank} 3 {rank} 3 0 1" for rank in range(3)]
    assert done.stderr == ""


def test_training(mpi: tuple[list[str], str]) -> None:
    done = run([*mpi[0], "-np", "2"], *python(TRAIN))
    assert lines(done) == ["1", "1"], "equal weights on all ranks"
    assert done.stderr == ""


def test_two_programs_one_after_the_other_in_one_run(mpi: tuple[list[str], str], tmp_path: Path) -> None:
    script = tmp_path / "twice.sh"
    script.write_text(f"{sys.executable} -c '{ALONE}' && {sys.executable} -c '{ALONE}'\n")
    done = run([*mpi[0], "-np", "2"], "sh", str(script))
    assert lines(done) == ["0 of 2", "0 of 2", "1 of 2", "1 of 2"]
    assert done.stderr == ""


def test_one_process_is_a_world_of_one(mpi: tuple[list[str], str]) -> None:
    assert lines(run([*mpi[0], "-np", "1"], *python(ALONE))) == ["0 of 1"]


def test_horovodrun_below_it_decides(mpi: tuple[list[str], str]) -> None:
    launcher = [sys.executable, "-m", "horovod.launch", "-np", "2"]
    done = run([*mpi[0], "-np", "1"], *launcher, *python(ALONE))
    assert lines(done) == ["[0]<stdout>:0 of 2", "[1]<stdout>:1 of 2"]


def test_a_rank_0_that_fails_ends_the_others_in_words(mpi: tuple[list[str], str]) -> None:
    done = run([*mpi[0], "-np", "2"], *python(FAIL))
    assert done.returncode != 0
    assert "rank 0 gives up" in done.stderr
    assert "Traceback" not in done.stderr


# -- torchrun ----------------------------------------------------------------------------------------------------------
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
needs_pytorch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@needs_pytorch
def test_processes_of_torchrun_are_ranks_and_again_after_a_restart(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = tmp_path / "program.py"
    program.write_text(
        PLACE
        + f"""
import signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open({str(fifo)!r}, "rw"[hvd.rank()]).close()  # both have printed
    if hvd.rank() == 1:
        os._exit(3)
    signal.pause()  # torchrun ends it
"""
    )
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(program)]
    done = run(command, GIVEN="RANK,WORLD_SIZE,LOCAL_RANK")
    assert lines(done) == ["0 2 0 2 0 1", "0 2 0 2 0 1", "1 2 1 2 0 1", "1 2 1 2 0 1"]


@needs_pytorch
def test_torchrun_on_two_hosts_meets_near_its_port(tmp_path: Path) -> None:
    port = 23_000 + os.getpid() % 100 * 64
    program = tmp_path / "program.py"
    program.write_text(
        PLACE
        + """
from horovod.worker.runtime.context import current
near = int(current().session.address.rpartition(":")[2]) - int(os.environ["MASTER_PORT"])
assert 16 <= near < 64, near
"""
    )
    nodes = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port"]
    environ = {"HOROVOD_TOKEN": "a-secret-of-this-job", "GIVEN": "RANK,WORLD_SIZE,RANK"}
    ended = both([[*nodes, str(port), "--node-rank", str(node), str(program)] for node in (0, 1)], environ)
    assert [(code, out) for code, out, _ in ended] == [(0, f"{rank} 2 {rank} 2 0 1\n") for rank in (0, 1)], ended


def both(commands: list[list[str]], environ: dict[str, str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of commands that run at the same time."""
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


# -- Kubernetes --------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare(1)")
def test_pods_of_an_indexed_job_find_each_other_by_their_names(tmp_path: Path) -> None:
    """As the kubelet sets them up: a host name, and /etc/hosts with the name that the headless service gives."""
    hosts = tmp_path / "hosts"
    names = [f"127.0.0.1{index} train-{index}.pods.default.svc.cluster.local train-{index}\n" for index in (0, 1)]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(names))
    pods = [
        f"mount --bind {hosts} /etc/hosts && hostname train-{index} && "
        f"HOSTNAME=train-{index} JOB_COMPLETION_INDEX={index} exec {sys.executable} -c '{ALONE}'"
        for index in (1, 0)
    ]
    commands = [["unshare", "--mount", "--uts", "sh", "-c", pod] for pod in pods]
    ended = both(commands, {"HOROVOD_SIZE": "2", "HOROVOD_TOKEN": "a-secret-of-this-job"})
    assert [one[:2] for one in ended] == [(0, "1 of 2\n"), (0, "0 of 2\n")], ended


# -- Slurm -------------------------------------------------------------------------------------------------------------
class Slurm:
    """munged, slurmctld and slurmd of this host alone, with sockets and files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        name = socket.gethostname().partition(".")[0]
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for folder in ("state", "spool"):
            (self._folder / folder).mkdir()
        control, daemon = free_ports(2)
        (self._folder / "slurm.conf").write_text(
            f"""ClusterName=horovod-tests
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={self._folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={self._folder}/state
SlurmdSpoolDir={self._folder}/spool
SlurmctldPidFile={self._folder}/slurmctld.pid
SlurmdPidFile={self._folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
NodeName={name} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
        )
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._folder}/munge.socket"]
        munge += [f"--{name}-file={self._folder}/munge.{name}" for name in ("pid", "log", "seed")]
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", name]):
            log = (self._folder / f"{command[0]}.out").open("wb")
            environ = {**os.environ, **self.environ}
            self._processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        # Daemons tell nobody when they are ready, so they are asked until they are.
        deadline = time.monotonic() + START_S
        while (done := run(["srun", "--immediate=20", "-n", "1"], "true", **self.environ)).returncode != 0:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        else:
            return
        logs = "".join(path.read_text(errors="replace")[-500:] for path in self._folder.glob("*.out"))
        pytest.skip(f"Slurm does not start here: {done.stderr} {logs}")

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment for Slurm's commands."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Debian's munge, slurmctld, slurmd and slurm-client; missing: {missing}")
    running = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        running.start()
        yield running.environ
    finally:
        running.stop()


@pytest.mark.parametrize("mpi_type", ["none", "pmi2"])
def test_tasks_of_srun_are_ranks(slurm: dict[str, str], mpi_type: str) -> None:
    command = ["srun", "--quiet", f"--mpi={mpi_type}", "-n", "2", "--overcommit"]
    done = run(command, *python(PLACE), **slurm, GIVEN="SLURM_PROCID,SLURM_STEP_NUM_TASKS,SLURM_LOCALID")
    assert lines(done) == ["0 2 0 2 0 1", "1 2 1 2 0 1"]
    assert done.stderr == ""


def test_a_batch_script_and_the_shell_of_salloc_are_no_tasks(slurm: dict[str, str], tmp_path: Path) -> None:
    alone = tmp_path / "alone.py"
    alone.write_text(ALONE)
    launched = f"{sys.executable} -m horovod.launch -np 2 {sys.executable} {alone}"
    script = tmp_path / "batch.sh"
    output = tmp_path / "output"
    script.write_text(
        f"#!/bin/sh\n{sys.executable} {alone}\n{launched}\nsrun --overcommit -n 2 {sys.executable} {alone}\n"
    )
    done = run(["sbatch", "--wait", "--overcommit", "-n", "2", "-o", str(output)], str(script), **slurm)
    text = output.read_text()
    assert done.returncode == 0, text
    assert sorted(text.splitlines()) == ["0 of 1", "0 of 2", "1 of 2", "[0]<stdout>:0 of 2", "[1]<stdout>:1 of 2"]
    done = run(["salloc", "--overcommit", "-n", "2"], sys.executable, str(alone), **slurm)
    assert lines(done) == ["0 of 1"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_inside_of_an_allocation_is_mpirun(slurm: dict[str, str]) -> None:
    command = ["salloc", "--overcommit", "-n", "2", *OPEN_MPI, "-np", "2"]
    done = run(command, *python(ALONE), **slurm)
    assert lines(done) == ["0 of 2", "1 of 2"]
