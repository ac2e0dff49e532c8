"""One job of a fixed size on this host: what each rank is told, and its run from first process to last line of output.

Shared by `horovodrun` and `horovod.run`. The coordinator is embedded, listens on the loopback interface only, and asks
for a token that exists nowhere but in the environment of the ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from horovod.base.settings import resolve
from horovod.base.tasks import end_tasks
from horovod.coordinator.config import CoordinatorConfig, Limits
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.launch.console.control import SignalTarget
from horovod.launch.console.report import Progress, Seen, last_lines, seen_by, story_told, tell_of_spares
from horovod.launch.elastic.request import Replacement, elastic_variables, write_policy
from horovod.launch.local.own_machine import OwnMachine, Shares
from horovod.launch.own_agents import replacements_told
from horovod.launch.own_coordinator import pages_of, tell_pages, traced
from horovod.protos.v1.jobs_pb2 import JobRecord, JobSpec
from horovod.protos.v1.story_pb2 import StoryEntry
from horovod.worker.agent.cores_and_gpus import pinned, thread_variables
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.output import Console
from horovod.worker.agent.supervisor import Slot, Supervisor
from horovod.worker.rank_environment import JobOnHost, rank_environment


@dataclass(frozen=True)
class LocalJob:
    """A job all of whose ranks run on this machine: what to run. `hosts` has a name of it for every rank.

    processes: how many there are at first, of a job whose size may change; 0: one for each of `hosts`.
    """

    command: Sequence[str]
    hosts: Sequence[str]
    environ: Mapping[str, str]
    descriptors: Sequence[Sequence[int]] = ()  # for each rank, the descriptors that it inherits
    stdin: Sequence[int | None] = ()  # for each rank, its stdin; None: an empty one. (): empty ones for all
    processes: int = 0

    @property
    def host_names(self) -> list[str]:
        """The host of every rank as messages name it: `localhost` says nothing to a later reader of a log."""
        return [socket.gethostname() if host == "localhost" else host for host in self.hosts]


def slots_of(job: LocalJob, coordinator: str, token: str, shares: Shares) -> list[Slot]:
    """What to start, in the order of ranks. ValueError for settings that make no sense, or GPUs that are not there."""
    slots = []
    for host, share in shares.items():
        on_host = JobOnHost(job.environ, host, share.size, coordinator, token=token, is_own=True)
        for placed in share.ranks:
            rank = placed.rank
            descriptors = tuple(job.descriptors[rank]) if job.descriptors else ()
            stdin = job.stdin[rank] if job.stdin else None
            incarnation = placed.incarnation or 1
            environ = rank_environment(on_host, placed, incarnation=incarnation)
            slots.append(Slot(rank, job.command, environ, None, descriptors, stdin, incarnation))
    slots.sort(key=lambda slot: slot.rank)
    return pinned(slots) if resolve(job.environ).pin_gpus else slots


def share_of_cores(environ: Mapping[str, str], processes: int) -> dict[str, str]:
    """OMP_NUM_THREADS and MKL_NUM_THREADS for each of `processes`, unless settings or user decided otherwise."""
    return thread_variables(environ, processes) if resolve(environ).set_num_threads else {}


def threads_in_words(variables: Mapping[str, str]) -> str:
    """A sentence for --verbose about the variables of `share_of_cores`."""
    if not variables:
        return "OMP_NUM_THREADS and MKL_NUM_THREADS are left as they are."
    shown = " and ".join(f"{name}={value}" for name, value in variables.items())
    return f"each process gets {shown}, its share of this host's cores (--no-set-num-threads leaves them alone)."


def run_job(
    job: LocalJob,
    console: Console,
    guardian: Guardian,
    on_start: Callable[[SignalTarget], None] = lambda target: None,
    progress: Progress | None = None,
    replacement: Replacement | None = None,
    verbose: bool = False,
) -> JobRecord:
    """Runs `job` to its end and returns its record. replacement: of processes that fail; None: the job ends. verbose:
    says when a spare process takes a place.

    `on_start` is called in the event loop before the first process exists; it gets what signals are passed on to.
    OSError or ValueError when the job cannot be started.
    """
    token = secrets.token_urlsafe(32)
    settings = resolve(job.environ)
    limits = Limits(settings.keepalive_timeout_seconds, settings.reattach_grace_seconds)
    config = CoordinatorConfig(token=token, limits=limits, **pages_of(settings))
    # A record has no room for a long command.
    spec = JobSpec(command=job.command[:1], processes=job.processes or len(job.hosts))
    write_policy(spec, replacement, job.environ)
    with (
        EmbeddedCoordinator.of(config) as coordinator,
        traced(len(job.hosts), coordinator.server.registry if coordinator.server else None) as trace,
    ):
        tell_pages(coordinator)
        traced_job = dataclasses.replace(job, environ={**job.environ, **trace, **elastic_variables(replacement)})

        def note(line: str) -> None:
            console.note(f"horovodrun: {line}")

        async def run() -> JobRecord:
            supervisor = Supervisor(console, guardian)
            machine = OwnMachine(
                coordinator.scheduler(),
                supervisor,
                job.host_names,
                lambda shares: slots_of(traced_job, coordinator.address, token, shares),
            )

            def look() -> Seen:
                assert coordinator.server is not None
                return seen_by(coordinator.server.overview(), settings.job, supervisor.started)

            async def story() -> Sequence[StoryEntry]:
                assert coordinator.server is not None
                return coordinator.server.story(settings.job)

            tasks = [asyncio.create_task(progress.show(look))] if progress else []
            if verbose and replacement is not None and replacement.spares and coordinator.server is not None:
                tasks.append(asyncio.create_task(tell_of_spares(coordinator.server.overview, note)))
            on_start(machine)
            try:
                async with story_told(note if progress is not None and progress.verbose else None, story):
                    record = await machine.run(spec, settings.job, replacements_told(note))
            finally:
                await end_tasks(tasks)
            await last_lines(console, lambda: machine.stopping)
            return record

        return asyncio.run(run())
