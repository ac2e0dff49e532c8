"""A store in memory, for one coordinator: the embedded default and the fast one of two under the conformance suite.

Belongs to one event loop. It ends with its coordinator, and so do the jobs.

What a watch can look back on is bounded in number, bytes and time: a watch that goes on after a moment away misses
nothing, one that stayed away for longer reads the range again (CompactedError), and a world with its secret is
forgotten soon after it ended.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from .base import MISSING, Change, CompactedError, Entry, FencedError, Guard, LeaseLostError, StoreError

KEPT_CHANGES = 10_000  # what a watch can look back on: at most so many changes, ...
KEPT_BYTES = 4 << 20  # ... of so many bytes of keys and values (the latest change whatever its size), ...
KEPT_S = 60.0  # ... for so long

# A lease ends after so many timers in turn. Those who keep it run in this event loop, so that a loop which stands still
# keeps them from it; that costs the lease one of its parts, however long it takes.
LEASE_PARTS = 4


@dataclass
class _Lease:
    ttl_s: float
    timer: asyncio.TimerHandle
    keys: set[str] = field(default_factory=set)


class MemoryStore:
    def __init__(self, kept_changes: int = KEPT_CHANGES, kept_bytes: int = KEPT_BYTES, kept_s: float = KEPT_S) -> None:
        self._entries: dict[str, Entry] = {}
        self._lease_of: dict[str, int] = {}
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0
        self._revision = 0
        self._kept_changes = kept_changes
        self._kept_bytes = kept_bytes
        self._kept_s = kept_s
        self._changes: deque[Change] = deque()  # by rising revision, without gaps
        self._times_s: deque[float] = deque()  # of the changes, by the clock of the event loop
        self._bytes = 0  # of the changes
        self._expiry: asyncio.TimerHandle | None = None  # stands while there are changes
        self._changed = asyncio.Event()  # replaced with each change
        self._closed = False

    async def get(self, key: str) -> Entry | None:
        self._check_open()
        return self._entries.get(key)

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        self._check_open()
        keys = sorted(key for key in self._entries if key.startswith(prefix))
        return [self._entries[key] for key in keys], self._revision

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        self._check_open()
        self._check_guard(guard)
        return self._write(key, value, lease)

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        self._check_open()
        self._check_guard(guard)
        if self._revision_of(key) != revision:
            return None
        return self._write(key, value, lease)

    async def delete(self, key: str, revision: int | None = None, *, guard: Guard | None = None) -> bool:
        self._check_open()
        self._check_guard(guard)
        current = self._entries.get(key)
        if current is None or (revision is not None and current.revision != revision):
            return False
        self._remove(key)
        return True

    async def grant(self, ttl_s: float) -> int:
        self._check_open()
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl_s, self._timer(self._last_lease, ttl_s))
        return self._last_lease

    async def keep_alive(self, lease: int) -> None:
        self._check_open()
        held = self._lease(lease)
        held.timer.cancel()
        held.timer = self._timer(lease, held.ttl_s)

    async def revoke(self, lease: int) -> None:
        self._check_open()
        self._end(lease)

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        following = revision
        while True:
            self._check_open()
            changed = self._changed
            oldest = self._changes[0].revision if self._changes else self._revision + 1
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

    async def close(self) -> None:
        self._closed = True
        for lease in self._leases.values():
            lease.timer.cancel()
        self._leases.clear()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._entries.clear()
        self._changes.clear()
        self._times_s.clear()
        self._changed.set()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("The memory store is closed.")

    def _check_guard(self, guard: Guard | None) -> None:
        if guard is not None and self._revision_of(guard.key) != guard.revision:
            raise FencedError(f"{guard.key} is not as it was at revision {guard.revision} any more.")

    def _revision_of(self, key: str) -> int:
        current = self._entries.get(key)
        return current.revision if current else MISSING

    def _lease(self, lease: int) -> _Lease:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseLostError(f"Lease {lease} has ended or never was.")
        return held

    def _timer(self, lease: int, ttl_s: float, parts: int = LEASE_PARTS) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(ttl_s / LEASE_PARTS, self._passed, lease, parts - 1)

    def _passed(self, lease: int, parts: int) -> None:
        if parts and (held := self._leases.get(lease)):
            held.timer = self._timer(lease, held.ttl_s, parts)
        else:
            self._end(lease)

    def _end(self, lease: int) -> None:
        held = self._leases.pop(lease, None)
        if held is None:
            return
        held.timer.cancel()
        for key in sorted(held.keys):
            self._remove(key)

    def _write(self, key: str, value: bytes, lease: int | None) -> Entry:
        held = None if lease is None else self._lease(lease)
        self._detach(key)
        if held is not None and lease is not None:
            held.keys.add(key)
            self._lease_of[key] = lease
        entry = Entry(key, value, self._record(key, value))
        self._entries[key] = entry
        return entry

    def _remove(self, key: str) -> None:
        self._detach(key)
        del self._entries[key]
        self._record(key, None)

    def _detach(self, key: str) -> None:
        """The latest write decides which lease an entry belongs to."""
        lease = self._lease_of.pop(key, None)
        if lease in self._leases:
            self._leases[lease].keys.discard(key)

    def _record(self, key: str, value: bytes | None) -> int:
        self._revision += 1
        change = Change(key, value, self._revision)
        self._changes.append(change)
        self._times_s.append(asyncio.get_running_loop().time())
        self._bytes += _bytes_of(change)
        while len(self._changes) > self._kept_changes or (self._bytes > self._kept_bytes and len(self._changes) > 1):
            self._forget_oldest()
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(self._kept_s, self._expire)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return self._revision

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
