"""Processes that Slurm's srun started: the tasks of a step.

A batch script and the shell of salloc have SLURM_* variables, too, with the number of tasks that may be started and
SLURM_PROCID=0. They are not tasks of a step with several: only those have SLURM_STEP_NUM_TASKS above 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.rendezvous.nodelist import first_node
from horovod.rendezvous.task import Task, number


def find(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by Slurm's variables; None where srun has not started this process, or has started it alone."""
    rank, size = number(environ, "SLURM_PROCID"), number(environ, "SLURM_STEP_NUM_TASKS")
    if rank is None or size is None or not environ.get("SLURM_STEP_ID", "").isdigit():
        return None
    if "PMI_SIZE" in environ and (number(environ, "PMI_RANK"), number(environ, "PMI_SIZE")) != (rank, size):
        return None  # an mpiexec that starts one helper for each host by srun: the helper's processes inherit all this
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    return Task(
        launcher="srun",
        rank=rank,
        size=size,
        one_host=number(environ, "SLURM_STEP_NUM_NODES") == 1,
        run=tuple(
            f"{name}={environ[name]}"
            for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
            if name in environ
        ),
        first_host=first_node(nodes) if nodes else None,
        variable_option="export them before srun",
    )
