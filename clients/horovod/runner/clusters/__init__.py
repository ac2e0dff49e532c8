"""Launchers other than ours: rank and size of a process that mpirun, srun or the like has started.

One file for each: a function from the environment's variables to a Task, or None where that launcher has not started
this process. A new one is such a file and its line in CLUSTERS. What follows from a Task is in join.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from horovod.runner.clusters import openmpi, pmi, slurm
from horovod.runner.clusters.task import Task
from horovod.worker.settings import Settings

# In the order in which they are asked. An mpirun inside of a Slurm allocation leaves Slurm's variables of the step in
# which its own helpers run, so Open MPI is first; a srun with PMI sets the variables of both, and Slurm's say more.
CLUSTERS: dict[str, Callable[[Mapping[str, str]], Task | None]] = {
    "openmpi": openmpi.find,
    "slurm": slurm.find,
    "pmi": pmi.find,
}


def task_of(settings: Settings, environ: Mapping[str, str]) -> Task | None:
    """What a launcher says of this process; None where none started it together with others, or where `settings` say
    who it is themselves (size or rank) or HOROVOD_CLUSTER=none. ValueError where variables contradict themselves."""
    if settings.cluster == "none" or settings.size is not None or settings.rank is not None:
        return None
    names = CLUSTERS if settings.cluster == "auto" else (settings.cluster,)
    found = next((task for name in names if (task := CLUSTERS[name](environ)) is not None), None)
    if found is None and settings.cluster != "auto":
        raise ValueError(
            f"HOROVOD_CLUSTER={settings.cluster}, but this process has none of the variables by which such a launcher "
            "would tell its rank."
        )
    return found if found is not None and found.size > 1 else None
