"""Archives of code in the store: sent in chunks, verified, and pushed out when there is no room."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Coroutine
from typing import Any

import pytest
from error_codes import ends_with

from horovod.base.errors import ClusterCode
from horovod.coordinator.core.cluster.code import CHUNK_BYTES
from horovod.coordinator.services.code import CodeShelf
from horovod.coordinator.services.streams import RefusedError
from horovod.coordinator.store import MemoryStore
from horovod.protos.v1 import jobs_pb2 as pb


def shelf_on(store: MemoryStore, needed: set[str] | None = None) -> CodeShelf:
    return CodeShelf(store, lambda: None, lambda: needed or set())


def code_of(content: bytes) -> pb.Code:
    return pb.Code(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


async def send(shelf: CodeShelf, content: bytes, code: pb.Code | None = None, most: int = 1000) -> pb.CodeFound:
    """Sends at most `most` chunks."""
    code = code or code_of(content)
    found = shelf.find(code)
    for index in list(found.missing)[:most]:
        data = content[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        found = await shelf.put(pb.CodeChunk(code=code, index=index, data=data))
    return found


async def read(shelf: CodeShelf, code: pb.Code) -> bytes:
    content, index = b"", 0
    while len(content) < code.size:
        chunk = await shelf.get(code.sha256, index)
        assert chunk is not None
        content, index = content + chunk, index + 1
    return content


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


CONTENT = os.urandom(2 * CHUNK_BYTES + 5)


def test_what_was_sent_is_there_for_the_next_coordinator() -> None:
    async def story() -> None:
        store = MemoryStore()
        shelf, code = shelf_on(store), code_of(CONTENT)
        assert list(shelf.find(code).missing) == [0, 1, 2]
        assert not (await send(shelf, CONTENT, most=2)).complete
        assert await shelf.get(code.sha256, 0) is None  # not before all of it is there
        assert (await send(shelf, CONTENT)).complete
        other = shelf_on(store)
        await other.load()
        assert other.find(code).complete
        assert await read(other, code) == CONTENT
        assert await other.get(code.sha256, 3) is None

    run(story())


def test_what_was_not_complete_is_sent_again_to_the_next_coordinator() -> None:
    async def story() -> None:
        store = MemoryStore()
        await send(shelf_on(store), CONTENT, most=2)
        other = shelf_on(store)
        await other.load()
        assert list(other.find(code_of(CONTENT)).missing) == [0, 1, 2]
        assert (await store.range("code/"))[0] == []
        assert (await send(other, CONTENT)).complete

    run(story())


def test_code_that_is_not_what_its_name_says_is_refused() -> None:
    async def story() -> None:
        store = MemoryStore()
        shelf, code = shelf_on(store), code_of(CONTENT)
        with pytest.raises(RefusedError, match=ends_with(ClusterCode.CODE_DAMAGED)):
            await send(shelf, bytes(len(CONTENT)), code)
        assert (await store.range("code/"))[0] == []
        with pytest.raises(RefusedError, match=ends_with(ClusterCode.CODE_DAMAGED, "Chunk 0")):
            await shelf.put(pb.CodeChunk(code=code, index=0, data=b"x"))
        with pytest.raises(RefusedError, match=ends_with(ClusterCode.INVALID_JOB, "SHA-256")):
            shelf.find(pb.Code(sha256="../../etc", size=1))
        assert (await send(shelf, CONTENT)).complete

    run(story())


def test_the_longest_unused_goes_first_and_what_is_needed_stays() -> None:
    async def story() -> None:
        store = MemoryStore()
        contents = [os.urandom(100) for _ in range(4)]
        names = [code_of(content).sha256 for content in contents]
        needed = {names[0]}
        shelf = shelf_on(store, needed)
        shelf.archives.total_bytes = 300
        for content in contents[:3]:
            await send(shelf, content)
        shelf.find(code_of(contents[1]))  # used again
        await send(shelf, contents[3])
        assert [shelf.archives.has(name) for name in names] == [True, True, False, True]
        needed |= {names[1], names[3]}
        with pytest.raises(RefusedError, match=ends_with(ClusterCode.NO_ROOM_FOR_CODE, "100 bytes", "0 MiB")):
            await send(shelf, contents[2])
        assert len((await store.range("code/"))[0]) == 6

    run(story())
