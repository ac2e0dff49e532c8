"""What the launcher told this process, for scripts of earlier releases that ask before hvd.init(). Only they call it,
so it lives here; what it says of other launchers is horovod.rendezvous.task_of."""

from __future__ import annotations

import os

from horovod.base.settings import resolve
from horovod.rendezvous import task_of


def get_env_rank_and_size() -> tuple[int, int]:
    """The rank and the number of processes, as horovodrun or another launcher has set them; (0, 1) without one.

    Raises ValueError for variables that contradict each other.
    """
    settings = resolve()
    if settings.rank is not None and settings.size is not None:
        return settings.rank, settings.size
    task = task_of(settings, os.environ)
    return (0, 1) if task is None else (task.rank, task.size)
