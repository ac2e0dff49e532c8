"""What a relay keeps of the messages that pass by, for the other ranks of its host (protos/v1/relay.proto)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from google.protobuf.message import DecodeError

from horovod.base.limits import MAX_WORLD_MESSAGE_BYTES
from horovod.protos.v1.relay_pb2 import RelayFrame

# In a call's metadata for the coordinator: an id of this relay. In the metadata that come back: RelayFrames may come.
RELAY = "horovod-relay"
MARK = b"\0"  # before a RelayFrame
KEPT_S = 180.0  # longer than coordinators count on it
KEPT_BYTES = MAX_WORLD_MESSAGE_BYTES  # of all messages, and the latest in any case


class Repeated:
    """The messages of one coordinator's connection that it may ask to be repeated, for a while."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # key -> message, the latest last

    def passing(self, message: bytes) -> bytes:
        """The message to pass on to the rank. ValueError with a sentence where there is none."""
        if not message.startswith(MARK):
            return message
        try:
            frame = RelayFrame.FromString(message[len(MARK) :])
        except DecodeError:
            raise ValueError("The coordinator has sent what this version's relay can't read.") from None
        if frame.message:
            self._kept[frame.key] = frame.message
            asyncio.get_running_loop().call_later(KEPT_S, self._kept.pop, frame.key, None)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
        if frame.key not in self._kept:
            raise ValueError("The agent's relay does not have a message any more that the coordinator wants repeated.")
        return self._kept[frame.key]
