"""What the plug-ins read from the variables of mpirun, srun and others.

Those of Open MPI, Slurm, MPICH and torchrun were recorded from real runs, the others are as in the launchers' manuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from error_codes import ends_with

from horovod.base.errors import SettingCode
from horovod.base.settings import resolve
from horovod.base.settings.world import CLUSTERS
from horovod.rendezvous import task_of
from horovod.rendezvous.clusters import FINDERS, find_kubernetes, find_pbs, find_torchrun, first_node

OPEN_MPI = {  # Open MPI 4.1.4: mpirun -np 2
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1528299521",
    "PMIX_NAMESPACE": "1528299521",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI2": "1528299520.0;tcp4://127.0.0.1:50883",
}
HAND = "a launcher that sets RANK and WORLD_SIZE"
SLURM_ALLOCATION = {  # Slurm 22.05: salloc -n 2
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_NNODES": "1",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "2",
}
SLURM_BATCH = {**SLURM_ALLOCATION, "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}  # sbatch -n 2
SLURM_STEP = {  # srun -n 2
    **SLURM_BATCH,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
SLURM_SHELL = {**SLURM_STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # the interactive step of salloc
MPICH = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "2"}  # MPICH 4.0.2
JSRUN = {
    "JSM_NAMESPACE_ID": "7",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "LSB_JOBID": "12",
}
LSF_HOSTS = {"LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42"}
TORCHRUN = {  # PyTorch 2.13: torchrun --nproc-per-node 2
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "40119",
    "RANK": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "42f0c152-90f4-4fa1-8a34-51bf898f573d",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
PYTORCH_JOB = {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "2"}
BY_HAND = {**PYTORCH_JOB, "MASTER_ADDR": "127.0.0.1"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
PBS_SCRIPT = {  # OpenPBS
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "314827.server",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
}
PBSDSH = {**PBS_SCRIPT, "PBS_NODENUM": "1", "PBS_TASKNUM": "1"}
TORQUE = {**PBSDSH, "PBS_VNODENUM": "3", "PBS_NP": "4", "PBS_NUM_NODES": "2", "PBS_NUM_PPN": "2"}


def found(environ: Mapping[str, str], **settings: object) -> tuple[str, int, int, bool] | None:
    task = task_of(resolve({}, settings), environ)
    return None if task is None else (task.launcher, task.rank, task.size, task.one_host)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (OPEN_MPI, ("mpirun", 1, 2, True)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ("mpirun", 1, 2, False)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        (SLURM_STEP, ("srun", 1, 2, True)),
        ({**SLURM_STEP, "SLURM_STEP_NUM_NODES": "2"}, ("srun", 1, 2, False)),
        ({**SLURM_STEP, "PMI_RANK": "1", "PMI_SIZE": "2"}, ("srun", 1, 2, True)),  # srun --mpi=pmi2
        (SLURM_ALLOCATION, None),
        (SLURM_BATCH, None),
        (SLURM_SHELL, None),
        (MPICH, ("mpiexec", 1, 2, True)),
        ({**MPICH, "MPI_LOCALNRANKS": "1"}, ("mpiexec", 1, 2, False)),
        (JSRUN, ("jsrun", 1, 2, True)),
        ({**JSRUN, **OPEN_MPI}, ("jsrun", 1, 2, True)),  # Spectrum MPI
        ({"PMIX_RANK": "0"}, None),
        (TORCHRUN, ("torchrun", 1, 2, True)),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, ("torchrun", 1, 2, False)),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({**SLURM_STEP, **TORCHRUN, "WORLD_SIZE": "8", "RANK": "5"}, ("torchrun", 5, 8, False)),  # one for each node
        ({**OPEN_MPI, **TORCHRUN}, ("torchrun", 1, 2, True)),
        (PYTORCH_JOB, (HAND, 1, 2, False)),
        (BY_HAND, (HAND, 1, 2, True)),
        ({**SLURM_STEP, **BY_HAND}, ("srun", 1, 2, True)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        (PBS_SCRIPT, None),
        ({**PBS_SCRIPT, **OPEN_MPI}, ("mpirun", 1, 2, True)),
        # Launchers that start their helpers by srun, one for each host: the processes inherit the helper's variables.
        ({**SLURM_STEP, **OPEN_MPI}, ("mpirun", 1, 2, True)),
        ({**SLURM_STEP, **MPICH, "PMI_SIZE": "8", "PMI_RANK": "5"}, ("mpiexec", 5, 8, False)),
    ],
)
def test_who_is_who(environ: Mapping[str, str], expected: tuple[str, int, int, bool] | None) -> None:
    assert found(environ) == expected


@pytest.mark.parametrize("environ", [OPEN_MPI, SLURM_STEP, MPICH, JSRUN, {"PMIX_RANK": "1"}, TORCHRUN, BY_HAND, PBSDSH])
def test_settings_win_and_recognition_can_be_turned_off(environ: Mapping[str, str]) -> None:
    assert found(environ, size=3) is None
    assert found(environ, rank=1, size=3, coordinator="a:1") is None
    assert found(environ, cluster="none") is None


def test_one_launcher_can_be_demanded() -> None:
    both = {**OPEN_MPI, **SLURM_STEP, "SLURM_STEP_NUM_TASKS": "4"}
    assert found(both, cluster="slurm") == ("srun", 1, 4, True)
    with pytest.raises(ValueError, match=ends_with(SettingCode.LAUNCHER_VARIABLES, "HOROVOD_CLUSTER=pmi")):
        found({}, cluster="pmi")


@pytest.mark.parametrize(
    ("environ", "facts"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "one"}, ["OMPI_COMM_WORLD_RANK='one'"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, ["mpirun", "rank 2 of 2"]),
        ({**MPICH, "PMI_SIZE": "-1"}, ["PMI_SIZE='-1'"]),
        ({**SLURM_STEP, "SLURM_STEP_NODELIST": "a[1-"}, ["SLURM_STEP_NODELIST='a[1-'"]),
        ({"PMIX_RANK": "1"}, ["rank 1 ", "PMIX_RANK", "HOROVOD_SIZE"]),
        ({**TORCHRUN, "RANK": "2"}, ["torchrun", "rank 2 of 2"]),
        (PBSDSH, ["pbsdsh", "host number 1 ", "PBS_NODEFILE"]),
    ],
)
def test_contradictions_get_a_sentence(environ: Mapping[str, str], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.LAUNCHER_VARIABLES, "HOROVOD_CLUSTER=none", *facts)):
        found(environ)


def test_an_indexed_job_does_not_say_how_many_pods_it_has() -> None:
    facts = ["JOB_COMPLETION_INDEX", "HOROVOD_SIZE", "spec.completions", "HOROVOD_CLUSTER=none"]
    with pytest.raises(ValueError, match=ends_with(SettingCode.MISSING_SETTING, *facts)):
        found(INDEXED_JOB)


def test_all_processes_of_a_run_have_one_name_for_it_and_no_other_run_has() -> None:
    def run(environ: Mapping[str, str]) -> tuple[str, ...]:
        task = task_of(resolve({}), environ)
        assert task is not None
        return task.run

    for environ, rank in (
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (SLURM_STEP, "SLURM_PROCID"),
        (JSRUN, "JSM_NAMESPACE_RANK"),
        (TORCHRUN, "RANK"),
        (BY_HAND, "RANK"),
    ):
        assert run({**environ, rank: "0"}) == run(environ) != ()
    assert run({**OPEN_MPI, "PMIX_NAMESPACE": "8"}) != run(OPEN_MPI)
    assert (
        run({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}) != run(TORCHRUN) != run({**TORCHRUN, "MASTER_PORT": "7"})
    )
    assert run({**SLURM_STEP, "SLURM_STEP_ID": "1"}) != run(SLURM_STEP) != run({**SLURM_STEP, "SLURM_JOB_ID": "5"})


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        (SLURM_STEP, "vm"),
        (OPEN_MPI, None),
        (JSRUN, None),
        ({**JSRUN, **LSF_HOSTS}, "n1"),
        ({**TORCHRUN, "MASTER_ADDR": "10.0.0.7"}, "10.0.0.7"),
        (PYTORCH_JOB, "train-master-0"),
    ],
)
def test_the_host_of_rank_0(environ: Mapping[str, str], host: str | None) -> None:
    task = task_of(resolve({}), environ)
    assert task is not None
    assert task.first_host == host


@pytest.mark.parametrize(("port", "ports"), [(29500, range(29516, 29564)), (65530, range(65466, 65514))])
def test_ports_near_that_of_torchrun(port: int, ports: range) -> None:
    task = find_torchrun({**TORCHRUN, "MASTER_PORT": str(port)})
    assert task is not None
    assert task.ports == ports
    assert port not in ports


# -- Kubernetes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("host", "full", "first"),
    [
        ("train-1", "train-1.pods.default.svc.cluster.local", "train-0.pods.default.svc.cluster.local"),
        ("my-job-2-1", "my-job-2-1.pods.team.svc.cluster.local", "my-job-2-0.pods.team.svc.cluster.local"),
        ("train-1", "train-1", None),  # no headless service
        ("my-own-name", "my-own-name.pods.default.svc.cluster.local", None),
    ],
)
def test_pods_of_an_indexed_job(host: str, full: str, first: str | None) -> None:
    environ = {**INDEXED_JOB, "HOSTNAME": host, "HOROVOD_SIZE": "3"}
    task = find_kubernetes(environ, full_name=lambda name: full)
    assert task is not None
    assert (task.rank, task.size, task.one_host, task.first_host) == (1, 3, False, first)


def test_the_size_of_an_indexed_job_may_be_an_argument() -> None:
    assert found({**INDEXED_JOB, "HOSTNAME": ""}, size=3) == ("Kubernetes", 1, 3, False)
    assert found({**INDEXED_JOB, "HOSTNAME": ""}, size=1 + 1, cluster="none") is None


# -- PBS ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environ", "lines", "expected"),
    [
        (PBSDSH, "n1\nn2.example\n", (1, 2, False, "n1")),
        ({**PBS_SCRIPT, "PBS_TASKNUM": "2"}, "n1\nn2\n", (0, 2, False, "n1")),
        (TORQUE, "n1\nn1\nn2\nn2\n", (3, 4, False, "n1")),
        ({**TORQUE, "PBS_NP": "4"}, "n1\n" * 4, (3, 4, True, "n1")),
    ],
)
def test_tasks_of_pbsdsh(
    environ: Mapping[str, str], lines: str, expected: tuple[int, int, bool, str], tmp_path: Path
) -> None:
    (tmp_path / "nodes").write_text(lines)
    task = find_pbs({**environ, "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert task is not None
    assert (task.rank, task.size, task.one_host, task.first_host) == expected


def test_pbsdsh_tells_processes_of_one_host_not_apart(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    with pytest.raises(ValueError, match=ends_with(SettingCode.LAUNCHER_VARIABLES, "pbsdsh", "-hostfile $PBS_")):
        find_pbs({**PBSDSH, "PBS_NODEFILE": str(tmp_path / "nodes")})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("node[01-04]", "node01"),
        ("node[1,3,5-7],login", "node1"),
        ("login,node[1-3]", "login"),
        ("gpu[003-005,9]-ib", "gpu003-ib"),
        ("rack[1-2]node[01-16]", "rack1node01"),
        ("a.example.org,b", "a.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",a", "a[", "a[]", "a[x-y]", "a b", "a;b", "[1-2]]"])
def test_what_is_no_list_of_hosts(nodes: str) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.LAUNCHER_VARIABLES, f"SLURM_STEP_NODELIST={nodes!r}")):
        first_node(nodes)


def test_each_launcher_that_is_known_can_be_named() -> None:
    assert sorted(CLUSTERS) == sorted(FINDERS)
