"""The agents of the launcher's own machine, in its process: they register with its own coordinator's scheduler.

There is one for each name under which the job has ranks here, as there would be for so many hosts. The processes of all
of them belong to one supervisor. Every decision is the scheduler's, as with agents on other hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence

from horovod.base.protocol import PROTOCOL_VERSION, __version__
from horovod.base.words import reason_of
from horovod.coordinator.in_process import InProcessScheduler
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2
from horovod.worker.agent.orders import obey, order_of
from horovod.worker.agent.supervisor import Slot, Supervisor

Shares = Mapping[str, pb.StartShare]  # by name


class OwnMachine:
    """`run` once, in the launcher's event loop; `stop` and `forward` are for its signals."""

    def __init__(
        self,
        scheduler: InProcessScheduler,
        supervisor: Supervisor,
        hosts: Sequence[str],
        slots_of: Callable[[Shares], Sequence[Slot]],
    ) -> None:
        """hosts: of every rank. slots_of: what to start, once the scheduler has told; may raise ValueError."""
        self.stopping = False  # whether `stop` was called
        self._scheduler = scheduler
        self._supervisor = supervisor
        self._names = {name: hosts.count(name) for name in dict.fromkeys(hosts)}
        self._slots_of = slots_of
        self._shares: dict[str, pb.StartShare] = {}
        self._job = ""
        self._running: asyncio.Task[None] | None = None
        self._starting: set[asyncio.Task[None]] = set()  # of processes in the place of others
        self._error: Exception | None = None  # why the ranks could not be started
        self._telling = False

    async def run(
        self,
        spec: jobs_pb2.JobSpec,
        job_id: str,
        changed: Callable[[jobs_pb2.JobRecord], None] = lambda record: None,
    ) -> jobs_pb2.JobRecord:
        """Runs the job, and returns its record when no process of it is left. changed: called with each new record.

        OSError or ValueError when it can't be started.
        """
        self._job = job_id
        self._supervisor.changed = self._tell_soon
        for name, slots in self._names.items():
            spec.hosts.add(name=name, slots=slots)
        instance = secrets.token_hex(8)
        try:
            await self._scheduler.attach([self._register(name, instance) for name in self._names], self._obey)
            record = await self._scheduler.run(spec, job_id, changed)
        finally:
            for task in (*self._starting, *([self._running] if self._running is not None else ())):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._error is not None:
            raise self._error
        return record

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """The job is to end; each further call makes it end sooner."""
        self.stopping = True
        self._scheduler.stop(signum)

    def forward(self, signum: int) -> None:
        """Passes `signum` on to every rank, before this returns: with Ctrl-Z this process is stopped next."""
        self._supervisor.forward(signum)

    # -- the agents ----------------------------------------------------------------------------------------------------

    def _register(self, name: str, instance: str) -> pb.Register:
        register = pb.Register(
            protocol_version=PROTOCOL_VERSION,
            version=__version__,
            name=name,
            instance=instance,
            slots=self._names[name],
        )
        register.interfaces.add(name="lo", address="127.0.0.1")
        return register

    def _obey(self, name: str, command: pb.AgentCommand) -> None:
        if command.HasField("start"):
            self._shares[name] = command.start
            if self._running is not None:
                self._starting.add(task := asyncio.create_task(self._start_later()))
                task.add_done_callback(self._starting.discard)
            elif sum(len(share.ranks) for share in self._shares.values()) >= command.start.size:  # with spare ones
                self._running = asyncio.create_task(self._supervise())
        elif command.HasField("probe"):  # all names are this machine
            reached = pb.Reached(probe=command.probe.probe, targets=command.probe.targets)
            self._scheduler.tell(name, pb.AgentMessage(reached=reached))
        elif (order := order_of(command)) is not None and (name == next(iter(self._names)) or "leave" in order[1]):
            obey(order[1], self._supervisor)  # what is told to all agents of the job is for one supervisor

    async def _start_later(self) -> None:
        try:  # of all shares, since GPUs are dealt out among all; the supervisor starts what it has not yet
            self._supervisor.start(await asyncio.to_thread(self._slots_of, dict(self._shares)))
        except (OSError, ValueError) as error:
            self._error = error
            self._supervisor.end_after_failure()

    async def _supervise(self) -> None:
        try:
            replaces_failed = any(share.replaces_failed for share in self._shares.values())
            await self._supervisor.run(self._slots_of(self._shares), replaces_failed)
        except (OSError, ValueError) as error:
            self._error = error
        self._tell(over=True)

    def _tell_soon(self) -> None:
        """One report for all that changes at a time."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self, over: bool = False) -> None:
        self._telling = False
        for name, share in self._shares.items():
            self._scheduler.tell(name, pb.AgentMessage(report=self._report(share, over)))

    def _report(self, share: pb.StartShare, over: bool) -> pb.JobReport:
        report = pb.JobReport(job=self._job, over=over)
        ranks = {placed.rank for placed in share.ranks}
        if isinstance(self._error, OSError):
            report.error = reason_of(self._error)
        elif self._error is not None:
            report.error = str(self._error)
        elif over and not ranks <= self._supervisor.pids.keys():
            report.error = "it was stopped before all of its ranks were started"
        for state in self._supervisor.states():
            if state["rank"] in ranks:
                report.ranks.add(**state)
        return report
