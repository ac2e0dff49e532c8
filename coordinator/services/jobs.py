"""The Jobs service: what `horovodrun --coordinator` asks for."""

from collections.abc import AsyncIterator
from typing import TypeVar

import grpc

from horovod.base.errors import ClusterCode, coded
from horovod.base.words import printable
from horovod.protos.v1 import jobs_pb2 as pb

from .auth import Access
from .calls import check_release
from .cluster import ClusterHub, check_serving
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

    async def Submit(self, request: pb.JobSpec) -> pb.JobRecord:  # noqa: N802
        return _taken(await self._hub.submit(request))

    async def Place(self, request: pb.JobSpec) -> pb.JobRecord:  # noqa: N802
        return _taken(self._hub.placement(request))

    async def FindCode(self, request: pb.Code) -> pb.CodeFound:  # noqa: N802
        return self._hub.code.find(request)

    async def PutCode(self, request: pb.CodeChunk) -> pb.CodeFound:  # noqa: N802
        return await self._hub.code.put(request)

    async def Follow(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.FollowMessage], context: Context
    ) -> None:
        first = await first_message(request_iterator, context, "the job to follow")
        await self._access.admit(context, None)
        await check_release(context)
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

    async def List(self, request: pb.ListRequest) -> pb.Listing:  # noqa: N802
        if request.job:
            return _known(await self._hub.listing_of(request.job), request.job)
        most = request.most or LISTED_JOBS
        found = self._hub.listing(most)
        found.worlds.extend(await self._hub.worlds(most))
        return found

    async def Signal(self, request: pb.SignalRequest) -> pb.JobRecord:  # noqa: N802
        if request.signal not in _SIGNALS:
            sentence = coded(ClusterCode.WRONG_MESSAGE, f"There is no signal {request.signal}.")
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        return _known(await self._hub.signal(request.job, request.signal, request.stop), request.job)


def _taken(answer: pb.JobRecord | str) -> pb.JobRecord:
    """RefusedError for the sentence why a job is not taken."""
    if isinstance(answer, str):
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, answer)
    return answer


def _known(answer: Answer | None, job: str) -> Answer:
    if answer is None:
        raise RefusedError(grpc.StatusCode.NOT_FOUND, unknown(job))
    return answer


def unknown(job: str) -> str:
    """The sentence for a job that does not exist."""
    return coded(
        ClusterCode.UNKNOWN_JOB,
        f"There is no job {printable(job, MAX_SHOWN)!r} here: `horovodrun ps` lists the known jobs. Of ended "
        "jobs, the latest 200 are kept.",
    )
