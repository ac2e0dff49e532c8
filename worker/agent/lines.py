"""The processes that an agent starts for each line of a job file's run list."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod.base.errors import ClusterCode, coded
from horovod.base.settings import resolve, variables
from horovod.protos.v1 import agents_pb2
from horovod.worker.agent.environment import inherited, slots_of
from horovod.worker.agent.relay import Relay
from horovod.worker.agent.supervisor import Slot
from horovod.worker.agent.threads import thread_variables


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
