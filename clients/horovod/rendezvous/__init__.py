"""Launchers other than ours: rank and size of a process that mpirun, srun or the like has started.

clusters.py reads the variables of each. What follows from them is in join.py. hosts.py reads lists of hosts, which
people and batch systems write; horovodrun takes them too.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.base.errors import SettingCode, coded
from horovod.base.settings import Settings
from horovod.base.settings.world import CLUSTERS
from horovod.rendezvous.clusters import FINDERS, SIZE_IS_GIVEN, Task


def task_of(settings: Settings, environ: Mapping[str, str]) -> Task | None:
    """What a launcher says of this process; None where none started it together with others, or where `settings` say
    who it is themselves (size or rank) or HOROVOD_CLUSTER=none. ValueError where variables contradict themselves."""
    if settings.cluster == "none" or settings.rank is not None or settings.min_size is not None:
        return None  # who is in an elastic world changes: no launcher's numbers say it
    names: tuple[str, ...] = CLUSTERS if settings.cluster == "auto" else (settings.cluster,)
    if settings.size is not None:
        names = tuple(name for name in names if name in SIZE_IS_GIVEN)
        if not names:
            return None
        environ = {**environ, "HOROVOD_SIZE": str(settings.size)}  # it may be an argument of hvd.init()
    found = next((task for name in names if (task := FINDERS[name](environ)) is not None), None)
    if found is None and settings.cluster != "auto":
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"HOROVOD_CLUSTER={settings.cluster}, but this process has none of the variables by which such a "
                "launcher would tell its rank.",
            )
        )
    return found if found is not None and found.size > 1 else None
