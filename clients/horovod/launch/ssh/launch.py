"""`horovodrun -H h1:2,h2:2`: an agent on each host, by ssh, for as long as this job; then as on registered agents.

The launcher is the coordinator. It listens on every interface of this host, and each agent takes the address that it
reaches: first the one that ssh came from.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from horovod.base.errors import LaunchCode, code_of, coded, without_code
from horovod.base.run_certificate import ADVICE, SERVER_NAME, run_certificate
from horovod.base.settings import Settings, resolve
from horovod.base.tasks import end_tasks
from horovod.base.words import reason_of
from horovod.coordinator.address import everywhere
from horovod.coordinator.config import CoordinatorConfig
from horovod.coordinator.limits import Limits
from horovod.coordinator.loops import quiet
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.exchange import Exchange
from horovod.coordinator.tls import ServerTls
from horovod.launch.cluster.client import Access, FollowedJob
from horovod.launch.cluster.launch import attended, job_of, show
from horovod.launch.console.progress import Progress, Seen, hosts_sentence, seen_by
from horovod.launch.console.story import story_told
from horovod.launch.console.terminal import terminal_size
from horovod.launch.elastic.request import Supply
from horovod.launch.elastic.spares import tell_of_spares
from horovod.launch.observed import pages_of, tell_pages, traced
from horovod.launch.ssh.driver import Changed, Driver, Prepare, driven
from horovod.launch.ssh.remote_agent import (
    RemoteAgent,
    SshOptions,
    check_ssh,
    local_command,
    remote_command,
    working_directory,
)
from horovod.protos.v1 import jobs_pb2
from horovod.protos.v1.story_pb2 import StoryEntry
from horovod.rendezvous.hosts import HostSlots, remote
from horovod.worker.agent.bound import remove_leftovers
from horovod.worker.agent.output import Console
from horovod.worker.runtime.host import choose_interfaces, interfaces
from horovod.worker.runtime.tls import ClientTls

_AT_ONCE = 64  # connections of ssh that are being made at one time


class _Starting:
    """What signals act on while hosts are being connected to."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def stop(self, signum: int) -> None:
        self._task.cancel()

    def forward(self, signum: int) -> None:
        pass


