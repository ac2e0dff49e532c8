"""The Membership service: one stream for each member, which is its life line."""

from collections.abc import AsyncIterator

import grpc

from horovod.protos.v1 import membership_pb2 as pb
from horovod.protos.v1.membership_pb2_grpc import MembershipServicer

from .hub import EventOutbox, Hub
from .outbox import Outbox
from .streams import Context, RefusedError, converse, first_message

MAX_EVENTS = 1 << 16  # a world may lose all its members at once

_BROKEN = (
    "its connection to the coordinator ended without a goodbye; the process died or was killed (see its output), or "
    "the network between them broke"
)


class MembershipService(MembershipServicer):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Join(  # type: ignore[override]  # noqa: N802 - the contract's name; grpc.aio also takes a coroutine
        self, request_iterator: AsyncIterator[pb.MemberMessage], context: Context
    ) -> None:
        first = await first_message(request_iterator, context, "a join request")
        if not first.HasField("join"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The first message must be a join request.")
        events: EventOutbox = Outbox(MAX_EVENTS)
        refusal = self._hub.join(first.join, events)
        if refusal:
            await context.write(pb.MembershipEvent(refused=pb.Refused(sentence=refusal)))
            return
        member_id = first.join.member_id

        def receive(message: pb.MemberMessage) -> None:
            if message.HasField("heartbeat"):
                sentence = self._hub.heartbeat(member_id, message.heartbeat.epoch)
                if sentence:
                    events.put(pb.MembershipEvent(refused=pb.Refused(sentence=sentence)))
                    events.close()
                else:
                    events.put(pb.MembershipEvent(heartbeat=message.heartbeat))
            elif message.HasField("leave"):
                self._hub.leave(member_id, message.leave.reason[:1000])
            else:
                raise RefusedError(
                    grpc.StatusCode.INVALID_ARGUMENT, "After joining, a member sends heartbeats and its goodbye only."
                )

        try:
            await converse(request_iterator, context, events, receive, lambda items: items)
        finally:
            self._hub.lost(member_id, _BROKEN)
