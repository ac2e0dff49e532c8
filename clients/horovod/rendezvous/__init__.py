"""Launchers other than ours: rank and size of a process that mpirun, srun or the like has started.

One file for each: `find` makes a Task of the environment's variables, or None where that launcher has not started this
process. A new one is such a file and its name in CLUSTERS (base/settings/world.py). What follows from a Task is in
join.py. hosts.py and lsf.py read lists of hosts, which people and batch systems write; horovodrun takes them too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from horovod.base.errors import SettingCode, coded
from horovod.base.settings import Settings
from horovod.base.settings.world import CLUSTERS
from horovod.rendezvous.task import Task


def task_of(settings: Settings, environ: Mapping[str, str]) -> Task | None:
    """What a launcher says of this process; None where none started it together with others, or where `settings` say
    who it is themselves (size or rank) or HOROVOD_CLUSTER=none. ValueError where variables contradict themselves."""
    if settings.cluster == "none" or settings.rank is not None or settings.min_size is not None:
        return None  # who is in an elastic world changes: no launcher's numbers say it
    names: tuple[str, ...] = CLUSTERS if settings.cluster == "auto" else (settings.cluster,)
    clusters: list[Any] = [importlib.import_module(f"horovod.rendezvous.{name}") for name in names]
    if settings.size is not None:
        clusters = [one for one in clusters if getattr(one, "SIZE_IS_GIVEN", False)]
        if not clusters:
            return None
        environ = {**environ, "HOROVOD_SIZE": str(settings.size)}  # it may be an argument of hvd.init()
    found: Task | None = next((task for one in clusters if (task := one.find(environ)) is not None), None)
    if found is None and settings.cluster != "auto":
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"HOROVOD_CLUSTER={settings.cluster}, but this process has none of the variables by which such a "
                "launcher would tell its rank.",
            )
        )
    return found if found is not None and found.size > 1 else None
