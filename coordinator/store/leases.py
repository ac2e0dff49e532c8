"""The time to live of the leases of a store in this process."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .base import LeaseLostError

# A lease ends after so many timers in turn. Those who keep it run in this event loop, so that a loop which stands still
# keeps them from it; that costs the lease one of its parts, however long it takes.
LEASE_PARTS = 4


@dataclass
class _Lease:
    ttl_s: float
    timer: asyncio.TimerHandle


class Leases:
    """Belongs to one event loop."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        """ended: called with a lease that nobody has kept alive for its time to live."""
        self._ended = ended
        self._leases: dict[int, _Lease] = {}

    def begin(self, lease: int, ttl_s: float) -> None:
        """Begins a lease, which lives for so long from now on."""
        self._leases[lease] = _Lease(ttl_s, self._timer(lease, ttl_s))

    def check(self, lease: int) -> None:
        """Raises LeaseLostError."""
        if lease not in self._leases:
            raise LeaseLostError(f"Lease {lease} has ended or never was.")

    def keep_alive(self, lease: int) -> None:
        self.check(lease)
        held = self._leases[lease]
        held.timer.cancel()
        held.timer = self._timer(lease, held.ttl_s)

    def end(self, lease: int) -> bool:
        """Ends the lease without calling `ended`. Returns whether it lived until now."""
        held = self._leases.pop(lease, None)
        if held is not None:
            held.timer.cancel()
        return held is not None

    def close(self) -> None:
        for held in self._leases.values():
            held.timer.cancel()
        self._leases.clear()

    def _timer(self, lease: int, ttl_s: float, parts: int = LEASE_PARTS) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(ttl_s / LEASE_PARTS, self._passed, lease, parts - 1)

    def _passed(self, lease: int, parts: int) -> None:
        if parts and (held := self._leases.get(lease)):
            held.timer = self._timer(lease, held.ttl_s, parts)
        elif self.end(lease):
            self._ended(lease)
