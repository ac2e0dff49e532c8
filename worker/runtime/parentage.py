"""What a child process knows of the world of the rank that started it: a worker of a DataLoader, or any other program.

A child shares out data by `hvd.rank()` and `hvd.size()`, as they were when it began. A forked child has its parent's
memory. Others are told by their parent in two ways, because neither reaches all of them:

    an environment variable       reaches every process that the rank starts; written by hvd.init(), gone after
                                  hvd.shutdown(). A server that forks later children (multiprocessing's "forkserver")
                                  keeps the one of its own start, which an elastic world may have outdated.
    multiprocessing's own record  of the parent, which it pickles for each child that it starts, by any method

A launcher copies environments to processes that are no children of the rank, maybe on other hosts, and a rank may start
a launcher. So the variable counts only in a descendant of the process that wrote it, and neither of the two counts
where the variables differ by which a launcher gives a process its place: such a process is a rank of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from horovod.base.processes import parent_of, start_time
from horovod.base.settings import PARENT_WORLD, ROWS, Settings
from horovod.worker.runtime.world import World

VARIABLE: Final = PARENT_WORLD

# Variables by which our launchers and others give a process its place. A process in which one of them differs from its
# parent's was given a place of its own.
_PLACES: Final = (
    *(ROWS[name].env for name in ("coordinator", "job", "rank", "size", "min_size", "max_size", "cluster")),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "JSM_NAMESPACE_ID", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("PBS_JOBID", "PBS_TASKNUM", "PBS_VNODENUM", "JOB_COMPLETION_INDEX"),
)
_MOST_ANCESTORS: Final = 64  # between a child and its rank; a cycle can't be, but what /proc says changes meanwhile


@dataclass(frozen=True)
class Facts:
    """The place of a rank in its world; `World` of a member has the same names.

    pid, started: of the rank's process, as `start_time` gives the second. places: a digest of `_PLACES`.
    asked: a digest of the coordinator and job that its hvd.init() asked for. alone: a world of one, of no coordinator.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    pid: int
    started: int
    places: str
    asked: str
    alone: bool

    def whose(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


def facts_of(world: World, asked: Settings, *, alone: bool) -> Facts:
    """Of this process, a member of `world`, whose hvd.init() began with the settings `asked`."""
    return Facts(
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.cross_rank,
        world.cross_size,
        world.is_homogeneous,
        os.getpid(),
        start_time(os.getpid()),
        _places(os.environ),
        asked_for(asked),
        alone,
    )


def asked_for(settings: Settings) -> str:
    """Equal for settings that ask for a world of the same coordinator and job."""
    return _digest([settings.coordinator or "", settings.job])


def publish(facts: Facts) -> None:
    """From now on, children of this process know these."""
    text = json.dumps(asdict(facts))
    os.environ[VARIABLE] = text
    if (record := _record()) is not None:
        record[VARIABLE] = text


def withdraw() -> None:
    """From now on, children of this process know nothing.

    The variable stays, empty. hvd.init() makes it so before it starts threads: a variable that is added moves all of
    them, and a library's thread may be reading one; a variable that only changes moves none (setenv(3) of glibc).
    """
    os.environ[VARIABLE] = ""
    if (record := _record()) is not None:
        record[VARIABLE] = ""


def inherited() -> Facts | None:
    """What the rank that started this process, or started one of its ancestors, told it; None: no rank did."""
    told = (_record() or {}).get(VARIABLE)
    facts = _read(os.environ.get(VARIABLE) if told is None else told)
    if facts is None or facts.pid == os.getpid() or facts.places != _places(os.environ):
        return None
    return facts if told is not None or _descends_from(facts.pid, facts.started) else None


def _record() -> dict[str, object] | None:
    """What multiprocessing hands from process to process; None where an interpreter has no such record."""
    import multiprocessing  # late: some milliseconds, which only hvd.init() and children need

    record = getattr(multiprocessing.current_process(), "_config", None)
    return record if isinstance(record, dict) else None


def _read(text: object) -> Facts | None:
    """None for what no release with these fields has written: a parent may have another one."""
    try:
        return Facts(**json.loads(text)) if isinstance(text, str) else None
    except (ValueError, TypeError):
        return None


def _places(environ: Mapping[str, str]) -> str:
    return _digest([environ.get(name, "") for name in _PLACES])


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _descends_from(ancestor: int, started: int) -> bool:
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        if pid <= 1 and pid != ancestor:
            return False
        if pid == ancestor:
            return started != 0 and start_time(pid) == started
        pid = parent_of(pid)
    return False
