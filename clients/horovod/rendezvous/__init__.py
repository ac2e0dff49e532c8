"""Launchers other than ours: rank and size of a process that mpirun, srun or the like has started.

One file for each: a function from the environment's variables to a Task, or None where that launcher has not started
this process. A new one is such a file and its line in CLUSTERS. What follows from a Task is in join.py. hosts.py and
lsf.py read lists of hosts, which people and batch systems write; horovodrun takes them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from horovod.base.errors import SettingCode, coded
from horovod.base.settings import Settings
from horovod.rendezvous import jsrun, kubernetes, openmpi, pbs, pmi, slurm, torchrun
from horovod.rendezvous.task import Task

# In the order in which they are asked: the one that started the process itself before those that started its launcher,
# whose variables the process inherits. torchrun is started by all of them, one for each host, and starts none of them.
# An mpirun inside of a Slurm allocation leaves Slurm's variables of the step in which its own helpers run; a srun with
# PMI sets the variables of both, and Slurm's say more. RANK and WORLD_SIZE that were set by hand come last.
CLUSTERS: dict[str, Callable[[Mapping[str, str]], Task | None]] = {
    "torchrun": torchrun.find,
    "jsrun": jsrun.find,
    "openmpi": openmpi.find,
    "slurm": slurm.find,
    "pmi": pmi.find,
    "pbs": pbs.find,
    "pytorch": torchrun.find_by_hand,
    "kubernetes": kubernetes.find,
}
_SIZE_IS_GIVEN = ("kubernetes",)  # these do not tell how many processes there are; HOROVOD_SIZE does


def task_of(settings: Settings, environ: Mapping[str, str]) -> Task | None:
    """What a launcher says of this process; None where none started it together with others, or where `settings` say
    who it is themselves (size or rank) or HOROVOD_CLUSTER=none. ValueError where variables contradict themselves."""
    if settings.cluster == "none" or settings.rank is not None or settings.min_size is not None:
        return None  # who is in an elastic world changes: no launcher's numbers say it
    names = tuple(CLUSTERS) if settings.cluster == "auto" else (settings.cluster,)
    if settings.size is not None:
        names = tuple(name for name in names if name in _SIZE_IS_GIVEN)
        if not names:
            return None
        environ = {**environ, "HOROVOD_SIZE": str(settings.size)}  # it may be an argument of hvd.init()
    found = next((task for name in names if (task := CLUSTERS[name](environ)) is not None), None)
    if found is None and settings.cluster != "auto":
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"HOROVOD_CLUSTER={settings.cluster}, but this process has none of the variables by which such a "
                "launcher would tell its rank.",
            )
        )
    return found if found is not None and found.size > 1 else None
