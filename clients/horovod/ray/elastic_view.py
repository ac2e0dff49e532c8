"""What programs may ask of the driver of an elastic executor while it runs: `executor.driver`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SlotInfo:
    """One place for a worker on a host. hostname: None where no worker has it."""

    hostname: str | None = None
    number: int = -1  # that the worker keeps for as long as the job lives; no rank
    pid: int = 0  # 0: it has not started yet


class ElasticView:
    """May be asked by any thread, at any time."""

    def __init__(self, call: Callable[[], Any]) -> None:
        """call: the one that waits for its function, or runs; None where there is none."""
        self._call = call

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """The worker on this host that is the slot-th there, from 0."""
        call = self._call()
        agent = call.agents.all.get(host) if call is not None and call.agents is not None else None
        running = sorted((one.rank, one.pid) for one in list(agent.processes) if one.code is None) if agent else []
        return SlotInfo(host, *running[slot]) if 0 <= slot < len(running) else SlotInfo()

    def get_worker_client(self, slot: SlotInfo) -> SlotInfo | None:
        """The same once the worker is in a world, so that it is told of changes; else None."""
        call = self._call()
        if call is None or not slot.hostname:
            return None
        now = next(
            (
                one
                for agent in list(call.agents.all.values())
                if agent.host == slot.hostname
                for one in list(agent.processes)
                if one.rank == slot.number and one.code is None
            ),
            None,
        )
        if now is None or (slot.hostname, now.pid) not in call.work.coordinator.members(call.work.job):
            return None
        return SlotInfo(slot.hostname, now.rank, now.pid)
