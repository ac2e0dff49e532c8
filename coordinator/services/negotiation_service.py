"""The Negotiation service: announcements in, decisions out."""

from collections.abc import AsyncIterator, Iterator

import grpc

from horovod.base.errors import ClusterCode, OperationCode, coded
from horovod.base.telemetry import tracing
from horovod.base.words import printable
from horovod.coordinator.core.agreement.budget import TooMuchError
from horovod.coordinator.core.agreement.takeover import ContradictionError
from horovod.protos.v1 import negotiation_pb2 as pb

from .auth import Access
from .hub import Hub
from .negotiation_session import DecisionsOutbox
from .sending import Outbox, Sending
from .streams import MAX_SHOWN, Context, RefusedError, converse, first_message, own_errors

MAX_DECISIONS = 1 << 14  # messages that may wait until one member reads them
MAX_MESSAGE_BYTES = 1 << 20  # well below the 4 MiB that gRPC takes unless told otherwise


class NegotiationService:
    def __init__(self, hub: Hub, access: Access, sending: Sending) -> None:
        self._hub = hub
        self._access = access
        self._sending = sending

    async def Negotiate(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[pb.NegotiationMessage], context: Context
    ) -> None:
        first = await first_message(request_iterator, context, "a hello")
        if not first.HasField("hello"):
            sentence = coded(ClusterCode.WRONG_MESSAGE, "The first message must have a hello.")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        await self._access.admit(context, first.hello.job)
        parent = tracing.from_metadata(context.invocation_metadata())
        decisions: DecisionsOutbox = Outbox(MAX_DECISIONS)
        rank = first.hello.rank
        who = f"rank {rank} of job {first.hello.job[:MAX_SHOWN]!r}"
        async with own_errors(context, who):
            session = self._hub.open_session(first, decisions)
        if isinstance(session, RefusedError):
            await context.abort(session.code, printable(str(session)))

        span: tracing.Span | None = None  # from the first announcement of this stream to its first plan

        def combine(items: list[pb.Decisions]) -> Iterator[pb.Decisions]:
            if span is not None and any(item.plans for item in items):
                span.end()
            return combined(items)

        def receive(message: pb.NegotiationMessage) -> Iterator[None]:
            if message.epoch != session.epoch:
                sentence = (
                    f"Rank {rank} speaks of world {message.epoch}, but its stream belongs to world {session.epoch}."
                )
                raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, coded(OperationCode.CONTRADICTION, sentence))
            if decisions.ended.is_set():
                return  # the world is over or the rank has opened a newer stream
            nonlocal span
            if span is None and message.announce:
                span = tracing.begin("horovod.coordinator.negotiation", parent, job=session.job, rank=rank)
            try:
                yield from self._hub.negotiate(session, rank, message)
            except TooMuchError as error:
                raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
            except ContradictionError as error:
                raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error

        async def all_requests() -> AsyncIterator[pb.NegotiationMessage]:
            yield first
            async for message in request_iterator:
                yield message

        try:
            await converse(
                all_requests(),
                context,
                decisions,
                receive,
                combine,
                self._sending,
                who,
                self._access.limits,
                job=session.job,
            )
        finally:
            if span is not None:
                span.end("the stream ended before there was a plan")
            self._hub.close_session(session, rank, decisions)


def combined(items: list[pb.Decisions]) -> Iterator[pb.Decisions]:
    """The decisions in as few messages as the bound allows, in order. `items` are other streams' too."""
    if len(items) == 1 and items[0].ByteSize() <= MAX_MESSAGE_BYTES:
        yield items[0]
        return
    message, used_bytes = pb.Decisions(epoch=items[0].epoch, term=items[0].term), 0
    for item in items:
        for part in [item] if item.ByteSize() <= MAX_MESSAGE_BYTES else _entries(item):
            part_bytes = part.ByteSize()
            if used_bytes and used_bytes + part_bytes > MAX_MESSAGE_BYTES:
                yield message
                message, used_bytes = pb.Decisions(epoch=item.epoch, term=item.term), 0
            message.MergeFrom(part)
            used_bytes += part_bytes
    yield message


def _entries(item: pb.Decisions) -> Iterator[pb.Decisions]:
    """Each entry as a message of its own."""
    for plan in item.plans:
        yield pb.Decisions(epoch=item.epoch, plans=[plan])
    for error in item.errors:
        yield pb.Decisions(epoch=item.epoch, errors=[error])
    for recall in item.recalls:
        yield pb.Decisions(epoch=item.epoch, recalls=[recall])
    for warning in item.warnings:
        yield pb.Decisions(epoch=item.epoch, warnings=[warning])
    for join in item.joins:
        yield pb.Decisions(epoch=item.epoch, joins=[join])
    if item.shutdown:
        yield pb.Decisions(epoch=item.epoch, shutdown=item.shutdown)
