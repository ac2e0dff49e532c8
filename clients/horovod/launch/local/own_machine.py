"""The agents of the launcher's own machine: one for each name under which the job has ranks here, as there would be for
so many hosts. The processes of all of them belong to one supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence

from horovod.base.words import reason_of
from horovod.coordinator.in_process import InProcessScheduler
from horovod.launch.own_agents import OwnAgents
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2
from horovod.worker.agent.orders import Order, obey
from horovod.worker.agent.supervisor import Slot, Supervisor

Shares = Mapping[str, pb.StartShare]  # by name


class OwnMachine(OwnAgents):
    """`run` once, in the launcher's event loop; `stop` and `forward` are for its signals."""

    def __init__(
        self,
        scheduler: InProcessScheduler,
        supervisor: Supervisor,
        hosts: Sequence[str],
        slots_of: Callable[[Shares], Sequence[Slot]],
    ) -> None:
        """hosts: of every rank. slots_of: what to start, once the scheduler has told; may raise ValueError."""
        self._names = {name: hosts.count(name) for name in dict.fromkeys(hosts)}
        super().__init__(scheduler, self._names)
        self.stopping = False  # whether `stop` was called
        self._supervisor = supervisor
        self._slots_of = slots_of
        self._shares: dict[str, pb.StartShare] = {}
        self._running: asyncio.Task[None] | None = None
        self._starting: set[asyncio.Task[None]] = set()  # of processes in the place of others
        self._error: Exception | None = None  # why the ranks could not be started
        self._reporting = False

    async def run(
        self,
        spec: jobs_pb2.JobSpec,
        job_id: str,
        changed: Callable[[jobs_pb2.JobRecord], None] = lambda record: None,
    ) -> jobs_pb2.JobRecord:
        """Runs the job, and returns its record when no process of it is left. changed: called with each new record.

        OSError or ValueError when it can't be started.
        """
        self._supervisor.changed = self._report_soon
        for name, slots in self._names.items():
            spec.hosts.add(name=name, slots=slots)
        try:
            await self.attach()
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

    def _start(self, name: str, share: pb.StartShare) -> None:
        self._shares[name] = share
        if self._running is not None:
            self._starting.add(task := asyncio.create_task(self._start_later()))
            task.add_done_callback(self._starting.discard)
        elif sum(len(share.ranks) for share in self._shares.values()) >= share.size:  # with spare ones
            self._running = asyncio.create_task(self._supervise())

    def _obey(self, name: str, order: Order) -> None:
        if name == next(iter(self._names)) or "leave" in order:  # all agents are told all else, for one supervisor
            obey(order, self._supervisor)

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
        self._report_all(over=True)

    def _report_soon(self) -> None:
        """One report for all that changes at a time."""
        if not self._reporting:
            self._reporting = True
            asyncio.get_running_loop().call_soon(self._report_all)

    def _report_all(self, over: bool = False) -> None:
        self._reporting = False
        for name, share in self._shares.items():
            ranks = {placed.rank for placed in share.ranks}
            states = [state for state in self._supervisor.states() if state["rank"] in ranks]
            self._report(name, share, states, over, self._why(ranks, over))

    def _why(self, ranks: set[int], over: bool) -> str:
        """Why these ranks could not be started; "" if they were."""
        if isinstance(self._error, OSError):
            return reason_of(self._error)
        if self._error is not None:
            return str(self._error)
        if over and not ranks <= self._supervisor.pids.keys():
            return "it was stopped before all of its ranks were started"
        return ""
