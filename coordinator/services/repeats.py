"""A world crosses to each host once: the relay of its agent keeps it, and is told to repeat it for its other members.

Of the streams that come through one relay (worker/agent/relay.py) the first gets the message with a key, and the others
get the key alone once its member has said that the message arrived: by then the relay has it. Where the first one is
slow or breaks, all get the message itself.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections import OrderedDict

from horovod.protos.v1.relay_pb2 import RelayFrame

REPEATED_FROM_BYTES = 16 << 10
ARRIVAL_S = 30.0  # seconds for the first member to get the message; a world can do nothing without it anyway
FORGOTTEN_S = 60.0  # seconds after which a message is sent in full again; a relay keeps it for longer
MAX_KEPT_BYTES = 64 << 20  # of all jobs' messages; beyond that the oldest are forgotten, and sent anew
MAX_SENT = 1 << 16  # entries about messages that relays have

RELAY = "horovod-relay"  # in a call's metadata: an id of the relay that it came through. In the answer: see relay.proto
MARK = b"\0"  # the first byte of a message that is a RelayFrame


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
        self.keep = MARK + RelayFrame(key=key, message=message).SerializeToString()
        self.repeat = MARK + RelayFrame(key=key).SerializeToString()


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
