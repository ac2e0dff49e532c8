"""What a watch of a store in this process can look back on: the latest changes, bounded in number, bytes and time.

A watch that goes on after a moment away misses nothing; one that stayed away for longer reads the range again
(CompactedError). What was deleted, such as a world with its secret, is forgotten soon.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from .base import Change, CompactedError, LeaseLostError, StoreError

KEPT_CHANGES = 10_000  # at most so many changes, ...
KEPT_BYTES = 4 << 20  # ... of so many bytes of keys and values (the latest change whatever its size), ...
KEPT_S = 60.0  # ... for so long


class History:
    """Belongs to one event loop. `revision` is that of the latest change."""

    def __init__(
        self, kept_changes: int = KEPT_CHANGES, kept_bytes: int = KEPT_BYTES, kept_s: float = KEPT_S, revision: int = 0
    ) -> None:
        """revision: of the latest change that was made before there was this history."""
        self.revision = revision
        self._kept_changes = kept_changes
        self._kept_bytes = kept_bytes
        self._kept_s = kept_s
        self._changes: deque[Change] = deque()  # by rising revision, without gaps
        self._times_s: deque[float] = deque()  # when each change was made, by the clock of the event loop
        self._bytes = 0  # bytes of keys and values of the changes
        self._expiry: asyncio.TimerHandle | None = None  # set while there are changes
        self._changed = asyncio.Event()  # replaced with each change
        self._closed = False

    def add(self, change: Change) -> None:
        """Adds a change, which has the next revision."""
        self.revision = change.revision
        self._changes.append(change)
        self._times_s.append(asyncio.get_running_loop().time())
        self._bytes += _bytes_of(change)
        while len(self._changes) > self._kept_changes or (self._bytes > self._kept_bytes and len(self._changes) > 1):
            self._forget_oldest()
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(self._kept_s, self._expire)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        """The same as `Store.watch`."""
        following = revision
        while True:
            if self._closed:
                raise StoreError("The store is closed.")
            changed = self._changed
            oldest = self._changes[0].revision if self._changes else self.revision + 1
            if following < oldest:
                raise CompactedError(f"Changes before revision {oldest} are gone, but {following} was asked for.")
            start = bisect_left(self._changes, following, key=lambda change: change.revision)
            batch = [self._changes[index] for index in range(start, len(self._changes))]
            for change in batch:
                following = change.revision + 1
                if change.key.startswith(prefix):
                    yield change
            if not batch:
                await changed.wait()

    def close(self) -> None:
        """Ends watches."""
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._changes.clear()
        self._times_s.clear()
        self._changed.set()

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        while self._times_s and self._times_s[0] + self._kept_s <= loop.time():
            self._forget_oldest()
        self._expiry = loop.call_at(self._times_s[0] + self._kept_s, self._expire) if self._times_s else None

    def _forget_oldest(self) -> None:
        self._bytes -= _bytes_of(self._changes.popleft())
        self._times_s.popleft()


def _bytes_of(change: Change) -> int:
    return len(change.key) + len(change.value or b"")


# The time to live of the leases of a store in this process.

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
