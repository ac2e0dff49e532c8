"""What an agent gives to the processes of a job that it starts: folders, environments, and the lines of a job file."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from horovod.base.errors import ClusterCode, coded
from horovod.base.settings import ROWS, resolve, variables
from horovod.protos.v1 import agents_pb2
from horovod.worker.agent.cores_and_gpus import pinned, thread_variables
from horovod.worker.agent.relay import Relay
from horovod.worker.agent.supervisor import Slot
from horovod.worker.rank_environment import JobOnHost, rank_environment
from horovod.worker.runtime.tls import ClientTls

# Folders in which the lines of a job file run: one for each worker, deleted when the job is over on this host.
#
# Logs lie in another folder (shim_job.py) and are kept.

_FOLDER = "work"


class Workspaces:
    def __init__(self, state: Path) -> None:
        self._folder = state / _FOLDER

    def make(self, job: str, workers: int) -> list[Path]:
        """A new empty folder for each worker of this host."""
        folder = self._folder / quote(job, safe="")
        shutil.rmtree(folder, ignore_errors=True)
        folders = [folder / f"worker.{number}" for number in range(workers)]
        for one in folders:
            one.mkdir(mode=0o700, parents=True)
        return folders

    def add(self, job: str, names: Sequence[str]) -> tuple[list[Path], list[Path]]:
        """The folders with these names, and those of them that are new, and empty."""
        folders = [self._folder / quote(job, safe="") / name for name in names]
        new = [folder for folder in folders if not folder.exists()]
        for folder in new:
            folder.mkdir(mode=0o700, parents=True)
        return folders, new

    async def remove(self, job: str) -> None:
        """Removes the job's folders, because it is over on this host."""
        folder = self._folder / quote(job, safe="")
        if folder.exists():
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def clear(self, running: Container[str]) -> None:
        """Deletes the folders that an earlier agent left of jobs that do not run any more."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if unquote(path.name) not in running:
                    shutil.rmtree(path, ignore_errors=True)


# The environment that an agent gives to the ranks which it starts.

# Variables of the agent itself. A rank gets values of its own for them, or none.
_NOT_INHERITED = ("HOROVOD_TOKEN", "HOROVOD_TOKEN_FILE", "NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM")


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """The part of the agent's environment that every process which it starts inherits."""
    return {name: value for name, value in own.items() if name not in _NOT_INHERITED}


def slots_of(
    start: agents_pb2.StartShare, own: Mapping[str, str], *, coordinator: str, host: str, relay: Relay | None = None
) -> list[Slot]:
    """The ranks to start for this share of a job. ValueError for settings that make no sense or for missing GPUs.

    own: the agent's environment, to which that of the job is added. relay: given to ranks that know coordinators by
    the same TLS files as the relay does.
    """
    environ = {**inherited(own), **start.environment}
    settings = resolve({name: value for name, value in environ.items() if name != ROWS["token_file"].env})
    if settings.set_num_threads:
        environ |= thread_variables(environ, len(start.ranks))
    relayed = relay is not None and relay.path and settings.relay and relay.serves(ClientTls.of(settings))
    job = JobOnHost(
        environ,
        host,
        start.size,
        coordinator,
        token=start.token or None,
        job=start.job,
        interfaces=start.interfaces,
        relay_socket=relay.path if relay is not None and relayed else "",
    )
    slots = [
        Slot(
            placed.rank,
            list(start.command),
            rank_environment(job, placed, placed.gpus, placed.incarnation or 1),
            start.directory or None,
            incarnation=placed.incarnation or 1,
        )
        for placed in start.ranks
    ]
    if settings.pin_gpus and not any(placed.gpus for placed in start.ranks):
        return pinned(slots)
    return slots


# The processes that an agent starts for each line of a job file's run list.


def workers_of(start: agents_pb2.StartShare) -> list[list[agents_pb2.PlacedRank]]:
    """The ranks of each worker that this host's share of the job holds."""
    each = start.processes_per_worker or 1
    ranks = list(start.ranks)
    return [ranks[first : first + each] for first in range(0, len(ranks), each)]


def lines_of(
    start: agents_pb2.StartShare,
    own: Mapping[str, str],
    folders: Sequence[Path],
    *,
    coordinator: str,
    host: str,
    relay: Relay | None = None,
) -> list[list[Slot]]:
    """The processes of each line. ValueError with a sentence when one can't be started on this host.

    own: the agent's environment, to which that of the job is added. folders: the folder of each worker, in which its
    lines run unless the job names a directory.
    """
    own = _with_environment(own, start.python_environment)
    each = start.processes_per_worker or 1
    told = [variables(worker=ranks[0].rank // each, workers=start.size // each) for ranks in workers_of(start)]
    worker_of = {placed.rank: number for number, ranks in enumerate(workers_of(start)) for placed in ranks}
    places = [start.directory or str(folder) for folder in folders]
    found = []
    for line in start.lines:
        if line.distributed:
            one = agents_pb2.StartShare()
            one.CopyFrom(start)
            one.command[:] = line.command
            slots = slots_of(one, own, coordinator=coordinator, host=host, relay=relay)
        else:
            slots = _on_each_worker(start, own, line.command)
        found.append(
            [
                dataclasses.replace(slot, environ={**slot.environ, **told[worker]}, directory=places[worker])
                for slot in slots
                for worker in [worker_of[slot.rank]]
            ]
        )
    return found


def _on_each_worker(start: agents_pb2.StartShare, own: Mapping[str, str], command: Sequence[str]) -> list[Slot]:
    """One process on each worker, which belongs to no world: it counts as the worker's first rank."""
    environ = {**inherited(own), **start.environment}
    workers = workers_of(start)
    if resolve(environ).set_num_threads:
        environ |= thread_variables(environ, len(workers))
    slots = []
    for ranks in workers:
        gpus = [gpu for placed in ranks for gpu in placed.gpus]
        more = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        slots.append(Slot(ranks[0].rank, list(command), {**environ, **more, "PYTHONUNBUFFERED": "1"}))
    return slots


def _with_environment(own: Mapping[str, str], path: str) -> Mapping[str, str]:
    if not path:
        return own
    programs = Path(path) / "bin"
    if not (programs / "python").exists():
        why = f"there is no Python environment {path!r}: {str(programs / 'python')!r} does not exist"
        raise ValueError(coded(ClusterCode.NO_PYTHON_ENVIRONMENT, why))
    without = {name: value for name, value in own.items() if name != "PYTHONHOME"}
    path_variable = f"{programs}:{own.get('PATH', '/usr/local/bin:/usr/bin:/bin')}"
    return {**without, "VIRTUAL_ENV": path, "PATH": path_variable}
