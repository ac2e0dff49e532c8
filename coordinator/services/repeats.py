"""A world crosses to each host once: the relay of its agent keeps it, and is told to repeat it for its other members.

Of the streams that come through one relay (worker/agent/relay.py) the first gets the message with a key, and the others
get the key alone once its member has said that the message arrived: by then the relay has it. Where the first one is
slow or breaks, all get the message itself.
"""

from __future__ import annotations

import asyncio
import secrets

from horovod.protos.v1.relay_pb2 import RelayFrame

REPEATED_FROM_BYTES = 16 << 10
ARRIVAL_S = 30.0  # for the first member to have the message; a world can do nothing without it anyway
FORGOTTEN_S = 60.0  # after which a message is sent anew; a relay keeps it for longer

RELAY = "horovod-relay"  # in a call's metadata: an id of the relay that it came through. In the answer: see relay.proto
MARK = b"\0"  # before a RelayFrame


class Repeats:
    """Which messages each relay has. Used in one event loop."""

    def __init__(self, arrival_s: float = ARRIVAL_S) -> None:
        self._arrival_s = arrival_s
        # By message; one message is one object, whatever the number of its members, so its hash is known. And one
        # frame for all relays is one object.
        self._framed: dict[bytes, _Framed] = {}
        self._sent: dict[tuple[str, bytes], _Sent] = {}  # (relay, message) -> whether it has arrived there

    def of(self, relay: str) -> RelayedStream:
        """The repeats for one stream. relay: its id; empty for a stream that comes without a relay."""
        return RelayedStream(self, relay)

    def begin(self, relay: str, message: bytes) -> tuple[_Sent, bool]:
        """The entry of this message at this relay, and whether it was made just now."""
        found = self._sent.get((relay, message))
        if found is not None:
            return found, False
        loop = asyncio.get_running_loop()
        framed = self._framed.get(message)
        if framed is None:
            framed = self._framed[message] = _Framed(message)
            loop.call_later(FORGOTTEN_S, self._framed.pop, message, None)
        sent = self._sent[relay, message] = _Sent(framed, loop.create_future())
        loop.call_later(self._arrival_s, sent.settle, False)
        loop.call_later(FORGOTTEN_S, self._sent.pop, (relay, message), None)
        return sent, True


class _Framed:
    def __init__(self, message: bytes) -> None:
        key = secrets.randbits(64)
        self.keep = MARK + RelayFrame(key=key, message=message).SerializeToString()
        self.repeat = MARK + RelayFrame(key=key).SerializeToString()


class _Sent:
    def __init__(self, framed: _Framed, arrived: asyncio.Future[bool]) -> None:
        self.framed = framed
        self.arrived = arrived

    def settle(self, arrived: bool) -> None:
        if not self.arrived.done():
            self.arrived.set_result(arrived)


class RelayedStream:
    def __init__(self, repeats: Repeats, relay: str) -> None:
        self._repeats = repeats
        self._relay = relay
        self._first: _Sent | None = None  # the message that this stream brings to the relay

    @property
    def is_relayed(self) -> bool:
        return bool(self._relay)

    async def shortened(self, message: bytes) -> bytes:
        """What to write in place of `message`, whose arrival the member will confirm."""
        if not self._relay or len(message) < REPEATED_FROM_BYTES:
            return message
        sent, is_first = self._repeats.begin(self._relay, message)
        if is_first:
            self._first = sent
            return sent.framed.keep
        await asyncio.wait([sent.arrived])
        return sent.framed.repeat if sent.arrived.result() else message

    def arrived(self) -> None:
        """The member has confirmed that the message arrived."""
        if self._first is not None:
            self._first.settle(True)

    def close(self) -> None:
        """The stream is over, so its unconfirmed message counts as not sent."""
        if self._first is not None:
            self._first.settle(False)