class HostAgents:
    """`async with HostAgents(...) as agents:` has an agent on every host, or raises RuntimeError with a line for each
    host that has none."""

    def __init__(
        self,
        hosts: Sequence[HostSlots],
        order: Mapping[str, Any],
        ssh: SshOptions,
        python: str,
        environ: Mapping[str, str],
        start_timeout_s: float,
        note: Callable[[str], None],
        progress: Progress | None = None,
    ) -> None:
        """order: what every agent is told. note: gets what agents say on stderr, a line each."""
        self._progress = progress
        self._ready: set[str] = set()
        self._hosts = hosts
        self._order = order
        self._ssh = ssh
        self._remote_command = remote_command(python, environ)
        self._start_timeout_s = start_timeout_s
        self._note = note
        self._agents: list[RemoteAgent] = []
        self._has_local = False  # whether one of them is, or was, on this host
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> HostAgents:
        try:
            await self._start()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    async def _start(self) -> None:
        names = [host.name for host in self._hosts]
        elsewhere = set(remote(names))
        shown = self._progress.show_text(lambda: hosts_sentence(self._ready, names)) if self._progress else None
        showing = asyncio.create_task(shown) if shown is not None else None
        try:
            await self._bring_all_up(elsewhere)
        finally:
            if showing is not None:
                showing.cancel()
                await asyncio.wait([showing])

    async def _bring_all_up(self, elsewhere: Collection[str]) -> None:
        found = await asyncio.gather(
            *(self._bring_up(host, host.name in elsewhere, self._at_once) for host in self._hosts)
        )
        failed = [(host.name, why) for host, why in zip(self._hosts, found, strict=True) if isinstance(why, str)]
        if failed:
            lines = "".join(f"\n  {name}: {without_code(why)}." for name, why in failed)
            count = f"{len(failed)} of {len(self._hosts)} hosts" if len(self._hosts) > 1 else "the host"
            sentence = f"could not connect to some hosts via ssh: no agent on {count}, so nothing was run:{lines}"
            codes = {code_of(why) for _, why in failed}
            code = codes.pop() if len(codes) == 1 else None
            raise RuntimeError(coded(code or LaunchCode.NO_AGENT_ON_HOST, sentence))

    async def bring_up(self, host: HostSlots) -> RemoteAgent | str:
        """Starts an agent that registers under the host's name as it is given. Returns it, or why there is none, with a
        code.
        """
        is_remote = bool(await asyncio.to_thread(remote, [host.name]))
        try:
            found = await self._bring_up(host, is_remote, self._at_once, host.name)
        except OSError as error:
            program = "ssh" if is_remote else "its agent"
            return coded(LaunchCode.MISSING_PROGRAM, f"{program} can't be started here: {reason_of(error)}")
        if isinstance(found, str):  # it must not register later
            await asyncio.gather(*(self.let_go(agent) for agent in self._agents if agent.host == host.name))
        return found

    async def let_go(self, agent: RemoteAgent) -> None:
        """Has the agent end its ranks and leave, and waits for that."""
        agent.leave()
        await agent.left()
        if agent in self._agents:
            self._agents.remove(agent)

    async def _bring_up(
        self, host: HostSlots, is_remote: bool, at_once: asyncio.Semaphore, name: str = ""
    ) -> RemoteAgent | str:
        """Starts an agent and waits until it is registered. Returns it, or why there is none, with a code."""
        order = {**self._order, "name": name or shown_name(host.name), "slots": host.slots}
        command = self._ssh.command(host.name, self._remote_command) if is_remote else local_command()
        async with at_once:
            agent = await RemoteAgent.start(
                host.name, command, order, lambda line: self._note(f"{host.name}: {line}"), is_remote
            )
            self._agents.append(agent)
            self._has_local = self._has_local or not is_remote
            waits = [asyncio.create_task(agent.registered.wait()), asyncio.create_task(agent.ended.wait())]
            try:
                await asyncio.wait(waits, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if agent.registered.is_set():
                self._ready.add(host.name)
                return agent
            if agent.ended.is_set():
                return agent.why()
        why = f"its agent did not register within {self._start_timeout_s:g} s (--start-timeout gives it more)"
        return coded(LaunchCode.NO_AGENT_ON_HOST, why + (f"; it said: {agent.said[-1]}" if agent.said else ""))

    async def _leave(self) -> None:
        for agent in self._agents:
            agent.leave()
        await asyncio.gather(*(agent.left() for agent in self._agents))
        if self._has_local:  # one that was killed has left its folder; on other hosts the next agent deletes it
            await asyncio.to_thread(remove_leftovers)


def launch_on_hosts(
    args: argparse.Namespace, environ: Mapping[str, str], hosts: Sequence[HostSlots], python: str
) -> int:
    """Runs the job of a command line on these hosts, all of which get ranks; the exit code of the launcher.

    Without hosts, `args.supply` finds them.
    """
    settings = resolve(environ)
    working_directory()
    if hosts:
        check_ssh()
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
            SshOptions(args.ssh_port, args.ssh_identity_file, args.ssh_host_keys),
            python,
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
    ssh: SshOptions,
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
                everywhere(),
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
            "keepalive_timeout_s": limits.keepalive_timeout_s,
            "alone_s": limits.reattach_grace_s + limits.keepalive_timeout_s,
        }
        if certificate is not None:
            order |= {"ca": certificate.text(), "server_name": SERVER_NAME}
        tls = ClientTls(certificate.ca, server_name=SERVER_NAME) if certificate else None
        access = Access([f"127.0.0.1:{port}"], token, tls)

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
            async with HostAgents(hosts, order, ssh, python, environ, timeout_s, notes, Progress(console)) as agents:
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


def shown_name(name: str) -> str:
    """`localhost` says nothing to other hosts, nor to a later reader of a log."""
    return socket.gethostname() if name == "localhost" else name


def _addresses(settings: Settings, port: int) -> list[str]:
    """Where agents may find this host, the likeliest first."""
    wanted = settings.network_interfaces
    here = [one for one in interfaces() if one.is_loopback]
    outside = choose_interfaces(interfaces(), wanted) if wanted else choose_interfaces(interfaces())
    return [_with_port(address, port) for address in _unique([*outside, *here])]


def _unique(found: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(address for one in found for address in one.addresses))


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
