"""The hosts of an elastic job that come and go while it runs: agents are started on those that come, and leave others.

    a look at the hosts        every second, or when one was lost; what it means is decided in core/elastic/hosts.py
    a host came                an agent is started there, and the scheduler lets the job grow onto it
    a host went                its ranks leave at their next commit, and then its agent; the job goes on without it
    a host has other slots     its agent is told, and the job grows there, or its last ranks there leave
    a host was lost, or a      its agent ends its ranks and leaves, and the host is set aside: for good, or until its
    process failed on it       cooldown is over
    too often                  the job ends: each look that changes what runs is one reset

Which process runs where is the scheduler's business (Policy.supplied_hosts): the driver reads in the job's record which
hosts it has lost.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from horovod.base.errors import STATE_LOST_EXIT, ClusterCode, LaunchCode, code_of, coded, without_code
from horovod.base.tasks import end_tasks
from horovod.base.words import plural, shortened
from horovod.coordinator.core.elastic import hosts as core
from horovod.coordinator.core.elastic.decision import limit_in_words
from horovod.coordinator.core.elastic.hosts import Cooldown
from horovod.launch.console.report import Progress
from horovod.launch.elastic.discovering import Discovering
from horovod.launch.elastic.request import Supply
from horovod.launch.elastic.times import period_s
from horovod.protos.v1 import jobs_pb2
from horovod.rendezvous.hosts import HostSlots
from horovod.worker.agent.output import Console

Changed = Callable[[jobs_pb2.JobRecord], None]

_ATTEMPTS = 5  # to reach a host that was found: it may still be starting
_PASSING = (LaunchCode.UNKNOWN_HOST, LaunchCode.NO_AGENT_ON_HOST)  # may be otherwise at the next attempt
_LOOK_S = 1.0  # between two looks whether there is enough, where there are no news
_FIRST_DELAY_S = 1.0  # between attempts; doubles
_SHOWN_HOSTS = 4


class SuppliedAgent(Protocol):
    """The agent of one host: hosts/agents.py has one, ray/elastic_workers.py another."""

    ended: asyncio.Event  # set when it is gone by itself

    def set_slots(self, slots: int) -> None: ...
    def why(self) -> str: ...


AnyAgent = TypeVar("AnyAgent", bound=SuppliedAgent)


class Agents(Protocol[AnyAgent]):
    """What starts agents on hosts, and has them leave: all that differs between launchers."""

    async def bring_up(self, host: HostSlots) -> AnyAgent | str: ...
    async def let_go(self, agent: AnyAgent) -> None: ...


class Stoppable(Protocol):
    """The job as its launcher sees it: FollowedJob."""

    def stop(self, signum: int) -> None: ...


Prepare = Callable[[Any], None]  # called with a Stoppable


@dataclass
class _Host(Generic[AnyAgent]):
    """A host on which an agent runs, or is about to. The task ends when the host has none any more."""

    slots: int
    task: asyncio.Task[None] = field(init=False)
    agent: AnyAgent | None = None  # once it is registered
    attempts: int = 0
    wanted: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is not wanted any more
    emptied: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is not wanted and the job has left it

    @property
    def is_up(self) -> bool:
        return self.agent is not None


class Driver(Generic[AnyAgent]):
    """Of one job. `gather` until there is enough to begin, then `run` until it is cancelled."""

    def __init__(
        self,
        supply: Supply,
        agents: Agents[AnyAgent],
        num_proc: int,
        most: int | None,
        timeout_s: float,
        tell: Callable[[str], None],
        timeout_name: str = "--elastic-timeout",
    ) -> None:
        """num_proc, most: processes at the start, and at most. timeout_s: until there are enough hosts to begin.

        tell: gets each sentence for the user. timeout_name: how the user calls the timeout.
        """
        cooldown = Cooldown(*supply.cooldown_range) if supply.cooldown_range else None
        self.verdict = ""  # why the driver has ended the job, with a code
        self._supply = supply
        self._agents = agents
        self._num_proc = num_proc
        self._most = most
        self._timeout_s, self._timeout_name = timeout_s, timeout_name
        self._tell = tell
        self._discovering = Discovering(supply.source, tell)
        self._known = core.Hosts(cooldown)
        self._hosts: dict[str, _Host[AnyAgent]] = {}
        self._record = jobs_pb2.JobRecord()
        self._lost: set[str] = set()  # hosts of which the record says that the job has lost them
        self._let_go: set[str] = set()  # those of which that is no fault
        self._why: dict[str, str] = {}  # hosts that were set aside
        self._resets = 0
        self._news = asyncio.Event()  # a host was set aside, or an agent has come or is gone
        self._asking: asyncio.Task[None] | None = None
        self._stop: Callable[[int], None] = lambda signum: None

    # -- the start -----------------------------------------------------------------------------------------------------

    async def gather(self) -> list[HostSlots]:
        """The hosts with which the job begins, in their order. RuntimeError or ValueError where there are too few."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + self._timeout_s
        self._look(found := await self._discovering.first())
        if not found:
            self._tell(f"No host is found yet; {self._timeout_name} lets the job wait for {self._timeout_s:g} s.")
        self._asking = asyncio.create_task(self._ask())  # beside this: hosts may be ready while no answer comes
        while not self._is_enough():
            if self._asking.done():
                self._asking.result()
            if why := core.ending(self._known):
                lines = "".join(f"\n  {name}: {self._why[name]}." for name in self._known.aside)
                raise RuntimeError(coded(code_of(why) or LaunchCode.NO_AGENT_ON_HOST, f"{without_code(why)}{lines}"))
            if loop.time() >= give_up_at_s:
                raise RuntimeError(coded(LaunchCode.DISCOVERY_FAILED, self._too_few()))
            await self._wait(_LOOK_S)
        return [HostSlots(name, one.slots) for name in self._known.usable if (one := self._hosts[name]).is_up]

    def waiting(self) -> str | None:
        """What `gather` waits for; None when there is enough."""
        if self._is_enough():
            return None
        there = self._slots_up()
        coming = [name for name, one in self._hosts.items() if not one.is_up]
        words = f"; waiting for {shortened(coming, _SHOWN_HOSTS)}" if coming else "; waiting for more hosts"
        return f"{there} of {plural(self._num_proc, 'slot')} are there{words}"

    def _is_enough(self) -> bool:
        """Hosts that are tried for the first time are waited for: the first world is to have them."""
        return self._slots_up() >= self._num_proc and all(one.is_up or one.attempts for one in self._hosts.values())

    @property
    def slots(self) -> int:
        """Those of all hosts that the job may use. Any thread."""
        return sum(self._known.usable.values())

    @property
    def aside(self) -> Collection[str]:
        """The hosts that the job may not use for now. Any thread."""
        return list(self._known.aside)

    def _slots_up(self) -> int:
        return sum(one.slots for one in self._hosts.values() if one.is_up and not one.wanted.is_set())

    def _too_few(self) -> str:
        found = shortened([f"{name}:{slots}" for name, slots in self._known.usable.items()], _SHOWN_HOSTS) or "none"
        return (
            f"The job needs {plural(self._num_proc, 'slot')} to begin, but only {self._slots_up()} are "
            f"available after {self._timeout_s:g} s (hosts: {found}). Raise {self._timeout_name} to wait "
            "longer."
        )

    # -- while the job runs --------------------------------------------------------------------------------------------

    def follow(self, stop: Callable[[int], None]) -> None:
        """stop: ends the job, by a signal."""
        self._stop = stop

    async def run(self) -> None:
        """Follows the hosts until it is cancelled, or the driver has ended the job. Call it after `gather`."""
        assert self._asking is not None
        await self._asking

    def changed(self, record: jobs_pb2.JobRecord) -> None:
        """The job's record is another one."""
        self._record = record
        for name in self._hosts.keys() - self._used():
            self._hosts[name].emptied.set()
        lost = {one.agent for one in record.hosts_aside if not one.until}
        for name in sorted(lost - self._lost):
            if name not in self._let_go:
                self._set_aside(name, "a process failed there, or all of it was lost")
        self._lost = lost

    def _used(self) -> set[str]:
        """The hosts on which the job has processes."""
        return {share.agent for share in self._record.shares if share.slots}

    def judged(self, record: jobs_pb2.JobRecord) -> jobs_pb2.JobRecord:
        """The record of the job that is over, with the driver's own verdict if there is one."""
        if self.verdict:
            record.state = jobs_pb2.JOB_STATE_FAILED
            record.exit_code = STATE_LOST_EXIT if record.exit_code == STATE_LOST_EXIT else 1
            record.sentence = self.verdict
        return record

    async def close(self) -> None:
        """Starts no further agent. The owner of `agents` ends those that run."""
        self._discovering.stop()
        await end_tasks([*(one.task for one in self._hosts.values()), *([self._asking] if self._asking else [])])

    # -- hosts ---------------------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        while not self.verdict:
            await asyncio.sleep(period_s())
            self._look(await self._discovering.ask())

    async def _wait(self, timeout_s: float) -> None:
        """Waits for news, but not for longer."""
        await _first(self._news, timeout_s=timeout_s)
        self._news.clear()

    def _look(self, found: dict[str, int] | None) -> None:
        """Takes in the hosts that were found (None: the source has failed), and starts and ends agents accordingly."""
        before = self._known
        self._known, change, sentence = core.look(asyncio.get_running_loop().time(), before, found)
        if sentence:
            self._tell(sentence)
        used = self._used()
        if used and not self._stays() and change.fewer:
            names = shortened(sorted(used), _SHOWN_HOSTS)
            why = f"None of the hosts on which the job runs ({names}) is found any more, so nothing is left of it."
            self._end(coded(ClusterCode.TOO_FEW_PROCESSES, why))
        elif self._matters(before):
            self._reset()
        self._go_on()

    def _stays(self) -> set[str]:
        """The hosts on which the job has processes that are not told to leave."""
        leaving = {name for name, one in self._hosts.items() if one.wanted.is_set()}
        return self._used() & self._known.usable.keys() - leaving

    def _matters(self, before: core.Hosts) -> bool:
        """Whether the change makes the job another one: slots went on which it runs, or came of which it has use."""
        now, was = self._known.usable, before.usable
        slots = sum(len(share.slots) for share in self._record.shares)
        fewer = {name for name in was if now.get(name, 0) < was[name]}
        more = {name for name in now if now[name] > was.get(name, 0)}
        is_short = self._most is None or slots < self._most
        return bool(slots) and bool(fewer & self._used() or (more and is_short))

    def _set_aside(self, name: str, why: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._known, sentence = core.set_aside(now_s, self._known, name, random.random(), why)
        if not sentence:
            return
        self._tell(sentence)
        self._why[name] = why
        self._news.set()
        why = core.ending(self._known)
        if not why and self._used() and not self._stays():
            why = coded(ClusterCode.TOO_FEW_PROCESSES, "The job leaves all other hosts, so nothing is left of it.")
        if why:
            last = without_code(self._record.sentence)
            self._end(f"{last} {why}" if last else why)
        elif self._record.id:
            self._reset()
        self._go_on()

    def _reset(self) -> None:
        self._resets += 1
        limit = self._supply.reset_limit
        if limit is not None and self._resets > limit:
            self._end(coded(LaunchCode.RESET_LIMIT, f"{limit_in_words(limit)}."))

    def _end(self, verdict: str) -> None:
        """Ends the job. Before it has begun, `gather` does."""
        if self._record.id and not self.verdict:
            self.verdict = verdict
            self._stop(signal.SIGTERM)

    def _go_on(self) -> None:
        """Starts agents, and has others leave, so that each usable host has one and no other host does."""
        usable = self._known.usable
        for name, one in self._hosts.items():
            if name not in usable and not one.wanted.is_set():
                one.wanted.set()
                self._let_go.add(name)
        if self.verdict:
            return
        for name, slots in usable.items():
            if (known := self._hosts.get(name)) is None:
                new: _Host[AnyAgent] = _Host(slots)
                self._hosts[name] = new
                new.task = asyncio.create_task(self._serve(name, new))
            elif known.agent is not None and known.slots != slots and not known.wanted.is_set():
                known.slots = slots
                known.agent.set_slots(slots)

    async def _serve(self, name: str, host: _Host[AnyAgent]) -> None:
        """Has an agent on the host for as long as it is wanted."""
        try:
            agent = await self._bring_up(name, host)
            if agent is None:
                return
            host.agent = agent
            if not host.wanted.is_set():
                self._let_go.discard(name)
            self._news.set()
            self._go_on()  # it may have other slots meanwhile
            if await _first(host.wanted, agent.ended) is agent.ended and not host.wanted.is_set():
                self._let_go.add(name)
                self._set_aside(name, f"it is lost: {without_code(agent.why())}")
            elif name not in self._known.aside:
                host.emptied.clear()
                agent.set_slots(0)  # the job's ranks there leave; those that do not are ended after a grace
                if name in self._used():
                    await _first(host.emptied, agent.ended)
            await self._agents.let_go(agent)
        finally:
            del self._hosts[name]
            self._news.set()
        self._go_on()  # the host may have come back meanwhile

    async def _bring_up(self, name: str, host: _Host[AnyAgent]) -> AnyAgent | None:
        delay_s = _FIRST_DELAY_S
        while not host.wanted.is_set():
            found = await self._agents.bring_up(HostSlots(name, host.slots))
            if not isinstance(found, str):
                return found
            host.attempts += 1
            self._news.set()
            if host.attempts == _ATTEMPTS or code_of(found) not in _PASSING:
                self._set_aside(name, without_code(found))
                return None
            if host.attempts == 1:
                self._tell(f"Host {name} can't be used yet: {without_code(found)}. It is tried again.")
            await _first(host.wanted, timeout_s=delay_s)
            delay_s *= 2
        return None


async def driven(
    driver: Driver[Any],
    spec: jobs_pb2.JobSpec,
    console: Console | None,
    changed: Changed,
    prepare: Prepare,
    follow: Callable[[Changed, Prepare], Coroutine[Any, Any, jobs_pb2.JobRecord]],
) -> jobs_pb2.JobRecord:
    """Runs the job on the hosts that the driver finds, and returns its record. RuntimeError where it can't begin.

    console: shows what the driver waits for. follow: submits the job and follows it, with what is to be called with
    each record, and with the job.
    """

    def both(record: jobs_pb2.JobRecord) -> None:
        driver.changed(record)
        changed(record)

    def prepared(job: Stoppable) -> None:
        driver.follow(job.stop)
        prepare(job)

    tasks: list[asyncio.Task[Any]] = []
    try:
        if console is not None:
            tasks.append(asyncio.create_task(Progress(console).show_text(driver.waiting)))
        hosts = await driver.gather()
        await end_tasks(tasks)
        for host in hosts:
            spec.hosts.add(name=host.name, slots=host.slots)
        tasks = [following := asyncio.create_task(follow(both, prepared)), asyncio.create_task(driver.run())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            await tasks[1]  # it has ended the job, or raises the error of a bug
        return driver.judged(await following)
    finally:
        await end_tasks(tasks)
        await driver.close()


async def _first(*events: asyncio.Event, timeout_s: float | None = None) -> asyncio.Event | None:
    """Waits until one of these events is set; the first of them that is, None after the timeout."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return next((event for event in events if event.is_set()), None)
