"""Agents in the launcher's own process, which register with its coordinator's scheduler as agents on other hosts do.

Which process runs where, what a failed one means and when the job is over is decided by the scheduler. A launcher adds
how it starts processes, and how they obey (`Processes` of worker/agent/orders.py).
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from horovod.base.protocol import PROTOCOL_VERSION, __version__
from horovod.coordinator.in_process import InProcessScheduler
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2
from horovod.worker.agent.orders import Order, order_of


class OwnAgents(ABC):
    """Those of one job that start processes in one way. Made, and used, in the launcher's event loop."""

    def __init__(self, scheduler: InProcessScheduler, slots: Mapping[str, int], word_s: float = 0.0) -> None:
        """slots: of each agent, by its name. word_s: the `word_seconds` of agents.proto."""
        self._scheduler = scheduler
        self._are_gone = False
        instance = secrets.token_hex(8)
        self._registers = [
            pb.Register(
                protocol_version=PROTOCOL_VERSION,
                version=__version__,
                name=name,
                instance=instance,
                slots=count,
                word_seconds=word_s,
            )
            for name, count in slots.items()
        ]
        for register in self._registers:
            register.interfaces.add(name="lo", address="127.0.0.1")  # members choose their own interfaces

    async def attach(self) -> None:
        """ValueError with a sentence if the scheduler refuses an agent."""
        await self._scheduler.attach(self._registers, self._hear)

    def detach(self) -> None:
        """The agents are gone, after what they have told so far. Others may take their names."""
        self._are_gone = True
        for register in self._registers:
            self._scheduler.detach(register)

    @abstractmethod
    def _start(self, name: str, share: pb.StartShare) -> None:
        """This agent is to start what it has not started yet of these ranks."""

    @abstractmethod
    def _obey(self, name: str, order: Order) -> None:
        """This agent's processes are to obey."""

    def _hear(self, name: str, command: pb.AgentCommand) -> None:
        if self._are_gone:
            return
        if command.HasField("start"):
            self._start(name, command.start)
        elif command.HasField("probe"):  # nothing is probed: all are this machine, or the launcher is on none
            self._tell(name, reached=pb.Reached(probe=command.probe.probe, targets=command.probe.targets))
        elif (order := order_of(command)) is not None:
            self._obey(name, order[1])

    def _report(
        self, name: str, share: pb.StartShare, states: Iterable[Mapping[str, Any]], over: bool, error: str = ""
    ) -> None:
        """states: the fields of RankStatus (agents.proto) for each process, first of those that have ended."""
        report = pb.JobReport(job=share.job, share=share.share, over=over, error=error)
        for state in states:
            report.ranks.add(**state)
        self._tell(name, report=report)

    def _tell(self, name: str, **message: Any) -> None:
        if not self._are_gone:
            self._scheduler.tell(name, pb.AgentMessage(**message))


def replacements_told(tell: Callable[[str], None]) -> Callable[[jobs_pb2.JobRecord], None]:
    """For each new record of a job: tells its sentence if processes of the running job are replaced."""
    told = 0  # the generation of which the user knows

    def changed(record: jobs_pb2.JobRecord) -> None:
        nonlocal told
        if record.state == jobs_pb2.JOB_STATE_RUNNING and record.sentence and record.generation > told:
            told = record.generation
            tell(record.sentence)

    return changed
