"""`horovodrun -H h1:2,h2:2`: an agent on each host for as long as this job; then as on registered agents.

The launcher is the coordinator. It listens on every interface of this host, and each agent takes the address that it
reaches: first the one that the remote shell came from.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horovod.base.addresses import loopback_host, with_port
from horovod.base.run_certificate import ADVICE, SERVER_NAME, run_certificate
from horovod.base.setting import split_ports
from horovod.base.settings import Settings, resolve
from horovod.base.tasks import end_tasks
from horovod.coordinator.address import everywhere
from horovod.coordinator.config import CoordinatorConfig, Limits
from horovod.coordinator.server import EmbeddedCoordinator, quiet
from horovod.coordinator.services.exchange import Exchange
from horovod.coordinator.tls import ServerTls
from horovod.launch.cluster.client import Access, FollowedJob
from horovod.launch.cluster.submission import attended, job_of, show
from horovod.launch.console.report import Progress, Seen, seen_by, story_told, tell_of_spares
from horovod.launch.console.streams import terminal_size
from horovod.launch.elastic.driver import Changed, Driver, Prepare, driven
from horovod.launch.elastic.request import Supply
from horovod.launch.hosts.agents import HostAgents, RemoteShell, shown_name, working_directory
from horovod.launch.own_coordinator import pages_of, tell_pages, traced
from horovod.protos.v1 import jobs_pb2
from horovod.protos.v1.story_pb2 import StoryEntry
from horovod.rendezvous.hosts import HostSlots
from horovod.worker.agent.output import Console
from horovod.worker.runtime.host import choose_interfaces, interfaces
from horovod.worker.runtime.tls import ClientTls


class _Starting:
    """What signals act on while hosts are being connected to."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def stop(self, signum: int) -> None:
        self._task.cancel()

    def forward(self, signum: int) -> None:
        pass


def launch_on_hosts(
    args: argparse.Namespace, environ: Mapping[str, str], hosts: Sequence[HostSlots], shell: RemoteShell
) -> int:
    """Runs the job of a command line on these hosts, all of which get ranks; the exit code of the launcher.

    Without hosts, `args.supply` finds them. shell: by which their agents are started.
    """
    settings = resolve(environ)
    working_directory()
    if hosts:
        shell.check()
    named = [(shown_name(host.name), host.slots) for host in hosts]
    spec = job_of(args, {**environ, **terminal_size(environ)}, named)

    def run(
        console: Console, on_start: Callable[[Any], None], changed: Callable[[jobs_pb2.JobRecord], None]
    ) -> jobs_pb2.JobRecord:
        note = (lambda line: console.note(f"horovodrun: {line}")) if args.verbose else None
        return run_on_hosts(
            spec,
            hosts,
            settings,
            environ,
            shell,
            sys.executable,
            console,
            on_start,
            changed,
            note,
            supply=args.supply,
        )

    return show(args, args.replacement.greatest(spec.processes) if args.replacement else spec.processes, run)


def run_on_hosts(
    spec: jobs_pb2.JobSpec,
    hosts: Sequence[HostSlots],
    settings: Settings,
    environ: Mapping[str, str],
    shell: RemoteShell,
    python: str,
    console: Console,
    on_start: Callable[[Any], None],
    changed: Callable[[jobs_pb2.JobRecord], None] = lambda record: None,
    note: Callable[[str], None] | None = None,
    output: Callable[[FollowedJob], None] = lambda job: None,
    exchange: Exchange | None = None,
    supply: Supply | None = None,
) -> jobs_pb2.JobRecord:
    """The record of the job when it is over. RuntimeError with a line for each host that could not be used.

    note: shows a line about what agents say and what happens to the job; None: nothing of that is shown.
    exchange: what ranks fetch from this coordinator and deliver to it. supply: what finds the hosts, none of which is
    given then.
    """
    token = secrets.token_urlsafe(32)
    limits = Limits(settings.keepalive_timeout_seconds, settings.reattach_grace_seconds)
    with (
        run_certificate() as certificate,
        EmbeddedCoordinator.of(
            CoordinatorConfig(
                everywhere(split_ports(settings.ports or "")),
                token,
                tls=ServerTls(certificate.cert, certificate.key) if certificate else None,
                tls_advice=ADVICE,
                services=() if exchange is None else (exchange,),
                limits=limits,
                **pages_of(settings),
            )
        ) as coordinator,
        traced(spec.processes, coordinator.server.registry if coordinator.server else None) as trace,
    ):
        tell_pages(coordinator)
        spec.environment.update(trace)
        port = int(coordinator.address.rpartition(":")[2])
        order = {
            "token": token,
            "coordinators": _addresses(settings, port),
            "ports": settings.ports,
            "keepalive_timeout_s": limits.keepalive_timeout_s,
            "alone_s": limits.reattach_grace_s + limits.keepalive_timeout_s,
        }
        if certificate is not None:
            order |= {"ca": certificate.text(), "server_name": SERVER_NAME}
        tls = ClientTls(certificate.ca, server_name=SERVER_NAME) if certificate else None
        access = Access([with_port(loopback_host(), port)], token, tls)

        job_name = ""

        def look() -> Seen:
            nonlocal job_name
            assert coordinator.server is not None
            jobs = coordinator.server.overview()
            job_name = jobs[0].name if jobs else job_name
            return seen_by(jobs, job_name, spec.processes)

        async def story() -> Sequence[StoryEntry]:
            assert coordinator.server is not None
            look()
            return coordinator.server.story(job_name)

        async def run() -> jobs_pb2.JobRecord:
            quiet(asyncio.get_running_loop())
            task = asyncio.current_task()
            assert task is not None
            on_start(_Starting(task))
            timeout_s = settings.start_timeout_seconds
            notes = note or (lambda line: None)
            async with HostAgents(hosts, order, shell, python, environ, timeout_s, notes, Progress(console)) as agents:
                if supply is None:
                    return await follow(changed, output)
                most, wait_s = spec.policy.most or None, settings.elastic_timeout_seconds
                tell = lambda line: console.note(f"horovodrun: {line}")  # noqa: E731
                driver = Driver(supply, agents, spec.processes, most, wait_s, tell)
                return await driven(driver, spec, console, changed, output, follow)

        async def follow(changed: Changed, prepare: Prepare) -> jobs_pb2.JobRecord:
            ranks = [host.name for host in spec.hosts for _ in range(host.slots)][: spec.processes]
            tasks = [asyncio.create_task(Progress(console, ranks).show(look))]
            if note is not None and spec.policy.spares and coordinator.server is not None:
                tasks.append(asyncio.create_task(tell_of_spares(coordinator.server.overview, note)))
            try:
                async with story_told(note, story):
                    return await attended(access, spec, console, on_start, changed, prepare)
            finally:
                await end_tasks(tasks)

        try:
            return asyncio.run(run())
        except asyncio.CancelledError:  # stopped by a signal, while hosts were being connected to
            return jobs_pb2.JobRecord(state=jobs_pb2.JOB_STATE_STOPPED, exit_code=130)


def _addresses(settings: Settings, port: int) -> list[str]:
    """Where agents may find this host, the likeliest first."""
    wanted = settings.network_interfaces
    here = [one for one in interfaces() if one.is_loopback]
    outside = choose_interfaces(interfaces(), wanted) if wanted else choose_interfaces(interfaces())
    return [with_port(address, port) for address in _unique([*outside, *here])]


def _unique(found: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(address for one in found for address in one.addresses))
