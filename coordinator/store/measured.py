"""A store with a stopwatch: how long each call of another one takes, and whether it succeeds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from .base import Change, Entry, Guard, Store


class MeasuredStore:
    """observe(seconds, operation, result): hears of each call that ended; result is "ok" or the name of the error."""

    def __init__(self, store: Store, observe: Callable[[float, str, str], None]) -> None:
        self._store = store
        self._observe = observe

    @property
    def is_shared(self) -> bool:
        return self._store.is_shared

    @contextlib.contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        began = time.monotonic()
        result = "ok"
        try:
            yield
        except BaseException as error:
            result = type(error).__name__
            raise
        finally:
            self._observe(time.monotonic() - began, operation, result)

    async def get(self, key: str) -> Entry | None:
        with self._timed("get"):
            return await self._store.get(key)

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        with self._timed("range"):
            return await self._store.range(prefix)

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        with self._timed("put"):
            return await self._store.put(key, value, lease, guard=guard)

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        with self._timed("put_if"):
            return await self._store.put_if(key, value, revision, lease, guard=guard)

    async def delete(self, key: str, revision: int | None = None, *, guard: Guard | None = None) -> bool:
        with self._timed("delete"):
            return await self._store.delete(key, revision, guard=guard)

    async def grant(self, ttl_s: float) -> int:
        with self._timed("grant"):
            return await self._store.grant(ttl_s)

    async def keep_alive(self, lease: int) -> None:
        with self._timed("keep_alive"):
            await self._store.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        with self._timed("revoke"):
            await self._store.revoke(lease)

    def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        return self._store.watch(prefix, revision)  # a watch has no end, so its time is not measured

    async def close(self) -> None:
        await self._store.close()
