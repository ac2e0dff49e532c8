"""What the plug-ins read from the variables of mpirun, srun and others. The mappings were recorded from real runs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from horovod.runner.clusters import task_of
from horovod.runner.clusters.nodelist import first_node
from horovod.worker.settings import resolve

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
        ({"PMIX_RANK": "0"}, None),
        # Launchers that start their helpers by srun, one for each host: the processes inherit the helper's variables.
        ({**SLURM_STEP, **OPEN_MPI}, ("mpirun", 1, 2, True)),
        ({**SLURM_STEP, **MPICH, "PMI_SIZE": "8", "PMI_RANK": "5"}, ("mpiexec", 5, 8, False)),
    ],
)
def test_who_is_who(environ: Mapping[str, str], expected: tuple[str, int, int, bool] | None) -> None:
    assert found(environ) == expected


@pytest.mark.parametrize("environ", [OPEN_MPI, SLURM_STEP, MPICH, JSRUN, {"PMIX_RANK": "1"}])
def test_settings_win_and_recognition_can_be_turned_off(environ: Mapping[str, str]) -> None:
    assert found(environ, size=3) is None
    assert found(environ, rank=1, size=3, coordinator="a:1") is None
    assert found(environ, cluster="none") is None


def test_one_launcher_can_be_demanded() -> None:
    both = {**OPEN_MPI, **SLURM_STEP, "SLURM_STEP_NUM_TASKS": "4"}
    assert found(both, cluster="slurm") == ("srun", 1, 4, True)
    with pytest.raises(ValueError, match="HOROVOD_CLUSTER=pmi, but this process has none of the variables"):
        found({}, cluster="pmi")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK='one' is not usable"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "rank 2 of 2, which cannot be"),
        ({**MPICH, "PMI_SIZE": "-1"}, "PMI_SIZE='-1' is not usable"),
        ({**SLURM_STEP, "SLURM_STEP_NODELIST": "a[1-"}, "SLURM_STEP_NODELIST='a.1-' is not usable"),
        ({"PMIX_RANK": "1"}, "does not tell how many"),
    ],
)
def test_contradictions_get_a_sentence(environ: Mapping[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        found(environ)
    assert str(error.value).endswith(".")
    assert "HOROVOD_CLUSTER=none" in str(error.value)


def test_all_processes_of_a_run_have_one_name_for_it_and_no_other_run_has() -> None:
    def run(environ: Mapping[str, str]) -> tuple[str, ...]:
        task = task_of(resolve({}), environ)
        assert task is not None
        return task.run

    for environ, rank in (
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (SLURM_STEP, "SLURM_PROCID"),
        (JSRUN, "JSM_NAMESPACE_RANK"),
    ):
        assert run({**environ, rank: "0"}) == run(environ) != ()
    assert run({**OPEN_MPI, "PMIX_NAMESPACE": "8"}) != run(OPEN_MPI)
    assert run({**SLURM_STEP, "SLURM_STEP_ID": "1"}) != run(SLURM_STEP) != run({**SLURM_STEP, "SLURM_JOB_ID": "5"})


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
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST=.* is not usable"):
        first_node(nodes)
