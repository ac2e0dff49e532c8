"""How often members may speak and peers may come: buckets, and what a coordinator says when one is empty."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import grpc
import pytest
from coordinator_builders import op
from coordinator_client import Crew
from error_codes import ends_with
from hypothesis import given
from hypothesis import strategies as st

from horovod import __version__
from horovod.base.errors import ClusterCode
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.core import rates
from horovod.coordinator.core.rates import Rate, RateLimits, Rates
from horovod.coordinator.core.world.checks import MAX_SIZE
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import agents_pb2, jobs_pb2, membership_pb2, negotiation_pb2
from horovod.protos.v1.agents_pb2_grpc import AgentsStub
from horovod.protos.v1.jobs_pb2_grpc import JobsStub

SMALL = Rates(messages=Rate(10, 2), bytes=Rate(1000, 100), streams=Rate(5, 1))


def test_messages_and_bytes_come_back_with_time() -> None:
    limits = RateLimits(SMALL)
    assert [bool(limits.message("rank 1", 1, 0.0)) for _ in range(12)] == [False] * 10 + [True] * 2
    assert limits.message("rank 2", 1, 0.0) == "", "others have their own"
    assert limits.message("rank 1", 1, 0.5) == ""
    assert re.search(ends_with(ClusterCode.TOO_MANY_MESSAGES, "messages", "rank 1"), limits.message("rank 1", 1, 0.5))
    assert re.search(ends_with(ClusterCode.TOO_MANY_MESSAGES, "bytes", "rank 3"), limits.message("rank 3", 1001, 0.0))
    assert limits.message("rank 3", 1000, 0.0) == "", "what is refused takes nothing"


def test_streams_of_a_peer() -> None:
    limits = RateLimits(SMALL)
    assert [bool(limits.stream("ipv4:10.0.0.1", 3.0)) for _ in range(6)] == [False] * 5 + [True]
    assert limits.stream("ipv4:10.0.0.2", 3.0) == ""
    assert limits.stream("ipv4:10.0.0.1", 4.0) == ""


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 400)), max_size=60))
def test_never_more_than_the_rate_says(steps: list[tuple[float, int]]) -> None:
    limits, now, taken = RateLimits(SMALL), 0.0, 0
    for pause, size in steps:
        now += pause
        if not limits.message("m", size, now):
            taken += size
        assert taken <= 1000 + 100 * now + 1e-6


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_BUCKETS", 8)
    limits = RateLimits(SMALL)
    for number in range(100):
        assert limits.stream(f"peer {number}", 0.0) == ""
        assert len(limits._streams._of) <= 8


def test_the_largest_world_from_one_address_is_served() -> None:
    limits = RateLimits()
    assert not any(limits.stream("ipv4:127.0.0.1", 0.0) for _ in range(2 * MAX_SIZE))  # membership and negotiation


def test_a_member_that_floods_ends_its_own_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.coordinator.server.RATES", Rates(messages=Rate(20, 0.001)))
    with EmbeddedCoordinator(token="t") as coordinator, Crew(coordinator.address, "t") as crew:
        one, other = crew.world(2)
        one.negotiate(op("x"))
        for _ in range(40):
            one.negotiation.send(negotiation_pb2.NegotiationMessage(epoch=one.world.epoch))
        code, sentence = one.negotiation.failure()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.search(ends_with(ClusterCode.TOO_MANY_MESSAGES, "messages", f"rank {one.rank} of job"), sentence)
        other.negotiate(op("y"))
        other.settle()


def test_a_peer_that_comes_too_often_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.coordinator.server.RATES", Rates(streams=Rate(2, 0.001)))
    with EmbeddedCoordinator(token="t") as coordinator, Crew(coordinator.address, "t") as crew:
        crew.world(2)
        code, sentence = crew.member("late").membership.failure()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.search(ends_with(ClusterCode.TOO_MANY_MESSAGES, "streams", "ipv4:127.0.0.1 "), sentence)


# What each method that takes a stream wants to hear before it looks who comes.
FIRST = {
    "/horovod.v1.Membership/Join": membership_pb2.MemberMessage(
        join=membership_pb2.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            job="j",
            member_id="m",
            size=1,
            host=membership_pb2.HostIdentity(name="h"),
            pid=1,
        )
    ),
    "/horovod.v1.Negotiation/Negotiate": negotiation_pb2.NegotiationMessage(
        epoch=1, hello=negotiation_pb2.Hello(job="j")
    ),
    "/horovod.v1.Agents/Attach": agents_pb2.AgentMessage(register=agents_pb2.Register(name="h")),
    "/horovod.v1.Jobs/Follow": jobs_pb2.FollowMessage(open=jobs_pb2.Open(job="j")),
}


def methods() -> list[tuple[str, bool, bool]]:
    """Name, and whether requests and answers are streams, of every method that a coordinator serves."""
    found = []
    for name in ("membership", "negotiation", "agents", "jobs"):
        module = importlib.import_module(f"horovod.protos.v1.{name}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found.append((f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming))
    return found


def test_every_method_counts_how_often_a_peer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.coordinator.server.RATES", Rates(streams=Rate(0.5, 1e-9)))
    with EmbeddedCoordinator(insecure=True) as coordinator, grpc.insecure_channel(coordinator.address) as channel:
        assert len(methods()) >= 11
        for method, takes_stream, gives_stream in methods():
            call = getattr(channel, f"{'stream' if takes_stream else 'unary'}_{'stream' if gives_stream else 'unary'}")(
                method
            )
            first = FIRST[method].SerializeToString() if takes_stream else b""
            answer = call(iter([first]), timeout=60) if takes_stream else call
            with pytest.raises(grpc.RpcError) as caught:
                list(answer if takes_stream else [call(first, timeout=60)])
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, (method, caught.value.details())
            assert "More streams come from ipv4:127.0.0.1 than" in caught.value.details()


LARGE = jobs_pb2.JobSpec(command=["x" * 1000], processes=1)
REQUESTS = {
    "Submit": LARGE,
    "Place": LARGE,
    "FindCode": jobs_pb2.Code(sha256="0" * 1000),
    "PutCode": jobs_pb2.CodeChunk(data=bytes(1000)),
    "Signal": jobs_pb2.SignalRequest(job="x" * 1000, signal=15),
}


@pytest.mark.parametrize("method", REQUESTS)
def test_the_bytes_of_calls_without_a_stream_are_counted(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.coordinator.server.RATES", Rates(bytes=Rate(500, 1e-9)))
    with EmbeddedCoordinator(insecure=True) as coordinator, grpc.insecure_channel(coordinator.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/horovod.v1.Jobs/{method}")(REQUESTS[method].SerializeToString(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "More bytes come from ipv4:127.0.0.1 than" in caught.value.details()


class TalkingAgent:
    """An agent's stream: `first` registers it, then it says one thing again and again."""

    def __init__(self, channel: grpc.Channel, message: agents_pb2.AgentMessage) -> None:
        register = agents_pb2.Register(
            protocol_version=PROTOCOL_VERSION, version=__version__, name="h1", instance="i", slots=1
        )
        self._first, self._message = agents_pb2.AgentMessage(register=register), message
        self.call = AgentsStub(channel).Attach(self._messages(), timeout=60)

    def _messages(self) -> Iterator[agents_pb2.AgentMessage]:
        yield self._first
        while True:
            yield self._message

    def sentence(self) -> str:
        """With which the stream ends."""
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self.call:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return str(caught.value.details())


@pytest.mark.parametrize(
    "message",
    [
        agents_pb2.AgentMessage(report=agents_pb2.JobReport(job="x" * 1000)),
        agents_pb2.AgentMessage(output=agents_pb2.LogOutput(reader=7, output=jobs_pb2.Output(data=bytes(1000)))),
    ],
    ids=["report", "output that was not asked for"],
)
def test_an_agent_that_floods_ends_its_own_stream_only(
    message: agents_pb2.AgentMessage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod.coordinator.server.RATES", Rates(bytes=Rate(5000, 1e-9)))
    with EmbeddedCoordinator(insecure=True) as coordinator, grpc.insecure_channel(coordinator.address) as channel:
        sentence = TalkingAgent(channel, message).sentence()
        assert re.search(ends_with(ClusterCode.TOO_MANY_MESSAGES, "bytes", "agent of host h1"), sentence)
        assert not JobsStub(channel).List(jobs_pb2.ListRequest(), timeout=60).jobs
