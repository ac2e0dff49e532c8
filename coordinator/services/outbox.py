"""The queue of messages for one stream. It is bounded, so a peer that does not read can't fill the memory."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

import grpc

from horovod.base.errors import ClusterCode, coded

T = TypeVar("T")


class Outbox(Generic[T]):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._news = asyncio.Event()
        self.ended = asyncio.Event()
        self.failure: tuple[grpc.StatusCode, str] | None = None

    def put(self, item: T) -> None:
        """Queues an item; ignored once ended. A full queue ends the stream."""
        if self.ended.is_set():
            return
        if len(self._items) >= self._limit:
            sentence = f"{self._limit} messages wait to be read; the peer is stuck."
            self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, coded(ClusterCode.TOO_MANY_MESSAGES, sentence))
            return
        self._items.append(item)
        self._news.set()

    def close(self) -> None:
        """No more items; what is queued will still be sent."""
        self.ended.set()
        self._news.set()

    def fail(self, code: grpc.StatusCode, sentence: str) -> None:
        """Ends the stream with a status. The first reason wins."""
        if not self.ended.is_set():
            self.failure = (code, sentence)
        self.close()

    async def take(self) -> list[T]:
        """Waits for items and returns all of them; an empty list means that there will be no more."""
        while not self._items and not self.ended.is_set():
            self._news.clear()
            await self._news.wait()
        items = list(self._items)
        self._items.clear()
        return items
