"""The Membership service: one stream for each member.

A member whose stream breaks may come back (core/world/life.py).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import grpc

from horovod.base.errors import ClusterCode, coded, coded_like, without_code
from horovod.base.protocol import RELAY
from horovod.base.tasks import end_tasks
from horovod.base.telemetry import tracing
from horovod.base.words import printable
from horovod.coordinator.core.world.checks import defect_of, refusal_of, refusal_of_attach
from horovod.coordinator.store import StoreError
from horovod.protos.v1 import membership_pb2 as pb

from .auth import Access
from .hub import EventOutbox, Hub
from .sending import Outbox, Sending
from .streams import MAX_SHOWN, Context, RefusedError, converse, first_message, own_errors

_log = logging.getLogger(__name__)

TOLD_AFTER_S = 1.0  # a process that waits longer than this to join is told why
# Where a connection ends, gRPC ends the stream's requests and cancels its handler, in either order: so soon after it.
_CANCELLED_WITHIN_S = 0.5
MAX_EVENTS = 1 << 16  # events that may wait for one member; a world may lose all its members at once

_NONSENSE = coded(
    ClusterCode.WRONG_MESSAGE,
    "After joining, a member says that it has its world, what it knows of its peers, that it goes, and its goodbye.",
)


class MembershipService:
    def __init__(self, hub: Hub, access: Access, sending: Sending) -> None:
        self._hub = hub
        self._access = access
        self._sending = sending

    async def Join(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[pb.MemberMessage], context: Context
    ) -> None:
        first = await first_message(request_iterator, context, "a join request")
        events: EventOutbox = Outbox(MAX_EVENTS)
        if first.HasField("join"):
            member_id, job = first.join.member_id, first.join.job
        elif first.HasField("attach"):
            member_id, job = first.attach.member_id, first.attach.job
        else:
            sentence = coded(ClusterCode.WRONG_MESSAGE, "The first message must be a join request.")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        await self._access.admit(context, job)
        relay = str(dict(context.invocation_metadata() or ()).get(RELAY, ""))
        relayed = self._sending.repeats.of(relay[:MAX_SHOWN], job)
        if relayed.is_relayed:
            await context.send_initial_metadata(((RELAY, "frames"),))
        who = f"member {member_id[:MAX_SHOWN]!r} of job {job[:MAX_SHOWN]!r}"
        refused = _obstacle(first)  # checked first: a request may make no sense, whatever the state of the job
        if refused is None:
            await self._be_served(job, context, who, first.unreachable, joins=first.HasField("join"))
        else:
            _log.info("Refused: %s", refused.sentence)
            self._hub.metrics.refusals.add(1, "attach" if first.HasField("attach") else "join")
        kind = first.WhichOneof("message")
        span = tracing.begin(
            f"horovod.coordinator.{kind}", tracing.from_metadata(context.invocation_metadata()), job=job
        )
        nonce = b""
        async with own_errors(context, who):
            if refused is not None:
                pass
            elif first.HasField("attach"):
                challenge = self._hub.challenge(first.attach)
                nonce, refused = (challenge, None) if isinstance(challenge, bytes) else (b"", challenge)
            elif sentence := self._hub.join(first.join, events, context.peer()):
                refused = pb.Refused(sentence=sentence)
        if nonce:
            await context.write(pb.MembershipEvent(challenge=pb.Challenge(nonce=nonce)))
            answer = await first_message(request_iterator, context, "the proof that the challenge asks for")
            await self._be_served(job, context, who)  # another coordinator may have taken the job meanwhile
            async with own_errors(context, who):
                refused = self._hub.attach(first.attach, nonce, answer.proof.proof, events, context.peer())
        if refused is not None:
            span.end(refused.sentence)
            await context.write(pb.MembershipEvent(refused=refused))
            return
        if kind == "attach":
            span.end()

        def combine(items: list[pb.MembershipEvent]) -> Iterator[pb.MembershipEvent]:
            if any(item.HasField("world") for item in items):
                span.end()
            return with_latest_progress(items)

        returns = False

        def receive(message: pb.MemberMessage) -> None:
            nonlocal returns
            if sentence := defect_of(message):
                raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, coded(ClusterCode.WRONG_MESSAGE, sentence))
            if message.HasField("received"):
                relayed.arrived()
                self._hub.received(member_id, message.received.epoch)
            elif any(message.HasField(name) for name in ("peer_lost", "unconnected", "work")):
                self._hub.reported(member_id, message)
            elif message.HasField("testimony"):
                self._hub.testified(member_id, message.testimony)
            elif message.HasField("leave"):
                leave, returns = message.leave, message.leave.returns
                self._hub.leave(member_id, printable(leave.reason), returns=leave.returns, failed=leave.failed)
            elif message.HasField("leaving"):
                message.leaving.reason = printable(message.leaving.reason)
                self._hub.reported(member_id, message)
            else:
                # A member whose message makes no sense has no use for another stream either.
                events.fail(grpc.StatusCode.INVALID_ARGUMENT, _NONSENSE)
                self._hub.lost(member_id, "it broke the protocol between members and coordinator; this is a bug of it")
                raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, _NONSENSE)

        broke = False
        try:
            limits, sending = self._access.limits, self._sending
            await converse(request_iterator, context, events, receive, combine, sending, who, limits, relayed, job)
            if returns:  # if the member does not return, it makes no difference how the stream has ended
                await asyncio.sleep(_CANCELLED_WITHIN_S)
        except asyncio.CancelledError:
            broke = True
            raise
        finally:
            relayed.close()
            span.end("the stream ended before the world stood")
            self._hub.disconnected(member_id, events, broke=broke)

    async def _be_served(
        self, job: str, context: Context, who: str, unreachable: str = "", joins: bool = False
    ) -> None:
        """Ends the stream unless this coordinator serves the job; a process that joins is told why it has to wait.

        The job is served when this returns, and until the caller awaits something else. A job is released when its last
        member has gone, which may be just now: a process that joined a job which nobody serves would wait for ever.
        """
        while True:
            if address := await self._who_serves(job, context, who, unreachable, joins):
                await context.write(pb.MembershipEvent(redirect=pb.Redirect(address=address)))
                sentence = coded(ClusterCode.NOT_SERVED_HERE, f"The job is served by {address}.")
                await context.abort(grpc.StatusCode.UNAVAILABLE, sentence)
            if self._hub.serving.guard(job) is not None:
                return

    async def _who_serves(self, job: str, context: Context, who: str, unreachable: str, joins: bool) -> str:
        """As `Hub.serve`, which may have to wait for the store."""
        asking = asyncio.get_running_loop().create_task(self._hub.serve(job, unreachable, joins))
        try:
            async with own_errors(context, who):
                if joins and not (await asyncio.wait({asking}, timeout=TOLD_AFTER_S))[0]:
                    sentence = "it asks its store who serves the job, and has had no answer yet"
                    await context.write(pb.MembershipEvent(progress=pb.Progress(sentence=sentence)))
                return await asking
        except StoreError as error:
            sentence = coded_like(error, f"{without_code(error)} Without it no job can be served.")
            await context.abort(grpc.StatusCode.UNAVAILABLE, sentence)
        finally:
            await end_tasks([asking])

    async def Serves(self, request: pb.ServesRequest) -> pb.ServesAnswer:  # noqa: N802
        serving = self._hub.serving
        return pb.ServesAnswer(replica=serving.replica, serves=serving.claims(request.job))

    async def Attendance(self, request: pb.AttendanceRequest) -> pb.AttendanceAnswer:  # noqa: N802
        found = self._hub.attendance(request.job)
        if found is None:
            return pb.AttendanceAnswer()
        return pb.AttendanceAnswer(serves=True, connected=found.connected, away=found.away, lost=found.lost)


def _obstacle(first: pb.MemberMessage) -> pb.Refused | None:
    if first.HasField("attach"):
        sentence, reason = refusal_of_attach(first.attach), pb.REFUSAL_REASON_UNKNOWN_WORLD
    else:
        sentence, reason = refusal_of(first.join), pb.REFUSAL_REASON_JOIN
    return pb.Refused(sentence=sentence, reason=reason) if sentence else None


def with_latest_progress(items: list[pb.MembershipEvent]) -> Iterator[pb.MembershipEvent]:
    """All events in order, but of those about progress only the latest."""
    latest = next((item for item in reversed(items) if item.HasField("progress")), None)
    return (item for item in items if item is latest or not item.HasField("progress"))
