"""How often members may speak and peers may come: buckets, and what a coordinator says when one is empty."""

from __future__ import annotations

import grpc
import pytest
from coordinator_builders import op
from coordinator_client import Crew
from hypothesis import given
from hypothesis import strategies as st

from horovod.coordinator.core import rates
from horovod.coordinator.core.checks import MAX_SIZE
from horovod.coordinator.core.rates import Rate, RateLimits, Rates
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import negotiation_pb2

SMALL = Rates(messages=Rate(10, 2), bytes=Rate(1000, 100), streams=Rate(5, 1))


def test_messages_and_bytes_come_back_with_time() -> None:
    limits = RateLimits(SMALL)
    assert [bool(limits.message("rank 1", 1, 0.0)) for _ in range(12)] == [False] * 10 + [True] * 2
    assert limits.message("rank 2", 1, 0.0) == "", "others have their own"
    assert limits.message("rank 1", 1, 0.5) == ""
    assert "More messages come from rank 1 than any training needs" in limits.message("rank 1", 1, 0.5)
    assert "More bytes come from rank 3" in limits.message("rank 3", 1001, 0.0)
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
        assert f"More messages come from rank {one.rank} of job" in sentence
        other.negotiate(op("y"))
        other.settle()


def test_a_peer_that_comes_too_often_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.coordinator.server.RATES", Rates(streams=Rate(2, 0.001)))
    with EmbeddedCoordinator(token="t") as coordinator, Crew(coordinator.address, "t") as crew:
        crew.world(2)
        code, sentence = crew.member("late").membership.failure()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "More streams come from ipv4:127.0.0.1 than" in sentence
