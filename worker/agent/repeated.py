"""Messages that a relay keeps after it has passed them on: other ranks of its host get the same (relay.proto)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from google.protobuf.message import DecodeError

from horovod.base.errors import ClusterCode, coded
from horovod.base.limits import MAX_WORLD_MESSAGE_BYTES
from horovod.protos.v1.relay_pb2 import RelayFrame

# The relay sends this in a call's metadata, with its id. Coordinators that answer with it may send RelayFrames.
RELAY = "horovod-relay"
MARK = b"\0"  # the first byte of what holds a RelayFrame
KEPT_S = 180.0  # longer than a coordinator counts on a message being kept
KEPT_BYTES = MAX_WORLD_MESSAGE_BYTES  # of all messages together; the latest one is kept in any case


class Repeated:
    """The latest messages of one coordinator, which it may ask the relay to repeat to other ranks."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # key -> message, the latest last

    def passing(self, message: bytes) -> bytes:
        """The message to pass on to the rank: `message`, or the one that the RelayFrame in it names.

        ValueError with a sentence where there is none.
        """
        if not message.startswith(MARK):
            return message
        try:
            frame = RelayFrame.FromString(message[len(MARK) :])
        except DecodeError:
            sentence = "The coordinator has sent what this version's relay can't read."
            raise ValueError(coded(ClusterCode.RELAY_REFUSED, sentence)) from None
        if frame.message:
            self._kept[frame.key] = frame.message
            asyncio.get_running_loop().call_later(KEPT_S, self._kept.pop, frame.key, None)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
        if frame.key not in self._kept:
            sentence = "The agent's relay does not have a message any more that the coordinator wants repeated."
            raise ValueError(coded(ClusterCode.RELAY_REFUSED, sentence))
        return self._kept[frame.key]
