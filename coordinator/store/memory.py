"""A store in memory, for one coordinator: the embedded default and the fastest one under the conformance suite.

Belongs to one event loop. It ends with its coordinator, and so do the jobs. A world with its secret is forgotten soon
after it ended (history.py).
"""

from collections.abc import AsyncIterator, Sequence

from .base import MISSING, Change, Entry, FencedError, Guard, StoreError, check_size
from .history import KEPT_BYTES, KEPT_CHANGES, KEPT_S, History, Leases


class MemoryStore:
    is_shared = False

    def __init__(self, kept_changes: int = KEPT_CHANGES, kept_bytes: int = KEPT_BYTES, kept_s: float = KEPT_S) -> None:
        self._entries: dict[str, Entry] = {}
        self._lease_of: dict[str, int] = {}
        self._keys_of: dict[int, set[str]] = {}  # lease -> the keys that belong to it
        self._leases = Leases(self._remove_leased)
        self._last_lease = 0
        self._history = History(kept_changes, kept_bytes, kept_s)
        self._closed = False

    async def get(self, key: str) -> Entry | None:
        self._check_open()
        return self._entries.get(key)

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        self._check_open()
        keys = sorted(key for key in self._entries if key.startswith(prefix))
        return [self._entries[key] for key in keys], self._history.revision

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        self._check_open()
        check_size(key, value)
        self._check_guard(guard)
        return self._write(key, value, lease)

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        self._check_open()
        check_size(key, value)
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
        self._leases.begin(self._last_lease, ttl_s)
        self._keys_of[self._last_lease] = set()
        return self._last_lease

    async def keep_alive(self, lease: int) -> None:
        self._check_open()
        self._leases.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        self._check_open()
        if self._leases.end(lease):
            self._remove_leased(lease)

    def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        return self._history.watch(prefix, revision)

    async def close(self) -> None:
        self._closed = True
        self._leases.close()
        self._keys_of.clear()
        self._entries.clear()
        self._history.close()

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

    def _remove_leased(self, lease: int) -> None:
        for key in sorted(self._keys_of.pop(lease, ())):
            self._remove(key)

    def _write(self, key: str, value: bytes, lease: int | None) -> Entry:
        if lease is not None:
            self._leases.check(lease)
        self._detach(key)
        if lease is not None:
            self._keys_of[lease].add(key)
            self._lease_of[key] = lease
        entry = Entry(key, value, self._history.revision + 1)
        self._entries[key] = entry
        self._history.add(Change(key, value, entry.revision))
        return entry

    def _remove(self, key: str) -> None:
        self._detach(key)
        del self._entries[key]
        self._history.add(Change(key, None, self._history.revision + 1))

    def _detach(self, key: str) -> None:
        """Takes the key from the lease it belonged to: the latest write decides that."""
        lease = self._lease_of.pop(key, None)
        if lease in self._keys_of:
            self._keys_of[lease].discard(key)
