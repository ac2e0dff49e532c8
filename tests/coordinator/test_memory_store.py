"""What the store in memory keeps of changes is bounded."""

import asyncio
import contextlib
import time

import pytest
from test_store_conformance import WAIT_S, take

from horovod.coordinator.store import Change, CompactedError, MemoryStore


def test_a_watch_from_too_long_ago_is_refused() -> None:
    async def body() -> None:
        store = MemoryStore(kept_changes=3)
        for _ in range(5):
            await store.put("a", b"1")
        with pytest.raises(CompactedError, match=r"revision 3 .* 2 "):
            await store.watch("a", 2).__anext__()
        assert await take(store.watch("a", 3), 3) == [("a", b"1")] * 3
        await store.close()

    asyncio.run(body())


def test_a_watch_that_fell_behind_finds_out() -> None:
    async def body() -> None:
        store = MemoryStore(kept_changes=3)
        await store.put("a", b"0")
        changes = store.watch("a", 1)
        assert (await changes.__anext__()).value == b"0"
        for _ in range(10):
            await store.put("a", b"1")
        with pytest.raises(CompactedError):
            await changes.__anext__()
        with contextlib.suppress(StopAsyncIteration):
            await changes.__anext__()
        await store.close()

    asyncio.run(body())


def test_what_a_watch_can_look_back_on_is_bounded_in_bytes() -> None:
    async def body() -> None:
        store = MemoryStore(kept_bytes=3 * 1001)
        for number in range(5):
            await store.put("a", b"%d" % number * 1000)
        with pytest.raises(CompactedError, match=r"revision 3 .* 2 "):
            await store.watch("a", 2).__anext__()
        assert [value[:1] for _, value in await take(store.watch("a", 3), 3) if value] == [b"2", b"3", b"4"]
        waiting = asyncio.create_task(take(store.watch("a", 6), 1))
        await store.put("a", b"x" * 10_000)  # a change larger than the bound is seen all the same
        assert await waiting == [("a", b"x" * 10_000)]
        with pytest.raises(CompactedError):
            await store.watch("a", 5).__anext__()
        await store.close()

    asyncio.run(body())


def test_what_was_deleted_is_forgotten_after_a_while() -> None:
    """A world holds the secret of its data plane."""

    async def body() -> None:
        forgotten = asyncio.Event()

        class Value(bytes):
            def __del__(self) -> None:
                forgotten.set()

        store = MemoryStore(kept_s=0.01)
        value = Value(b"secret")
        written = await store.put("world", value)
        changes = store.watch("world", written.revision)
        assert await changes.__anext__() == Change("world", b"secret", written.revision)
        await store.delete("world", written.revision)
        assert (await changes.__anext__()).value is None
        await changes.aclose()
        del written, value
        await asyncio.wait_for(forgotten.wait(), WAIT_S)
        assert await store.get("other") is None
        with pytest.raises(CompactedError):
            await store.watch("world", 1).__anext__()
        following = store.watch("world", 3)
        waiting = asyncio.create_task(take(following, 1))
        await store.put("world", b"next")
        assert await waiting == [("world", b"next")], "a watch that has seen everything misses nothing"
        await store.close()

    asyncio.run(body())


def test_a_loop_that_stands_still_ends_no_lease() -> None:
    """Those who keep it could not run either."""

    async def body() -> None:
        store = MemoryStore()
        lease, left = await store.grant(0.4), await store.grant(0.4)
        await store.put("left", b"1", left)

        async def keep() -> None:
            while True:
                await store.keep_alive(lease)
                await asyncio.sleep(0.01)

        keeping = asyncio.create_task(keep())
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251 - the loop stands still
        assert await asyncio.wait_for(take(store.watch("left", 2), 1), WAIT_S) == [("left", None)]
        await store.keep_alive(lease)
        keeping.cancel()
        await store.close()

    asyncio.run(body())
