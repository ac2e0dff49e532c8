"""A stream must begin with a message; but what waits because the coordinator itself is behind is not late."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from error_codes import ends_with

from horovod.base.errors import ClusterCode
from horovod.coordinator.services import streams
from horovod.protos.v1.membership_pb2 import Leave


class Context:
    def __init__(self) -> None:
        self.aborted: tuple[grpc.StatusCode, str] | None = None

    async def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        self.aborted = (code, sentence)


async def from_queue(queue: asyncio.Queue[Leave | None]) -> AsyncIterator[Leave]:
    while (message := await queue.get()) is not None:
        yield message


def first(story: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Leave, Context]:
    monkeypatch.setattr(streams, "FIRST_MESSAGE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(streams, "_SLICE_S", 0.02)

    async def play() -> tuple[Leave, Context]:
        queue: asyncio.Queue[Leave | None] = asyncio.Queue()
        context: Any = Context()
        reading = asyncio.create_task(streams.first_message(from_queue(queue), context, "a greeting"))
        await story(queue)
        return await asyncio.wait_for(reading, 60), context

    return asyncio.run(play())


def test_one_that_came_while_the_coordinator_was_busy_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(queue: asyncio.Queue[Leave | None]) -> None:
        await asyncio.sleep(0)  # it waits now
        time.sleep(1)  # noqa: ASYNC251 - the work of the coordinator, in which its loop stands still
        for _ in range(5):
            await asyncio.sleep(0)  # turns of the loop until what has come is read
        queue.put_nowait(Leave(reason="hello"))

    message, context = first(story, monkeypatch)
    assert (message, context.aborted) == (Leave(reason="hello"), None)


def test_a_peer_that_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(queue: asyncio.Queue[Leave | None]) -> None:
        pass

    _, context = first(story, monkeypatch)
    assert context.aborted is not None
    assert context.aborted[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert re.search(ends_with(ClusterCode.WRONG_MESSAGE, "0 s", "a greeting"), context.aborted[1])


def test_a_stream_that_ends_at_once_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(queue: asyncio.Queue[Leave | None]) -> None:
        queue.put_nowait(None)

    _, context = first(story, monkeypatch)
    assert context.aborted is not None
    assert context.aborted[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(ends_with(ClusterCode.WRONG_MESSAGE, "a greeting"), context.aborted[1])
