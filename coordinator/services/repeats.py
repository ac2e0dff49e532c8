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
ARRIVAL_S = 10.0  # for the first member to have the message; a world can do nothing without it anyway
FORGOTTEN_S = 20.0  # after which a message is sent anew; a relay keeps it for longer

RELAY = "horovod-relay"  # in a call's metadata: an id of the relay that it came through. In the answer: see relay.proto
MARK = b"\0"  # before a RelayFrame


class Repeats:
    """What relays have. Used in one event loop."""

    def __init__(self, arrival_s: float = ARRIVAL_S) -> None:
        self._arrival_s = arrival_s
        # By relay and message. One message is one object, whatever the number of its members, so its hash is known.
        self._sent: dict[tuple[str, bytes], _Sent] = {}

    def of(self, relay: str) -> RelayedStream:
        """For one stream. relay: the id; empty for a stream that comes directly."""
        return RelayedStream(self, relay)

    def begin(self, relay: str, message: bytes) -> tuple[_Sent, bool]:
        """What is known of this message and relay, and whether that is new."""
        found = self._sent.get((relay, message))
        if found is not None:
            return found, False
        loop = asyncio.get_running_loop()
        sent = self._sent[relay, message] = _Sent(secrets.randbits(64), loop.create_future())
        loop.call_later(self._arrival_s, sent.settle, False)
        loop.call_later(FORGOTTEN_S, self._sent.pop, (relay, message), None)
        return sent, True


class _Sent:
    def __init__(self, key: int, arrived: asyncio.Future[bool]) -> None:
        self.key = key
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
            return MARK + RelayFrame(key=sent.key, message=message).SerializeToString()
        await asyncio.wait([sent.arrived])
        return MARK + RelayFrame(key=sent.key).SerializeToString() if sent.arrived.result() else message

    def arrived(self) -> None:
        """The member has confirmed it."""
        if self._first is not None:
            self._first.settle(True)

    def close(self) -> None:
        """The stream is over."""
        if self._first is not None:
            self._first.settle(False)
