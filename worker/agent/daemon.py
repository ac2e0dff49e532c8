"""The agent of one host: registers what the host has, starts what it is told, reports what becomes of it.

The agent holds no state that a later agent could not find again. Ranks are children of shims (shim.py), the folder of a
job holds the ranks' output and exit codes, and a coordinator learns all of it when the agent registers. So the agent
may be killed or updated, and the coordinator may change, while jobs run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import logging
import os
import secrets
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod.base.errors import ClusterCode, coded, coded_like, without_code
from horovod.base.processes import process_namespace
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.base.setting import split_address, split_ports
from horovod.base.tasks import end_tasks
from horovod.base.tokens import make_private
from horovod.base.words import reason_of, release_in_words
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import membership_pb2
from horovod.worker.agent.code import CodeCache
from horovod.worker.agent.coordinator_stream import CoordinatorStream
from horovod.worker.agent.environment import Workspaces, lines_of, slots_of, workers_of
from horovod.worker.agent.feed import Feed
from horovod.worker.agent.log import LIMIT_BYTES
from horovod.worker.agent.orders import ends_job, order_of
from horovod.worker.agent.reach import ProbePort, probe
from horovod.worker.agent.relay import Relay
from horovod.worker.agent.shim import HOST_ERRORS, Order, bytes_in, free_bytes, needed_bytes
from horovod.worker.agent.shim_job import READER_GRACE_S, ShimJob
from horovod.worker.agent.supervisor import Slot
from horovod.worker.runtime.coordinators import pings
from horovod.worker.runtime.host import choose_interfaces, interfaces, is_loopback
from horovod.worker.runtime.tls import ClientTls

KEPT_JOBS = 100  # how many folders of jobs that are over are kept
KEPT_BYTES = 10 << 30  # how much those folders may hold
ROOM_LOOK_S = 5.0  # between two looks at the free space of the disk
DRAIN_S = 30.0  # what most providers give notice for, or more
FAREWELL_S = 10.0  # how long a leaving agent waits until the last reports are recorded and the last output is read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """What an agent offers to a coordinator, and its limits."""

    name: str
    slots: int
    state: Path
    gpus: Sequence[str] = ()
    cpus: float = 1.0
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    network_interfaces: tuple[str, ...] = ()
    ports: str = ""  # HOROVOD_PORTS
    log_limit_bytes: int = LIMIT_BYTES
    orphan_grace_s: float = 60.0  # how long ranks may run without an agent
    reader_grace_s: float = READER_GRACE_S
    drain_s: float = DRAIN_S  # how long ranks of elastic jobs may take to leave when the agent drains


@dataclass
class _Starting:
    """A share that has no shim yet, and the commands that wait for the shim."""

    share: int
    commands: list[dict[str, Any]] = field(default_factory=list)


class Daemon:
    """The agent. Make it in an event loop, then call `run` once."""

    def __init__(
        self,
        host: Host,
        addresses: Sequence[str],
        token: str | None,
        version: str,
        environ: Mapping[str, str],
        tls: ClientTls | None = None,
        keepalive_timeout_s: float = 20.0,
    ) -> None:
        self.host = host
        self._version = version
        self._environ = environ
        self._instance = secrets.token_hex(8)
        self._jobs: dict[str, ShimJob] = {}
        self._feeds: dict[int, tuple[Feed, asyncio.Task[None]]] = {}  # by the number of the reader
        self._early: dict[int, pb.ReadLog] = {}  # requests for logs of jobs that are about to be started, by reader
        self._tasks: set[asyncio.Task[None]] = set()
        self._probing: set[asyncio.Task[None]] = (
            set()
        )  # tasks in which this agent probes other hosts for its coordinator
        self._starting: dict[str, _Starting] = {}  # by job
        self._unstarted: dict[
            str, pb.JobReport
        ] = {}  # reports of jobs that could not be started, until the coordinator has recorded them
        self._unfit = ""  # what the coordinator was last told: why no job could be started here now, or ""
        self._probes = ProbePort(host.name, split_ports(host.ports) or ())
        self._relay = Relay(host.state, tls)
        calls = (self._register, self._obey, self._lost_coordinator)
        connection = functools.partial(self._relay.connection, pings(len(addresses), keepalive_timeout_s))
        self._stream = CoordinatorStream(addresses, token, *calls, connection, tls is not None)
        self._workspaces = Workspaces(host.state)
        self._code = CodeCache(host.state, self._stream.get_code)
        self._draining = False
        self._last_signal = 0  # with which all ranks were told to end
        self._leaving = asyncio.Event()  # set when every job has ended, or when all of them are to be ended
        self._idle = asyncio.Event()

    async def run(self) -> str:
        """Serves until the agent is told to leave. Returns the sentence why it had to give up, or "".

        OSError or ValueError when it can't begin to serve.
        """
        make_private(self.host.state)
        with _only_one(self.host.state):
            await self._adopt()
            await self._probes.start()
            await self._relay.start()
            serving = asyncio.create_task(self._stream.run())
            leaving = asyncio.create_task(self._leave())
            self._spawn(self._watch_room())
            try:
                await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
                return serving.result() if serving.done() else ""
            finally:
                await end_tasks((serving, leaving, *self._tasks, *(task for _, task in self._feeds.values())))
                self._probes.close()
                await self._relay.close()
                for shim_job in self._jobs.values():
                    shim_job.close()

    @property
    def registered(self) -> asyncio.Event:  # set while this agent is registered with a coordinator
        return self._stream.registered

    def drain(self) -> None:
        """Takes no more jobs and leaves when those that run have ended. Elastic jobs go on without this host."""
        if not self._draining:
            log.warning(
                "Draining: this host takes no new jobs, and this agent exits when its running jobs end. Ranks of "
                "elastic jobs leave now."
            )
            self._draining = True
            self._stream.send(drain=pb.Drain())
            for job in [*self._jobs, *self._starting]:
                self._tell(job, drain=self.host.drain_s)
            self._leaving.set()

    def set_slots(self, slots: int) -> None:
        """This host has so many slots from now on. Where jobs have more, those whose size may change give them back."""
        self.host = dataclasses.replace(self.host, slots=slots)
        self._stream.send(slots=pb.Slots(slots=slots))

    def end_all(self, signum: int = signal.SIGTERM) -> None:
        """Ends every rank and then leaves."""
        self._draining, self._last_signal = True, signum
        for job in [*self._jobs, *self._starting]:
            self._tell(job, signal=signum, stop=True)
        self._leaving.set()

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _register(self, address: str) -> pb.Register:
        host = self.host
        on_loopback = is_loopback(split_address(address, "coordinator")[0])
        found = choose_interfaces(interfaces(), host.network_interfaces, coordinator_on_loopback=on_loopback)
        register = pb.Register(
            protocol_version=PROTOCOL_VERSION,
            version=self._version,
            name=host.name,
            instance=self._instance,
            slots=host.slots,
            gpus=host.gpus,
            cpus=host.cpus,
            memory_bytes=host.memory_bytes,
            labels=host.labels,
            interfaces=[
                membership_pb2.Interface(address=text, name=one.name) for one in found for text in one.addresses
            ],
            probe_port=self._probes.port,
            process_namespace=process_namespace(),
            draining=self._draining,
            unfit=self._unfit,
            orphan_grace_seconds=host.orphan_grace_s,
        )
        for shim_job in self._jobs.values():
            if not shim_job.recorded.is_set():
                register.jobs.append(shim_job.report())
        for job, starting in self._starting.items():
            register.jobs.add(job=job, share=starting.share)
        register.jobs.extend(self._unstarted.values())
        return register

    def _obey(self, command: pb.AgentCommand) -> None:
        if command.HasField("registered"):
            self._probes.secret = command.registered.probe_secret
            if (version := command.registered.version) != self._version:
                log.info("The coordinator has %s, this agent %s.", release_in_words(version), self._version)
            log.info("Registered with the coordinator at %s.", self._stream.address)
        elif command.HasField("start"):
            self._start_share(command.start)
        elif (order := order_of(command)) is not None:
            self._tell(order[0], **order[1])
        elif command.HasField("forget"):
            forget = command.forget
            if (report := self._unstarted.get(forget.job)) is not None and report.share == forget.share:
                del self._unstarted[forget.job]
            shim_job = self._jobs.get(forget.job)
            if shim_job is not None and shim_job.share == forget.share:
                shim_job.record()
                if shim_job.host_fault:  # nothing was started or printed, and the job may be given to this host again
                    shim_job.remove()
                    del self._jobs[shim_job.job]
                self._clear_old()
                self._look_idle()
        elif command.HasField("read"):
            self._read_log(command.read)
        elif command.HasField("taken"):
            if found := self._feeds.get(command.taken.reader):
                found[0].taken(command.taken.taken)
        elif command.HasField("close"):
            self._close_feed(command.close.reader, command.close.release)
        elif command.HasField("probe"):
            task = self._spawn(self._probe(command.probe))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    def _lost_coordinator(self) -> None:
        # The next coordinator has another secret and must not take the results of these probes for those of its own.
        self._probes.secret = b""
        for task in self._probing:
            task.cancel()
        for reader in [*self._feeds, *self._early]:
            self._close_feed(reader, for_good=False)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _start_share(self, start: pb.StartShare) -> None:
        shim_job = self._jobs.get(start.job)
        if shim_job is not None and shim_job.share >= start.share:
            self._stream.send(report=shim_job.report())
            if start.replaces_failed and not shim_job.over.is_set():
                self._spawn(self._start_later(shim_job, start))
        elif start.job not in self._starting:
            self._unstarted.pop(start.job, None)
            last = {"signal": self._last_signal, "stop": True} if self._last_signal else {"drain": self.host.drain_s}
            self._starting[start.job] = _Starting(start.share, [last] if self._draining else [])
            self._spawn(self._start(start))

    async def _start(self, start: pb.StartShare) -> None:
        host_fault = False
        if (earlier := self._jobs.pop(start.job, None)) is not None:
            await self._end_earlier(earlier)
        try:
            lines = await self._lines(start)
            grace_s, replaces = self.host.orphan_grace_s, start.replaces_failed
            order = Order(lines, start.hold, self.host.log_limit_bytes, grace_s, replaces, start.elastic)
            jobs, grace_s = self.host.state / "jobs", self.host.reader_grace_s
            self._make_room(needed_bytes(len(order.ranks)))
            host_fault = True  # an error after this line would also come with any other job
            shim_job = await ShimJob.start(start.job, jobs, order, self._on_change, grace_s, start.share)
        except (OSError, ValueError) as error:
            text = reason_of(error) if isinstance(error, OSError) else str(error)
            file = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
            host_fault = host_fault or (isinstance(error, OSError) and error.errno in HOST_ERRORS)
            del self._starting[start.job]
            report = pb.JobReport(job=start.job, over=True, host_fault=host_fault, share=start.share)
            report.error = coded_like(text, f"host {self.host.name} can't start it: {without_code(text)}{file}")
            self._unstarted[start.job] = report
            self._stream.send(report=report)
            self._look_for_room()
            self._read_early(start.job)
            self._look_idle()
            await self._workspaces.remove(start.job)
            return
        self._jobs[start.job] = shim_job
        for command in self._starting.pop(start.job).commands:
            shim_job.tell(**command)
        self._read_early(start.job)
        self._on_change(shim_job)

    async def _end_earlier(self, shim_job: ShimJob) -> None:
        """Ends the processes of an earlier share of this host, which the job has lost, and deletes its output."""
        shim_job.tell(signal=signal.SIGTERM, stop=True)
        await shim_job.over.wait()
        for reader in [reader for reader, (feed, _) in self._feeds.items() if feed.shim_job is shim_job]:
            self._close_feed(reader, for_good=True)
        shim_job.close()
        shim_job.remove()
        await self._workspaces.remove(shim_job.job)

    async def _start_later(self, shim_job: ShimJob, start: pb.StartShare) -> None:
        """Starts what the job lacks of the ranks that it is to have: none where the order is repeated."""
        await shim_job.heard.wait()
        if shim_job.over.is_set() or all(shim_job.has(one.rank, one.incarnation or 1) for one in start.ranks):
            return
        try:
            shim_job.start_later([slot for line in await self._lines(start) for slot in line])
        except (OSError, ValueError) as error:  # what could be started before can't be any more
            text = reason_of(error) if isinstance(error, OSError) else str(error)
            shim_job.tell(end=True, error=f"host {self.host.name} can't start another process of it: {text}")

    async def _lines(self, start: pb.StartShare) -> list[list[Slot]]:
        """The processes of each line. Runs in a thread, as it may ask the GPU driver, which is slow."""
        own = self._environ
        told: dict[str, Any] = {"coordinator": self._stream.coordinators, "host": self.host.name, "relay": self._relay}
        if not start.lines:
            return [await asyncio.to_thread(slots_of, start, own, **told)]
        if start.replaces_failed:  # each process has a folder of its own, also in the place of another one
            names = [f"worker.{one.rank}.{one.incarnation or 1}" for one in start.ranks]
            folders, new = await asyncio.to_thread(self._workspaces.add, start.job, names)
        else:
            folders = new = await asyncio.to_thread(self._workspaces.make, start.job, len(workers_of(start)))
        if start.code.sha256:
            told_to_end = self._starting[start.job].commands if start.job in self._starting else []
            wanted = lambda: not any(map(ends_job, told_to_end))  # noqa: E731
            await self._code.unpack(start.code.sha256, start.code.size, new, wanted)
        return await asyncio.to_thread(lines_of, start, own, folders, **told)

    def _tell(self, job: str, **command: Any) -> None:
        if job in self._starting:
            self._starting[job].commands.append(command)
        elif shim_job := self._jobs.get(job):
            shim_job.tell(**command)

    async def _adopt(self) -> None:
        folder = self.host.state / "jobs"
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
            shim_job = await ShimJob.adopt(path, self._on_change, self.host.reader_grace_s)
            if (other := self._jobs.get(shim_job.job)) is not None:  # one was deleted in part
                earlier, shim_job = sorted((other, shim_job), key=lambda one: one.share)
                earlier.close()
            self._jobs[shim_job.job] = shim_job
            if shim_job.running:
                log.warning("Job %s runs on: its ranks were found again.", shim_job.job)
        self._code.clear()
        self._workspaces.clear([one.job for one in self._jobs.values() if not one.over.is_set()])
        self._clear_old()

    def _on_change(self, shim_job: ShimJob) -> None:
        if self._jobs.get(shim_job.job) is shim_job:  # not while it starts
            self._stream.send(report=shim_job.report())
            if shim_job.host_fault:
                self._look_for_room()
            if shim_job.over.is_set():
                self._spawn(self._workspaces.remove(shim_job.job))
            self._look_idle()

    async def _leave(self) -> None:
        await self._leaving.wait()
        self._look_idle()
        await self._idle.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._last_words(), FAREWELL_S)

    def _look_idle(self) -> None:
        if self._draining and not self._starting and all(one.over.is_set() for one in self._jobs.values()):
            self._idle.set()

    async def _last_words(self) -> None:
        await asyncio.gather(*(one.recorded.wait() for one in self._jobs.values()))
        while self._feeds:
            await asyncio.wait({task for _, task in self._feeds.values()})

    def _clear_old(self, wanted_bytes: int = 0) -> None:
        """Deletes folders of jobs that are over and recorded, the oldest first, as far as the limits ask for it.

        wanted_bytes: how much of the disk is to be free afterwards, if deleting can achieve that. Folders that somebody
        reads now are then kept, and those that a reader has left, and may come back to, go last.
        """
        read = {feed.shim_job.job for feed, _ in self._feeds.values()}
        over = [one for one in self._jobs.values() if one.recorded.is_set() and one.over.is_set()]
        if wanted_bytes:
            over = sorted((one for one in over if one.job not in read), key=lambda one: one.held)
        sizes = {one.job: bytes_in(one.folder) for one in over}
        total, count = sum(sizes.values()), len(over)
        for shim_job in over:
            is_much = count > KEPT_JOBS or total > KEPT_BYTES
            if not is_much and free_bytes(self.host.state) >= wanted_bytes:
                break
            total, count = total - sizes[shim_job.job], count - 1
            shim_job.remove()
            del self._jobs[shim_job.job]

    def _make_room(self, wanted_bytes: int) -> None:
        """Deletes old folders where the disk is short of room, and only there: to measure many folders takes long."""
        if free_bytes(self.host.state) < wanted_bytes:
            self._clear_old(wanted_bytes)

    def _look_for_room(self) -> None:
        """Tells the coordinator when no job could be started here, and when one could again."""
        running = sum(one.running for one in self._jobs.values())
        needed = needed_bytes(max(0, self.host.slots - running))
        self._make_room(needed_bytes(self.host.slots))
        free = free_bytes(self.host.state)
        unfit = ""
        if free < needed:
            unfit = f"the disk of {self.host.state} has {free >> 20} MB left, and logs need {needed >> 20} MB"
        if bool(unfit) != bool(self._unfit):
            self._unfit = unfit
            self._stream.send(fitness=pb.Fitness(unfit=unfit))

    async def _watch_room(self) -> None:
        while True:
            self._look_for_room()
            await asyncio.sleep(ROOM_LOOK_S)

    # -- output and probes ---------------------------------------------------------------------------------------------

    def _read_early(self, job: str) -> None:
        for request in [one for one in self._early.values() if one.job == job]:
            del self._early[request.reader]
            self._read_log(request)

    def _read_log(self, request: pb.ReadLog) -> None:
        shim_job = self._jobs.get(request.job)
        if request.job in self._starting:
            self._early[request.reader] = request
            return
        if shim_job is None:
            self._stream.send(log_end=pb.LogEnd(reader=request.reader))
            return
        feed = Feed(request, shim_job, self._stream.send)
        if feed.holds:
            shim_job.held_by_reader({one.rank: one.position for one in getattr(request, "from")})
        task = asyncio.create_task(feed.run())
        self._feeds[request.reader] = (feed, task)
        task.add_done_callback(lambda task: self._feed_ended(request.reader, task))

    def _feed_ended(self, reader: int, task: asyncio.Task[None]) -> None:
        if found := self._feeds.pop(reader, None):
            self._left(found[0], for_good=False)
        if not task.cancelled() and (error := task.exception()):
            log.error("A bug of the agent: output could not be sent: %s", error, exc_info=error)

    def _close_feed(self, reader: int, for_good: bool) -> None:
        self._early.pop(reader, None)
        if found := self._feeds.pop(reader, None):
            feed, task = found
            task.cancel()
            self._left(feed, for_good)

    def _left(self, feed: Feed, for_good: bool) -> None:
        if feed.holds and not any(other.holds and other.shim_job is feed.shim_job for other, _ in self._feeds.values()):
            feed.shim_job.left_by_reader(for_good)

    async def _probe(self, request: pb.ProbeTargets) -> None:
        reached = await probe(request.targets, self._probes.secret, request.timeout_seconds)
        self._stream.send(reached=pb.Reached(probe=request.probe, targets=reached))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("A bug of the agent: %s", error, exc_info=error)


@contextlib.contextmanager
def _only_one(state: Path) -> Iterator[None]:
    """Locks the state while this process lives: a second agent with the same state would adopt the same jobs."""
    descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sentence = (
                f"Another agent uses {str(state)!r}. Several agents on one host need names of their own (--name) or "
                "folders of their own (--state-dir)."
            )
            raise ValueError(coded(ClusterCode.AGENT_RUNS_ALREADY, sentence)) from None
        yield
    finally:
        os.close(descriptor)
