"""Which hosts of a job's world are connected, to whichever coordinator serves it: evidence that they live.

The coordinator that serves agents asks for it before it counts a host as lost whose agent is away
(core/cluster/hosts.py).
"""

from __future__ import annotations

from horovod.coordinator.core.attendance import Attendance
from horovod.coordinator.store import Store, StoreError
from horovod.coordinator.store.jobs import serving_key
from horovod.protos.v1 import membership_pb2

from .hub import Hub
from .peers import Peers


class Attendances:
    def __init__(self, store: Store, hub: Hub, peers: Peers) -> None:
        self._store = store
        self._hub = hub
        self._peers = peers

    async def of(self, job: str) -> Attendance | None:
        """None where it is not known: no coordinator serves the job, or the one that does gives no answer."""
        if self._hub.serving.guard(job) is not None:
            return self._hub.attendance(job)
        try:
            found = await self._store.get(serving_key(job))
        except StoreError:
            return None
        if found is None:
            return None
        holder = membership_pb2.Serving.FromString(found.value)
        return await self._peers.attendance(holder.address, job)
