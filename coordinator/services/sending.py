"""What waits to be sent on a stream, and how one message goes to many members."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message

from horovod.base.errors import ClusterCode, coded
from horovod.base.protocol import RELAY_FRAME
from horovod.protos.v1.relay_pb2 import RelayFrame

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


# A world crosses to each host once: the relay of its agent keeps it, and is told to repeat it for its other members.
#
# Of the streams that come through one relay (worker/agent/relay.py) the first gets the message with a key, and the
# others get the key alone once its member has said that the message arrived: by then the relay has it. Where the first
# one is slow or breaks, all get the message itself.

REPEATED_FROM_BYTES = 16 << 10
ARRIVAL_S = 30.0  # seconds for the first member to get the message; a world can do nothing without it anyway
FORGOTTEN_S = 60.0  # seconds after which a message is sent in full again; a relay keeps it for longer
MAX_KEPT_BYTES = 64 << 20  # of all jobs' messages; beyond that the oldest are forgotten, and sent anew
MAX_SENT = 1 << 16  # entries about messages that relays have


class Repeats:
    """Which messages each relay has. Used in one event loop.

    A job has one world at a time, so what its last one took is given back when the next one comes, and a member that
    joins again and again takes no more.
    """

    def __init__(self, arrival_s: float = ARRIVAL_S) -> None:
        self._arrival_s = arrival_s
        # Job -> its frame, the oldest first. All relays share one frame object.
        self._framed: OrderedDict[str, _Framed] = OrderedDict()
        self.kept_bytes = 0  # bytes of all frames
        # (relay, frame) -> whether it has arrived there; the oldest first
        self._sent: OrderedDict[tuple[str, _Framed], _Sent] = OrderedDict()

    def of(self, relay: str, job: str) -> RelayedStream:
        """The repeats for one stream. relay: its id; empty for a stream that comes without a relay."""
        return RelayedStream(self, relay, job)

    def begin(self, relay: str, job: str, message: bytes) -> tuple[_Sent, bool]:
        """The entry of this message of the job at this relay, and whether it was made just now."""
        framed = self._framed.get(job)
        if framed is None or framed.message != message:
            framed = self._keep(job, message)
        found = self._sent.get((relay, framed))
        if found is not None:
            return found, False
        loop = asyncio.get_running_loop()
        sent = self._sent[relay, framed] = _Sent(framed, loop.create_future())
        sent.timer = loop.call_later(self._arrival_s, sent.settle, False)
        framed.relays.append(relay)
        if len(self._sent) > MAX_SENT:
            self._forget(next(iter(self._framed)))
        return sent, True

    def _keep(self, job: str, message: bytes) -> _Framed:
        self._forget(job)
        framed = self._framed[job] = _Framed(message)
        self.kept_bytes += framed.bytes
        while self.kept_bytes > MAX_KEPT_BYTES and len(self._framed) > 1:
            self._forget(next(iter(self._framed)))
        asyncio.get_running_loop().call_later(FORGOTTEN_S, self._forget, job, weakref.ref(framed))
        return framed

    def _forget(self, job: str, only: weakref.ref[_Framed] | None = None) -> None:
        """only: unless the job has another message by now. Streams that wait for this one's arrival send it anew."""
        if (framed := self._framed.get(job)) is None or (only is not None and only() is not framed):
            return
        del self._framed[job]
        self.kept_bytes -= framed.bytes
        for relay in framed.relays:
            if (sent := self._sent.pop((relay, framed), None)) is not None:
                sent.settle(False)


class _Framed:
    """One object for one message; entries are found by it, not by its bytes."""

    def __init__(self, message: bytes) -> None:
        key = secrets.randbits(64)
        self.message = message
        self.relays: list[str] = []  # relays that have an entry of this frame
        self.bytes = 2 * len(message)
        self.keep = RELAY_FRAME + RelayFrame(key=key, message=message).SerializeToString()
        self.repeat = RELAY_FRAME + RelayFrame(key=key).SerializeToString()


