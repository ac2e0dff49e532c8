"""One job of a fixed size on this host: what each rank is told, and its run from first process to last line of output.

Shared by `horovodrun` and `horovod.run`. The coordinator is embedded, listens on the loopback interface only, and asks
for a token that exists nowhere but in the environment of the ranks.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

from horovod.coordinator.core.ranks import Seat, assign
from horovod.coordinator.limits import Limits
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.runner.observed import pages_of, traced
from horovod.runner.progress import Progress, Seen, seen_by
from horovod.worker.agent.agent import LocalAgent, Outcome, Slot
from horovod.worker.agent.gpus import pinned
from horovod.worker.agent.guardian import Guardian
from horovod.worker.agent.output import Console
from horovod.worker.agent.threads import thread_variables
from horovod.worker.settings import ROWS, resolve, variables

_LOOPBACK = "127.0.0.1"
# The launcher's own coordinator has a token of its own, and on the loopback interface it speaks no TLS.
_OF_OTHER_COORDINATORS = {ROWS[name].env for name in ("token_file", "tls_ca", "tls_cert", "tls_key", "tls_server_name")}
_OUTPUT_GRACE_S = 1.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Job:
    """What to run. `hosts` has the host of every rank; all of them mean this machine."""

    command: Sequence[str]
    hosts: Sequence[str]
    environ: Mapping[str, str]
    descriptors: Sequence[Sequence[int]] = ()  # by rank, which inherits them

    @property
    def host_names(self) -> list[str]:
        """The host of every rank as messages name it: `localhost` says nothing to a later reader of a log."""
        return [socket.gethostname() if host == "localhost" else host for host in self.hosts]


def rank_environments(job: Job, coordinator: str, token: str) -> list[dict[str, str]]:
    """The environment of every rank, in rank order."""
    names = job.host_names
    inherited = {name: value for name, value in job.environ.items() if name not in _OF_OTHER_COORDINATORS}
    interfaces = resolve(job.environ).network_interfaces
    # NCCL uses the same interfaces as our own connections. What a user said to NCCL itself stays.
    nccl = {"NCCL_SOCKET_IFNAME": ",".join(interfaces)} if interfaces else {}
    places = assign([Seat(str(number), name) for number, name in enumerate(names)])
    assert not isinstance(places, str)  # only members that ask for a rank can be refused
    environments = []
    for place in places:
        environments.append(
            {
                **nccl,
                **inherited,
                **variables(
                    coordinator=coordinator,
                    token=token,
                    rank=place.rank,
                    size=len(places),
                    local_rank=place.local_rank,
                    local_size=place.local_size,
                    cross_rank=place.cross_rank,
                    cross_size=place.cross_size,
                    hostname=names[int(place.member_id)],
                ),
                # Lines appear when they are printed, although stdout is a pipe now.
                "PYTHONUNBUFFERED": "1",
            }
        )
    return environments


def share_of_cores(environ: Mapping[str, str], processes: int) -> dict[str, str]:
    """OMP_NUM_THREADS and MKL_NUM_THREADS for each of `processes`, unless settings or user decided otherwise."""
    return thread_variables(environ, processes) if resolve(environ).set_num_threads else {}


def threads_in_words(variables: Mapping[str, str]) -> str:
    """For --verbose: what `share_of_cores` came to."""
    if not variables:
        return "OMP_NUM_THREADS and MKL_NUM_THREADS are left as they are."
    shown = " and ".join(f"{name}={value}" for name, value in variables.items())
    return f"each process gets {shown}, its share of this host's cores (--no-set-num-threads leaves them alone)."


def terminal_size(environ: Mapping[str, str]) -> dict[str, str]:
    """COLUMNS and LINES for the ranks, so that a progress bar fits a terminal that it cannot see."""
    if not sys.stderr.isatty() or "COLUMNS" in environ:
        return {}
    columns, lines = shutil.get_terminal_size()
    return {"COLUMNS": str(max(columns - len("[000]<stderr>:"), 20)), "LINES": str(lines)}


def run_job(
    job: Job,
    console: Console,
    guardian: Guardian,
    on_start: Callable[[LocalAgent], None] = lambda agent: None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Runs `job` to its end and returns how the ranks ended, first to end first.

    `on_start` is called in the event loop before the first process exists; it gets the agent, to stop it from a signal
    handler or another thread. OSError or ValueError when the job cannot be started.
    """
    token = secrets.token_urlsafe(32)
    settings = resolve(job.environ)
    limits = Limits(settings.keepalive_timeout_seconds, settings.reattach_grace_seconds)
    with (
        EmbeddedCoordinator(token=token, limits=limits, **pages_of(settings)) as coordinator,
        traced(len(job.hosts), coordinator.server.registry if coordinator.server else None) as trace,
    ):
        environments = [{**one, **trace} for one in rank_environments(job, coordinator.address, token)]
        slots = [
            Slot(rank, job.command, environ, descriptors=tuple(job.descriptors[rank]) if job.descriptors else ())
            for rank, environ in enumerate(environments)
        ]
        if settings.pin_gpus:
            slots = pinned(slots)
        agent = LocalAgent(console, guardian)

        def look() -> Seen:
            assert coordinator.server is not None
            return seen_by(coordinator.server.overview(), settings.job, agent.started)

        return asyncio.run(_run(agent, slots, console, on_start, progress.show(look) if progress else None))


async def _run(
    agent: LocalAgent,
    slots: Sequence[Slot],
    console: Console,
    on_start: Callable[[LocalAgent], None],
    progress: Coroutine[None, None, None] | None,
) -> list[Outcome]:
    shown = asyncio.create_task(progress) if progress is not None else None
    on_start(agent)
    try:
        outcomes = await agent.run(slots)
    finally:
        if shown is not None:
            shown.cancel()
            await asyncio.wait([shown])
    # Signals must still be seen while a slow reader takes the last lines, so this waits in small steps.
    loop = asyncio.get_running_loop()
    give_up_at: float | None = None
    while not console.close(timeout_s=0):
        if agent.stopping and give_up_at is None:
            give_up_at = loop.time() + _OUTPUT_GRACE_S
        if give_up_at is not None and loop.time() > give_up_at:
            break
        await asyncio.sleep(_POLL_S)
    return outcomes
