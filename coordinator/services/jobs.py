"""The Jobs service: what `horovodrun --coordinator` asks for."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from horovod.base.errors import ClusterCode, coded
from horovod.base.words import printable
from horovod.coordinator.store import StoreError, TooLargeError, WritesRefusedError
from horovod.protos.v1 import jobs_pb2 as pb

from .auth import Access
from .cluster import ClusterHub, NotServingError, check_serving, send_on
from .follower import MAX_EVENTS, Follower, JobOutbox, with_latest_record
from .sending import Outbox, Sending
from .streams import MAX_SHOWN, Context, RefusedError, converse, first_message, own_errors

LISTED_JOBS = 50  # jobs that are over which a listing has, unless the client asks for another number
_SIGNALS = range(1, 65)

Answer = TypeVar("Answer")


class JobsService:
    def __init__(self, hub: ClusterHub, access: Access, sending: Sending) -> None:
        self._hub = hub
        self._access = access
        self._sending = sending

    async def Submit(self, request: pb.JobSpec, context: Context) -> pb.JobRecord:  # noqa: N802
        await self._access.admit(context, None, request.ByteSize())
        await check_serving(self._hub, context)
        record = await self._decided(context, self._hub.submit(request))
        if isinstance(record, str):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, record)
        return record

    async def Place(self, request: pb.JobSpec, context: Context) -> pb.JobRecord:  # noqa: N802
        await self._access.admit(context, None, request.ByteSize())
        await check_serving(self._hub, context)
        async with own_errors(context, "a client"):
            record = self._hub.placement(request)
        if isinstance(record, str):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, record)
        return record

    async def FindCode(self, request: pb.Code, context: Context) -> pb.CodeFound:  # noqa: N802
        return await self._about_code(context, request.ByteSize(), lambda: self._hub.code.find(request))

    async def PutCode(self, request: pb.CodeChunk, context: Context) -> pb.CodeFound:  # noqa: N802
        return await self._about_code(context, request.ByteSize(), lambda: self._hub.code.put(request))

    async def _about_code(
        self, context: Context, size_bytes: int, work: Callable[[], pb.CodeFound | Awaitable[pb.CodeFound]]
    ) -> pb.CodeFound:
        await self._access.admit(context, None, size_bytes)
        await check_serving(self._hub, context)
        found = pb.CodeFound()
        try:
            async with own_errors(context, "a client"):
                try:
                    answer = work()
                    found = answer if isinstance(answer, pb.CodeFound) else await answer
                except RefusedError as error:
                    await context.abort(error.code, str(error))
        except StoreError as error:
            await context.abort(_status_of(error), f"The store does not take the code now: {error}")
        return found

    async def Follow(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.FollowMessage], context: Context
    ) -> None:
        first = await first_message(request_iterator, context, "the job to follow")
        await self._access.admit(context, None)
        await check_serving(self._hub, context)
        job = first.open.job
        if job not in self._hub.cluster.jobs:
            await context.abort(grpc.StatusCode.NOT_FOUND, unknown(job))
        events: JobOutbox = Outbox(MAX_EVENTS)
        follower = Follower(first.open, events)
        who = f"a client of job {printable(job, MAX_SHOWN)}"

        def receive(message: pb.FollowMessage) -> None:
            if not message.HasField("taken"):
                sentence = coded(ClusterCode.WRONG_MESSAGE, "A follower says what it has taken only.")
                raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, sentence)
            self._hub.taken(follower, message.taken)

        try:
            async with own_errors(context, who):
                self._hub.follow(follower)
            sending, limits = self._sending, self._access.limits
            await converse(request_iterator, context, events, receive, with_latest_record, sending, who, limits)
        finally:
            self._hub.unfollow(follower)

    async def List(self, request: pb.ListRequest, context: Context) -> pb.Listing:  # noqa: N802
        await self._access.admit(context, None)
        await check_serving(self._hub, context)
        if not request.job:
            most = request.most or LISTED_JOBS
            found = self._hub.listing(most)
            found.worlds.extend(await self._hub.worlds(most))
            return found
        try:
            one = await self._hub.listing_of(request.job)
        except StoreError as error:
            await context.abort(_status_of(error), f"What has happened to the job can't be read: {error}")
        if one is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, unknown(request.job))
        return one

    async def Signal(self, request: pb.SignalRequest, context: Context) -> pb.JobRecord:  # noqa: N802
        await self._access.admit(context, None, request.ByteSize())
        if request.signal not in _SIGNALS:
            sentence = coded(ClusterCode.WRONG_MESSAGE, f"There is no signal {request.signal}.")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        await check_serving(self._hub, context)
        record = await self._decided(context, self._hub.signal(request.job, request.signal, request.stop))
        if record is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, unknown(request.job))
        return record

    async def _decided(self, context: Context, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The answer. Ends the call if this coordinator has ceased to serve meanwhile; the client asks the next one."""
        try:
            async with own_errors(context, "a client"):
                with contextlib.suppress(NotServingError):
                    return await work
        except StoreError as error:
            await context.abort(_status_of(error), f"What was asked for can't be recorded: {error}")
        await send_on(self._hub, context)
        raise AssertionError("abort raises")


def _status_of(error: StoreError) -> grpc.StatusCode:
    """The status for a refusal, by which the client knows whether it helps to ask again."""
    is_final = isinstance(error, TooLargeError | WritesRefusedError)
    return grpc.StatusCode.FAILED_PRECONDITION if is_final else grpc.StatusCode.UNAVAILABLE


def unknown(job: str) -> str:
    """The sentence for a job that does not exist."""
    return coded(
        ClusterCode.UNKNOWN_JOB,
        f"There is no job {printable(job, MAX_SHOWN)!r} here: `horovodrun ps` shows those that there are. The last 200 "
        "that are over are kept.",
    )
