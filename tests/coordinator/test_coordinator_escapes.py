"""Whatever comes from outside reaches a log, a terminal or another member as one line of printable text."""

import logging
import re
from collections.abc import Iterator

import pytest
from coordinator_builders import FLOAT64, message, op, request
from coordinator_client import Crew
from error_codes import ends_with

from horovod.base.errors import WorldCode, code_of
from horovod.base.words import printable, printable_lines
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.coordinator.core.world.checks import refusal_of
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import membership_pb2, negotiation_pb2
from horovod.protos.v1 import types_pb2 as pb

EVIL = "\x1b[2Jroot\r\nERROR faked \u202e\x07\x9b31m\u2028"
ESCAPED = r"\x1b[2Jroot\r\nERROR faked \u202e\x07\x9b31m\u2028"


@pytest.fixture
def crew(caplog: pytest.LogCaptureFixture) -> Iterator[Crew]:
    caplog.set_level(logging.DEBUG, "horovod.coordinator")
    with EmbeddedCoordinator() as coordinator, Crew(coordinator.address) as made:
        yield made
    for record in caplog.records:
        if record.name.startswith("horovod.coordinator"):
            assert record.getMessage().isprintable(), record


def test_what_is_printable() -> None:
    assert printable(EVIL) == ESCAPED
    assert printable("a name, na\u00efve \u706b") == "a name, na\u00efve \u706b"
    assert printable("x" * 2000) == "x" * 1000 + "..."
    assert printable("", 1) == ""
    assert printable_lines("one\ntwo\x1b[0m") == "one\ntwo\\x1b[0m"


def test_the_reason_of_a_goodbye(crew: Crew) -> None:
    members = crew.world(2)
    members[0].leave(EVIL)
    assert members[1].event("gone").sentence.endswith(f": {ESCAPED}.")


@pytest.mark.parametrize("fields", [{"job": EVIL}, {"host": EVIL}, {"options": {EVIL: "1"}}])
def test_names_in_a_join_request(crew: Crew, fields: dict[str, object]) -> None:
    (event,) = crew.member("m0", **fields).membership.rest()
    assert event.refused.sentence.isprintable()
    assert code_of(event.refused.sentence) is WorldCode.INVALID_REQUEST


def test_values_of_options(crew: Crew) -> None:
    crew.member("m0", options={"fusion": "1"}).event("progress")
    (event,) = crew.member("m1", options={"fusion": EVIL}).membership.rest()
    assert ESCAPED in event.refused.sentence


def test_names_in_a_hello(crew: Crew) -> None:
    (member,) = crew.world(1)
    member.request.job = EVIL
    member.negotiate()
    sentence = member.negotiation.failure()[1]
    assert sentence.isprintable()
    assert ESCAPED in sentence


def test_names_of_operations() -> None:
    negotiation = Negotiation(1, 2)
    name = f"allreduce.{EVIL}"
    negotiation.receive(0, message([op(name)]), 0.0)
    (stall,) = negotiation.stalls(100.0, 1.0)
    assert stall.name == f"allreduce.{ESCAPED}"
    answers = negotiation.receive(1, message([op(name, dtype=FLOAT64), op(name, process_set=7)]), 0.0)
    errors = [error for _, decisions in answers for error in decisions.errors]
    assert len(errors) == 2
    for error in errors:
        assert error.name == name, "by which the member knows it"
        assert error.sentence.isprintable()
        assert ESCAPED in error.sentence
    change = negotiation_pb2.ProcessSetChange(process_set=1, ranks=[0, 1])
    negotiation.receive(0, negotiation_pb2.NegotiationMessage(process_sets=[change]), 0.0)
    negotiation.receive(0, message([op(name, process_set=1)]), 0.0)
    change.removed = True
    ((_, decisions),) = negotiation.receive(1, negotiation_pb2.NegotiationMessage(process_sets=[change]), 0.0)
    assert ESCAPED in decisions.errors[0].sentence


# -- where a member says that it listens -------------------------------------------------------------------------------


def with_endpoint(address: str, port: int) -> membership_pb2.JoinRequest:
    made = request("m0", rank=1)
    made.endpoints.append(pb.Endpoint(address=address, port=port, interface="eth0"))
    return made


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("10.0.0.1", 0),
        ("10.0.0.1", 70000),
        ("node-b", 4000),
        ("", 4000),
        (EVIL, 4000),
        ("0.0.0.0", 4000),
        ("::", 4000),
        ("224.0.0.1", 4000),
    ],
)
def test_an_endpoint_that_nobody_can_connect_to_is_refused(address: str, port: int) -> None:
    """It ended the other members' start before, with a sentence that called it a bug of the coordinator."""
    sentence = refusal_of(with_endpoint(address, port))
    facts = "Rank 1 (pid ", "node-a", f"{address!r} and port {port}", "HOROVOD_NETWORK_INTERFACES"
    assert re.search(ends_with(WorldCode.INVALID_REQUEST, *facts), sentence)
    assert sentence.isprintable()


@pytest.mark.parametrize("address", ["10.0.0.1", "::1", "fe80::1%eth0"])
def test_usable_endpoints(address: str) -> None:
    assert refusal_of(with_endpoint(address, 65535)) == ""
