"""An error of the coordinator itself is told, in its log and to the member whose message met it; a peer's is not."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from coordinator_builders import message, op
from coordinator_client import Crew, Stream
from error_codes import ends_with

from horovod.base.errors import EngineCode
from horovod.coordinator.config import Limits
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services import negotiation_service as service


@pytest.fixture
def crew() -> Iterator[Crew]:
    """The test that waits for the end of the grace waits for a short one."""
    limits = Limits(reattach_grace_s=1.0)
    with EmbeddedCoordinator(limits=limits) as coordinator, Crew(coordinator.address) as made:
        yield made


def fails(*_: Any, **__: Any) -> Any:
    raise LookupError("no such thing")


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def check(caplog: pytest.LogCaptureFixture, code: grpc.StatusCode, sentence: str, who: str) -> None:
    assert code is grpc.StatusCode.INTERNAL
    assert re.search(ends_with(EngineCode.INTERNAL, who, "LookupError"), sentence)
    (record,) = errors_in(caplog)
    assert record.levelno == logging.ERROR
    assert who in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is LookupError
    assert record.exc_info[2] is not None


@pytest.mark.parametrize("part", ["steps", "combined"])
def test_an_error_in_the_negotiation(
    part: str, crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = crew.world(2)
    for member in (first, other):
        member.negotiate(op("allreduce.before"))
    for member in (first, other):
        assert member.plans(1)
    monkeypatch.setattr(*((Negotiation, part) if part == "steps" else (service, part)), fails)
    first.negotiate(op())
    if part == "combined":
        other.announce(op())
    code, sentence = first.negotiation.failure()
    if part == "steps":
        check(caplog, code, sentence, "rank 0 of job 'digits'")
    else:
        assert code is grpc.StatusCode.INTERNAL
        assert {record.exc_info[0] for record in errors_in(caplog) if record.exc_info} == {LookupError}
    other.leave()
    assert first.event("gone").orderly, "the other stream goes on"


def test_an_error_in_the_membership(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Membership, "join", fails)
    member = crew.member("m0", job="a job")
    check(caplog, *member.membership.failure(), "member 'm0' of job 'a job'")


def test_a_stranger_is_answered_when_the_look_at_it_fails(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (member,) = crew.world(1)
    monkeypatch.setattr(Membership, "stranger", fails)
    member.negotiate(op())
    check(caplog, *member.negotiation.failure(), "rank 0 of job 'digits'")


def test_what_peers_do_wrong_is_not_in_the_log(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    members = crew.world(3)
    for member in members:
        member.negotiate(op())
    members[0].negotiation.send(message(epoch=77))
    assert members[0].negotiation.failure()[0] is grpc.StatusCode.FAILED_PRECONDITION
    raw: Stream[bytes, bytes] = Stream(
        members[1].channel.stream_stream("/horovod.v1.Negotiation/Negotiate"), members[1].token
    )
    raw.send(b"\xff\xff\xff")
    assert raw.failure()[0] is grpc.StatusCode.INVALID_ARGUMENT
    raw.half_close()
    members[2].vanish()
    members[1].event("gone")
    assert errors_in(caplog) == []
