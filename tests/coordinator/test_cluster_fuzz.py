"""Anything that an agent or a client of jobs may send, well formed or not, against the real services over gRPC.

Whatever it is: the call ends in order or with a status in words, nothing unexpected is logged, and the coordinator
still lists its agents and jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import pytest
from coordinator_client import Stream, bearer
from fuzzing import FUZZ, Listener, finish, listening
from hypothesis import given
from hypothesis import strategies as st
from messages import messages

from horovod import __version__
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import agents_pb2, jobs_pb2
from horovod.protos.v1.jobs_pb2_grpc import JobsStub

ATTACH, FOLLOW = "/horovod.v1.Agents/Attach", "/horovod.v1.Jobs/Follow"
CALLS: dict[str, Any] = {
    "/horovod.v1.Agents/GetCode": agents_pb2.GetCodeRequest,
    "/horovod.v1.Jobs/Submit": jobs_pb2.JobSpec,
    "/horovod.v1.Jobs/Place": jobs_pb2.JobSpec,
    "/horovod.v1.Jobs/FindCode": jobs_pb2.Code,
    "/horovod.v1.Jobs/PutCode": jobs_pb2.CodeChunk,
    "/horovod.v1.Jobs/List": jobs_pb2.ListRequest,
    "/horovod.v1.Jobs/Signal": jobs_pb2.SignalRequest,
}
TIMEOUT_S = 60.0

pytestmark = pytest.mark.longer


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        listening() as listener,
        EmbeddedCoordinator() as coordinator,
        grpc.insecure_channel(coordinator.address) as channel,
    ):
        yield Cluster(channel, coordinator, listener)


class Cluster:
    """A coordinator, an agent that is always there, and a job that runs on it."""

    def __init__(self, channel: grpc.Channel, coordinator: EmbeddedCoordinator, listener: Listener) -> None:
        assert coordinator.token is not None
        self.channel = channel
        self.token = coordinator.token
        self.metadata = bearer(self.token)
        self._listener = listener
        self._stub = JobsStub(channel)
        self._agent = self.stream(ATTACH)
        self._agent.send(agents_pb2.AgentMessage(register=register("always")).SerializeToString())
        self._agent.next()  # it is registered
        spec = jobs_pb2.JobSpec(command=["true"], processes=1, hosts=[jobs_pb2.HostSlots(name="always", slots=1)])
        self.job = self._stub.Submit(spec, metadata=self.metadata, timeout=TIMEOUT_S).id

    def stream(self, method: str) -> Stream[bytes, bytes]:
        return Stream(
            self.channel.stream_stream(method), self.token, timeout_s=600.0 if method == ATTACH else TIMEOUT_S
        )

    def hears(self, method: str, messages: Iterable[Any]) -> None:
        """A stream of these messages, which ends as it should."""
        stream = self.stream(method)
        for message in messages:
            stream.send(message.SerializeToString())
        finish(stream)
        self.notices_nothing()

    def call(self, method: str, data: bytes) -> None:
        """It has an answer, or a status in words that no exception of the server's code made."""
        call = self.channel.unary_unary(method).future(data, metadata=self.metadata, timeout=TIMEOUT_S)
        code, sentence = call.code(), call.details()
        assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), sentence
        assert code is grpc.StatusCode.OK or sentence

    def notices_nothing(self) -> None:
        listing = self._stub.List(jobs_pb2.ListRequest(most=200), metadata=self.metadata, timeout=TIMEOUT_S)
        assert "always" in {agent.name for agent in listing.agents}
        assert self.job in {job.id for job in listing.jobs}
        self._listener.check()


def register(name: str) -> agents_pb2.Register:
    return agents_pb2.Register(
        protocol_version=PROTOCOL_VERSION, version=__version__, name=name, instance=f"of {name}", slots=2
    )


@FUZZ
@given(first=messages(agents_pb2.AgentMessage), rest=st.lists(messages(agents_pb2.AgentMessage), max_size=3))
def test_strangers_that_attach(cluster: Cluster, first: Any, rest: list[Any]) -> None:
    cluster.hears(ATTACH, [first, *rest])


@FUZZ
@given(
    noise=messages(agents_pb2.Register),
    rest=st.lists(messages(agents_pb2.AgentMessage), max_size=4),
    own=st.booleans(),
)
def test_agents_that_get_in(cluster: Cluster, noise: Any, rest: list[Any], own: bool) -> None:
    """A register that is good in what matters, so that everything else in it is used; also of a job that is known."""
    good = register("fuzz")
    noise.MergeFrom(good)
    for message in rest if own else ():
        if message.HasField("report"):
            message.report.job = cluster.job
    cluster.hears(ATTACH, [agents_pb2.AgentMessage(register=noise), *rest])


@FUZZ
@given(
    first=messages(jobs_pb2.FollowMessage),
    rest=st.lists(messages(jobs_pb2.FollowMessage), max_size=3),
    own=st.booleans(),
)
def test_followers(cluster: Cluster, first: Any, rest: list[Any], own: bool) -> None:
    if own:
        first.open.job = cluster.job
    cluster.hears(FOLLOW, [first, *rest])


@pytest.mark.parametrize("method", CALLS)
@FUZZ
@given(data=st.data())
def test_calls(cluster: Cluster, method: str, data: st.DataObject) -> None:
    """Messages of the right kind, whole or damaged."""
    message = data.draw(messages(CALLS[method]))
    if method.endswith("Signal") and message.job == cluster.job:
        return
    good = message.SerializeToString()
    at = data.draw(st.integers(0, len(good)))
    damaged = good[:at] + data.draw(st.binary(max_size=8)) + good[data.draw(st.integers(at, len(good))) :]
    cluster.call(method, data.draw(st.sampled_from([good, damaged])))
    cluster.notices_nothing()