class _Sent:
    def __init__(self, framed: _Framed, arrived: asyncio.Future[bool]) -> None:
        self.framed = framed
        self.arrived = arrived
        self.timer: asyncio.TimerHandle | None = None

    def settle(self, arrived: bool) -> None:
        if not self.arrived.done():
            self.arrived.set_result(arrived)
        if self.timer is not None:
            self.timer.cancel()  # which would keep the message until its time has come


class RelayedStream:
    def __init__(self, repeats: Repeats, relay: str, job: str) -> None:
        self._repeats = repeats
        self._relay = relay
        self._job = job
        self._first: _Sent | None = None  # the message that this stream brings to the relay

    @property
    def is_relayed(self) -> bool:
        return bool(self._relay)

    async def shortened(self, message: bytes) -> bytes:
        """What to write in place of `message`, whose arrival the member will confirm."""
        if not self._relay or len(message) < REPEATED_FROM_BYTES:
            return message
        sent, is_first = self._repeats.begin(self._relay, self._job, message)
        if is_first:
            self._first = sent
            return sent.framed.keep
        await asyncio.wait([sent.arrived])
        return sent.framed.repeat if sent.arrived.result() else message

    def arrived(self) -> None:
        """The member has confirmed that the message arrived."""
        if self._first is not None:
            self._first.settle(True)
            self._first = None

    def close(self) -> None:
        """The stream is over, so its unconfirmed message counts as not sent."""
        if self._first is not None:
            self._first.settle(False)


# How one message goes to many members: serialized once, and a large one to some of them at a time.
#
# A world of n members goes to n members. Serialized for each, and all at once, forming a world of 4,096 took seconds of
# processor time and two gigabytes of buffers for one message of 370 KB.

KEPT = 8
KEPT_FROM_BYTES = 1 << 10
LARGE_BYTES = 64 << 10
LARGE_AT_ONCE_BYTES = 64 << 20  # bytes of large messages that peers have not taken yet
PATIENCE_S = 1.0  # seconds after which a peer that does not read keeps others waiting no longer


def as_bytes(message: Message | bytes) -> bytes:
    """gRPC's serializer for streams some of whose messages are bytes already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


class Serializer:
    """The bytes of a message. Equal answers for many members are one object, which must not be changed any more."""

    def __init__(self) -> None:
        # Id() of a message -> the message, which keeps that id() taken, and its bytes.
        self._recent: OrderedDict[int, tuple[Message, bytes]] = OrderedDict()

    def __call__(self, message: Message) -> bytes:
        found = self._recent.get(id(message))
        if found is not None:
            return found[1]
        data = message.SerializeToString()
        if len(data) >= KEPT_FROM_BYTES:
            self._recent[id(message)] = (message, data)
            if len(self._recent) > KEPT:
                self._recent.popitem(last=False)
        return data


class Turns:
    """Bounds the bytes of large messages under way; of small ones it is the peers' outboxes that do."""

    def __init__(self, most_bytes: int = LARGE_AT_ONCE_BYTES, patience_s: float = PATIENCE_S) -> None:
        self._most_bytes = most_bytes
        self._patience_s = patience_s
        self._bytes = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """A turn to write a message of `size` bytes; held while it is being written."""
        if size < LARGE_BYTES:
            yield
            return
        while self._bytes and self._bytes + size > self._most_bytes:
            self._freed.clear()
            await self._freed.wait()
        self._bytes += size
        held = True

        def free() -> None:
            nonlocal held
            if held:
                held = False
                self._bytes -= size
                self._freed.set()

        patience = asyncio.get_running_loop().call_later(self._patience_s, free)
        try:
            yield
        finally:
            patience.cancel()
            free()


class Sending:
    """The serializer and the turns that all streams of a coordinator share."""

    def __init__(self) -> None:
        self.serializer = Serializer()
        self.turns = Turns()
        self.repeats = Repeats()
