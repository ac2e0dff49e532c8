"""Processes that Open MPI's mpirun (mpiexec, prterun) started: OMPI_COMM_WORLD_*.

All of them see how many there are and how many on their host, and nothing of where rank 0 is when there are several
hosts: OMPI_MCA_orte_hnp_uri leads to mpirun, which may run elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.rendezvous.task import Task, number

# Which run this is: the name of the job, and the address of the server that mpirun has on this host for this run.
_RUN = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_URI2", "PMIX_SERVER_URI41")


def find(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by Open MPI's variables; None where it has not started this process."""
    rank, size = number(environ, "OMPI_COMM_WORLD_RANK"), number(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    return Task(
        launcher="mpirun",
        rank=rank,
        size=size,
        one_host=number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == size,
        run=tuple(f"{name}={environ[name]}" for name in _RUN if name in environ),
        # Without the value of the token: every user of the host sees command lines.
        variable_option="mpirun -x HOROVOD_COORDINATOR=HOST:29400 -x HOROVOD_TOKEN",
    )
