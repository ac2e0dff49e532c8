"""The way of functions and results over a coordinator: in pieces, and for the holders of the job's token only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from horovod.base.proofs import job_token
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.exchange import DELIVER, FETCH, JOB, PIECE_BYTES, RANK, Exchange

TOKEN = "a-secret-of-this-cluster"
CONTENT = bytes(range(256)) * (PIECE_BYTES // 256 * 2) + b"the rest"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Exchange, grpc.Channel]]:
    exchange = Exchange(CONTENT)
    coordinator = EmbeddedCoordinator(token=TOKEN, services=[exchange])
    with coordinator, grpc.insecure_channel(coordinator.address) as channel:
        yield exchange, channel


def told(token: str, job: str = "mine", rank: int = 0) -> dict[str, Any]:
    metadata = [(JOB, job), (RANK, str(rank)), ("authorization", f"Bearer {token}")]
    return {"metadata": metadata, "timeout": 30}


@pytest.mark.parametrize("token", [TOKEN, job_token(TOKEN, "mine")])
def test_what_is_fetched_and_delivered(served: tuple[Exchange, grpc.Channel], token: str) -> None:
    exchange, channel = served
    exchange.results.clear()
    pieces = list(channel.unary_stream(FETCH)(b"", **told(token)))
    assert b"".join(pieces) == CONTENT
    assert max(map(len, pieces)) == PIECE_BYTES
    for rank in (1, 0):
        channel.stream_unary(DELIVER)(iter([b"result ", b"%d" % rank]), **told(token, rank=rank))
    channel.stream_unary(DELIVER)(iter([b"another one"]), **told(token, rank=0))
    assert list(exchange.results.items()) == [(1, b"result 1"), (0, b"result 0")], "as they arrived, each once"


@pytest.mark.parametrize(
    ("token", "code"),
    [
        ("wrong", grpc.StatusCode.UNAUTHENTICATED),
        (job_token(TOKEN, "another"), grpc.StatusCode.PERMISSION_DENIED),
    ],
)
def test_others_get_nothing(served: tuple[Exchange, grpc.Channel], token: str, code: grpc.StatusCode) -> None:
    exchange, channel = served
    exchange.results.clear()
    with pytest.raises(grpc.RpcError) as refused:
        list(channel.unary_stream(FETCH)(b"", **told(token)))
    assert refused.value.code() == code
    with pytest.raises(grpc.RpcError) as refused:
        channel.stream_unary(DELIVER)(iter([b"forged"]), **told(token))
    assert refused.value.code() == code
    assert exchange.results == {}


def test_a_coordinator_that_is_a_service_has_no_such_methods() -> None:
    with EmbeddedCoordinator(token=TOKEN) as coordinator, grpc.insecure_channel(coordinator.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.unary_stream(FETCH)(b"", **told(TOKEN)))
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_of_processes_that_replaced_each_other_the_last_one_counts() -> None:
    exchange = Exchange(CONTENT, replaced=True)
    coordinator = EmbeddedCoordinator(token=TOKEN, services=[exchange])
    with coordinator, grpc.insecure_channel(coordinator.address) as channel:
        for rank, content in ((0, b"failed"), (1, b"done"), (0, b"done later")):
            channel.stream_unary(DELIVER)(iter([content]), **told(TOKEN, rank=rank))
    assert list(exchange.results.items()) == [(1, b"done"), (0, b"done later")]
