"""A store in a file, for one coordinator on one host: it outlives its coordinator, so a restart ends no job.

A thread of its own owns the connection and does one thing after the other, so that the event loop waits for no disk.
The time to live of a lease is kept in memory, where it begins anew with the coordinator: while that is down, nobody
could have kept a lease alive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from .base import Change, Entry, Guard, StoreError, check_size
from .history import History
from .leases import Leases
from .sqlite_file import SqliteFile

MOST_BYTES = 2 << 30  # the default limit of etcd; archives of code take a quarter of it
END_AGAIN_S = 1.0  # seconds between attempts to delete the entries of a lease that has ended

Answer = TypeVar("Answer")


class SqliteStore:
    """Belongs to one event loop, that of its first call."""

    is_shared = False

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """Opens the file, or makes it. Raises OSError with a sentence."""
        self._thread = ThreadPoolExecutor(1, "horovod-store")
        try:
            self._file, revision, self._restored = self._thread.submit(_opened, path, most_bytes).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._history = History(revision=revision)
        self._leases = Leases(self._lease_ended)
        self._ending: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def get(self, key: str) -> Entry | None:
        return await self._run(lambda file: (file.get(key), ()))

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        return await self._run(lambda file: (file.range(prefix), ()))

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        entry = await self._put(key, value, lease, None, guard)
        assert entry is not None  # a write without a condition always succeeds
        return entry

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        return await self._put(key, value, lease, revision, guard)

    async def delete(self, key: str, revision: int | None = None, *, guard: Guard | None = None) -> bool:
        def work(file: SqliteFile) -> tuple[bool, Sequence[Change]]:
            change = file.delete(key, revision, guard)
            return change is not None, (change,) if change else ()

        return await self._run(work)

    async def grant(self, ttl_s: float) -> int:
        lease = await self._run(lambda file: (file.grant(ttl_s), ()))
        self._leases.begin(lease, ttl_s)
        return lease

    async def keep_alive(self, lease: int) -> None:
        self._begin()
        self._leases.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        self._begin()
        if self._leases.end(lease):
            try:
                await self._end_lease(lease)
            except StoreError:
                self._lease_ended(lease)
                raise

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        self._begin()
        async for change in self._history.watch(prefix, revision):
            yield change

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._leases.close()
        for task in self._ending:
            task.cancel()
        self._history.close()
        closing = self._thread.submit(self._file.close)
        await asyncio.to_thread(self._thread.shutdown)
        closing.result()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._closed:
            raise StoreError("The store is closed.")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for lease, ttl_s in self._restored.items():
                self._leases.begin(lease, ttl_s)

    async def _run(self, work: Callable[[SqliteFile], tuple[Answer, Sequence[Change]]]) -> Answer:
        """Does `work` in the thread. Watches get its changes, even if the caller no longer waits."""
        self._begin()
        loop = self._loop
        assert loop is not None

        def do() -> Answer:
            answer, changes = work(self._file)
            if changes:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._tell, changes)
            return answer

        return await loop.run_in_executor(self._thread, do)

    def _tell(self, changes: Sequence[Change]) -> None:
        if not self._closed:
            for change in changes:
                self._history.add(change)

    async def _put(
        self, key: str, value: bytes, lease: int | None, latest: int | None, guard: Guard | None
    ) -> Entry | None:
        check_size(key, value)
        self._begin()
        if lease is not None:
            self._leases.check(lease)  # the end of a lease comes after this in the thread

        def work(file: SqliteFile) -> tuple[Entry | None, Sequence[Change]]:
            entry = file.put(key, value, lease, latest, guard)
            return entry, (Change(key, value, entry.revision),) if entry else ()

        return await self._run(work)

    def _lease_ended(self, lease: int) -> None:
        task = asyncio.get_running_loop().create_task(self._end_lease(lease, for_ever=True))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_lease(self, lease: int, *, for_ever: bool = False) -> None:
        def work(file: SqliteFile) -> tuple[None, Sequence[Change]]:
            return None, file.end_lease(lease)

        while not self._closed:
            try:
                await self._run(work)
            except StoreError:
                if not for_ever:
                    raise
            else:
                return
            await asyncio.sleep(END_AGAIN_S)


def _opened(path: Path, most_bytes: int) -> tuple[SqliteFile, int, dict[int, float]]:
    file = SqliteFile(path, most_bytes)
    try:
        return file, file.revision(), file.leases()
    except StoreError as error:
        file.close()
        raise OSError(str(error)) from error
