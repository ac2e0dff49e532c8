"""How a launcher bears coordinators that do not answer, or break off."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
import pytest
from error_codes import ends_with

from horovod.base.errors import AccessCode, ClusterCode, code_of
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.launch.cluster.client import Access, ClusterClient, ClusterError
from horovod.protos.v1 import jobs_pb2

LOOK = "`horovodrun ps`"  # which shows what may have been done


def test_a_submission_without_an_answer_may_have_been_taken() -> None:
    async def submit() -> None:
        async with ClusterClient(Access(["127.0.0.1:1", "127.0.0.1:2"]), patience_s=0.0) as cluster:
            silent = ends_with(ClusterCode.CLUSTER_SILENT, "127.0.0.1:1, 127.0.0.1:2")
            with pytest.raises(ClusterError, match=silent) as caught:
                await cluster.submit(jobs_pb2.JobSpec(command=["true"], processes=1))
            assert LOOK in str(caught.value)
            with pytest.raises(ClusterError, match=silent) as caught:
                await cluster.listing()
            assert LOOK not in str(caught.value)

    asyncio.run(submit())


def test_a_refused_connection_is_an_answer() -> None:
    """Of every address, and before any coordinator has answered: one that is started again gets its time."""

    async def follow(cluster: ClusterClient) -> None:
        async def output(one: jobs_pb2.Output) -> None:
            raise AssertionError

        await cluster.follow(jobs_pb2.Open(job="j"), lambda record: None, output)

    async def ask() -> None:
        addresses = ["127.0.0.1:1", "127.0.0.1:2"]
        for question in (ClusterClient.listing, follow):
            async with ClusterClient(Access(addresses), patience_s=600, refused_s=0.0) as cluster:
                silent = ends_with(ClusterCode.CLUSTER_SILENT, "127.0.0.1:1, 127.0.0.1:2", "refused")
                with pytest.raises(ClusterError, match=silent):
                    await asyncio.wait_for(question(cluster), 60)
        # A coordinator at one address is found, though the other one refuses.
        with EmbeddedCoordinator(token="t") as coordinator:
            access = Access(["127.0.0.1:1", coordinator.address], "t")
            async with ClusterClient(access, patience_s=600, refused_s=0.0) as cluster:
                assert not (await asyncio.wait_for(cluster.listing(), 60)).jobs

    asyncio.run(ask())


Servant = Callable[[Any, Any], Coroutine[Any, Any, Any]]


def served(
    body: Callable[[ClusterClient], Awaitable[None]], patience_s: float, follow_s: float = 60.0, **methods: Servant
) -> None:
    """A coordinator that answers by `methods`, of the request (or requests) and the context."""

    async def main() -> None:
        handlers = {
            "Submit": lambda servant: grpc.unary_unary_rpc_method_handler(
                servant, jobs_pb2.JobSpec.FromString, jobs_pb2.JobRecord.SerializeToString
            ),
            "Follow": lambda servant: grpc.stream_stream_rpc_method_handler(
                servant, jobs_pb2.FollowMessage.FromString, jobs_pb2.JobEvent.SerializeToString
            ),
        }
        made = {name: handlers[name](servant) for name, servant in methods.items()}
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("horovod.v1.Jobs", made),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with ClusterClient(Access([address]), patience_s, follow_s=follow_s, told_s=0.0) as cluster:
                await asyncio.wait_for(body(cluster), 60)
        finally:
            await server.stop(None)

    asyncio.run(main())


def test_a_submission_is_repeated_under_the_same_name() -> None:
    seen: list[str] = []

    async def submit(spec: jobs_pb2.JobSpec, context: Any) -> jobs_pb2.JobRecord:
        seen.append(spec.submission)
        if len(seen) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        if spec.name == "refused":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Not that.")
        return jobs_pb2.JobRecord(id="j")

    async def body(cluster: ClusterClient) -> None:
        assert (await cluster.submit(jobs_pb2.JobSpec(name="taken"))).id == "j"
        assert len(seen) == 2
        assert len(set(seen)) == 1
        seen.clear()
        refused = ends_with(ClusterCode.CLUSTER_REFUSES, "Not that.")
        with pytest.raises(ClusterError, match=refused) as caught:
            await cluster.submit(jobs_pb2.JobSpec(name="refused"))
        assert LOOK in str(caught.value)
        with pytest.raises(ClusterError, match=refused) as caught:
            await cluster.submit(jobs_pb2.JobSpec(name="refused"))
        assert LOOK not in str(caught.value)

    served(body, 60.0, Submit=submit)


def test_the_code_of_a_refusal_is_kept() -> None:
    async def submit(spec: jobs_pb2.JobSpec, context: Any) -> jobs_pb2.JobRecord:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Upload it. [code-not-here]")
        return jobs_pb2.JobRecord()

    async def body(cluster: ClusterClient) -> None:
        with pytest.raises(ClusterError) as caught:
            await cluster.submit(jobs_pb2.JobSpec(name="j"))
        assert code_of(caught.value) is ClusterCode.CODE_NOT_HERE

    served(body, 60.0, Submit=submit)


def test_a_stream_that_breaks_after_a_long_silence_is_opened_again() -> None:
    """The patience is for coordinators that do not answer, not for jobs that have nothing to say."""
    patience_s = 0.1
    streams: list[int] = []

    async def follow(requests: Any, context: Any) -> None:
        streams.append(len(streams))
        await context.write(jobs_pb2.JobEvent(record=jobs_pb2.JobRecord(id="j")))
        if len(streams) > 1:
            await context.write(jobs_pb2.JobEvent(ended=jobs_pb2.JobEnded()))
            return
        await asyncio.sleep(5 * patience_s)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Another coordinator serves.")

    async def body(cluster: ClusterClient) -> None:
        async def output(_: jobs_pb2.Output) -> None:
            pass

        await cluster.follow(jobs_pb2.Open(job="j"), lambda record: None, output)
        assert len(streams) == 2

    served(body, patience_s, Follow=follow)


async def no_output(_: jobs_pb2.Output) -> None:
    raise AssertionError


def test_a_job_is_followed_through_an_absence_that_is_longer_than_the_patience() -> None:
    """Its ranks may have ended meanwhile. Who follows it has its exit status from the next coordinator."""
    streams: list[int] = []
    notes: list[str] = []
    has_record = asyncio.Event()

    async def follow(requests: Any, context: Any) -> None:
        streams.append(len(streams))
        if len(streams) == 1:
            await context.write(jobs_pb2.JobEvent(record=jobs_pb2.JobRecord(id="j")))
            await has_record.wait()  # else the end of the stream may overtake it
        if len(streams) < 4:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "No coordinator serves.")
        await context.write(jobs_pb2.JobEvent(ended=jobs_pb2.JobEnded()))

    async def body(cluster: ClusterClient) -> None:
        await cluster.follow(jobs_pb2.Open(job="j"), lambda record: has_record.set(), no_output, notes.append)
        assert len(streams) >= 4, "and once more if gRPC cuts off the last one"
        (note,) = notes
        assert "waits up to 60 s" in note

    served(body, 0.0, Follow=follow)


@pytest.mark.parametrize("ends", [True, False], ids=["the job is to end", "for too long"])
def test_a_coordinator_that_is_away_is_not_waited_for_without_end(ends: bool) -> None:
    """A person who has asked for the end of the job waits for it for no longer than for an answer to that."""

    async def follow(requests: Any, context: Any) -> None:
        if not has_record.is_set():
            await context.write(jobs_pb2.JobEvent(record=jobs_pb2.JobRecord(id="j")))
            await has_record.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "No coordinator serves.")

    has_record = asyncio.Event()

    async def body(cluster: ClusterClient) -> None:
        if ends:
            cluster.follow_less()
        with pytest.raises(ClusterError, match=ends_with(ClusterCode.CLUSTER_SILENT, "horovodrun logs -f j")):
            await cluster.follow(jobs_pb2.Open(job="j"), lambda record: has_record.set(), no_output)

    served(body, 0.1, 600.0 if ends else 0.1, Follow=follow)


def test_the_wrong_token_for_the_first_of_several_is_no_matter_where_another_one_takes_it() -> None:
    async def ask(*coordinators: EmbeddedCoordinator, token: str) -> None:
        addresses = [one.address for one in coordinators]
        async with ClusterClient(Access(addresses, token), patience_s=30.0) as cluster:
            await cluster.listing()

    with EmbeddedCoordinator(token="other") as first, EmbeddedCoordinator(token="right") as second:
        asyncio.run(ask(first, second, token="right"))
        with pytest.raises(ClusterError) as caught:
            asyncio.run(ask(first, second, token="wrong"))
        assert type(caught.value) is ClusterError  # nothing was asked for that may have been done
        assert re.search(ends_with(AccessCode.WRONG_TOKEN, first.address, second.address), str(caught.value))


def test_a_description_that_is_too_long_is_refused_before_it_is_sent() -> None:
    """gRPC would refuse 8 MiB with a status that says nothing of the job, and waiting does not help."""
    spec = jobs_pb2.JobSpec(command=["true", "x" * (9 << 20)], processes=1)

    async def ask() -> None:
        async with ClusterClient(Access(["127.0.0.1:1"])) as cluster:
            for call in (cluster.submit, cluster.place):
                with pytest.raises(ClusterError, match=ends_with(ClusterCode.JOB_TOO_LARGE, " 9,437,", "command")):
                    await call(spec)

    asyncio.run(ask())
