"""Who may do what: tokens of a cluster and of one job, and who is served off loopback."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from coordinator_builders import op
from coordinator_client import Crew, Stream
from error_codes import ends_with
from event_words import IN_THE_CLEAR, SERVES_EVERYBODY
from hypothesis import example, given
from hypothesis import strategies as st

import horovod.protos.v1 as protos
from horovod.base.errors import AccessCode, SettingCode
from horovod.base.proofs import MIN_CLUSTER_TOKEN_LENGTH, PREFIX, job_of, job_token
from horovod.coordinator.address import ListenAddress
from horovod.coordinator.exposure import check_exposure, check_store_exposure
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.auth import OF_ONE_JOB, Access
from horovod.coordinator.services.exchange import DELIVER, FETCH
from horovod.coordinator.store.etcd_address import EtcdAddress
from horovod.coordinator.tls import ServerTls
from horovod.protos.v1 import membership_pb2, membership_pb2_grpc, negotiation_pb2, negotiation_pb2_grpc

CLUSTER = "the token of the cluster"


# -- the tokens of jobs ------------------------------------------------------------------------------------------------
@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
@example("a.b", "a")
@example("digits", "digits ")
def test_a_token_is_for_its_job_and_cluster_only(job: str, other: str) -> None:
    try:
        token = job_token("x" * 32, job)
    except UnicodeEncodeError:
        return  # no name of a job: it can't be in a message either
    assert job_of(token, "x" * 32) == job
    assert job_of(token, "y" * 32) is None
    if other != job:
        name, proof = job_token("x" * 32, "other").split(".")[1:], token.split(".")[2]
        assert job_of(f"{PREFIX}.{name[0]}.{proof}", "x" * 32) in (None, job)


@given(st.text(max_size=60))
@example(f"{PREFIX}..")
@example(f"{PREFIX}.é.é")
@example(f"{PREFIX}.eA.")
def test_nonsense_is_no_token(text: str) -> None:
    assert job_of(text, "x" * 32) is None
    assert job_of(f"{PREFIX}.{text}", "x" * 32) is None


def test_a_short_token_of_the_cluster_makes_none() -> None:
    with pytest.raises(ValueError, match=ends_with(AccessCode.WEAK_TOKEN)):
        job_token("x" * (MIN_CLUSTER_TOKEN_LENGTH - 1), "digits")
    with pytest.raises(ValueError, match=ends_with(SettingCode.MISSING_SETTING, "HOROVOD_JOB")):
        job_token("x" * 32, "")


# -- what a coordinator makes of them ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def coordinator() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator(token=CLUSTER.replace(" ", "-")) as running:
        yield running


def token_for(coordinator: EmbeddedCoordinator, job: str) -> str:
    assert coordinator.token is not None
    return job_token(coordinator.token, job)


def test_a_job_with_its_token(coordinator: EmbeddedCoordinator) -> None:
    with Crew(coordinator.address, token_for(coordinator, "digits")) as crew:
        members = crew.world(2, job="digits")
        for member in members:
            member.negotiate(op())
        for member in members:
            assert member.negotiation.next().plans
            member.attach()
            assert member.event("attached") is not None


@pytest.mark.parametrize("message", ["join", "attach"])
def test_membership_of_another_job(coordinator: EmbeddedCoordinator, message: str) -> None:
    first = {
        "join": membership_pb2.MemberMessage(join=membership_pb2.JoinRequest(job="letters")),
        "attach": membership_pb2.MemberMessage(attach=membership_pb2.Attach(job="letters")),
    }[message]
    with grpc.insecure_channel(coordinator.address) as channel:
        stub = membership_pb2_grpc.MembershipStub(channel)
        stream: Stream[membership_pb2.MemberMessage, membership_pb2.MembershipEvent] = Stream(
            stub.Join, token_for(coordinator, "digits")
        )
        stream.send(first)
        code, sentence = stream.failure()
        stream.close()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert re.search(ends_with(AccessCode.OTHER_JOB, "'digits'", "'letters'"), sentence)


def test_negotiation_of_another_job(coordinator: EmbeddedCoordinator) -> None:
    with grpc.insecure_channel(coordinator.address) as channel:
        stub = negotiation_pb2_grpc.NegotiationStub(channel)
        stream: Stream[negotiation_pb2.NegotiationMessage, negotiation_pb2.Decisions] = Stream(
            stub.Negotiate, token_for(coordinator, "digits")
        )
        stream.send(negotiation_pb2.NegotiationMessage(hello=negotiation_pb2.Hello(job="letters")))
        code, sentence = stream.failure()
        stream.close()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert re.search(ends_with(AccessCode.OTHER_JOB, "'digits'", "'letters'"), sentence)


def test_every_method_is_for_one_job_or_closed_to_its_token() -> None:
    """A method of a new service is closed to the tokens of jobs until it asks for the job's name and is listed."""
    token = job_token("x" * 32, "digits")
    access = Access("x" * 32)
    found = {FETCH, DELIVER}  # of a service without messages of its own
    for file in sorted(Path(next(iter(protos.__path__))).glob("*_pb2.py")):
        module = __import__(f"horovod.protos.v1.{file.stem}", fromlist=["DESCRIPTOR"])
        for service in module.DESCRIPTOR.services_by_name.values():
            found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert found >= OF_ONE_JOB
    for method in [*found, "/horovod.v1.New/Method"]:
        assert bool(access.refusal(f"Bearer {token}".encode(), method)) == (method not in OF_ONE_JOB)
        assert not access.refusal(f"Bearer {'x' * 32}".encode(), method)
        assert access.refusal(b"Bearer wrong", method)
        assert access.refusal(None, method)
        assert not Access(None).refusal(None, method)


# -- who can connect ---------------------------------------------------------------------------------------------------
TLS, MUTUAL = ServerTls("cert", "key"), ServerTls("cert", "key", "ca")
LONG = "t" * MIN_CLUSTER_TOKEN_LENGTH


@pytest.mark.parametrize(
    ("host", "token", "tls", "insecure", "expected"),
    [
        ("127.0.0.1", None, None, False, ""),
        ("::1", "t", None, False, ""),
        ("192.0.2.1", None, None, False, "Refusing to listen"),
        ("192.0.2.1", None, TLS, False, "Refusing to listen"),
        ("192.0.2.1", None, MUTUAL, False, ""),
        ("192.0.2.1", LONG, TLS, False, ""),
        ("192.0.2.1", LONG, None, False, "travels in the clear"),
        ("192.0.2.1", "t", TLS, False, "[weak-token]"),
        ("192.0.2.1", "t", MUTUAL, False, "[weak-token]"),
        ("192.0.2.1", "t", None, True, "travels in the clear"),
        ("192.0.2.1", None, None, True, SERVES_EVERYBODY),
        ("0.0.0.0", None, TLS, True, SERVES_EVERYBODY),
    ],
)
def test_exposure(host: str, token: str | None, tls: ServerTls | None, insecure: bool, expected: str) -> None:
    try:
        found = check_exposure(ListenAddress(host, 1), token, tls, insecure)
    except ValueError as error:
        found = str(error)
    assert expected in found
    assert bool(expected) == bool(found)


CERTIFICATE, USER = "cert=/dev/null&key=/dev/null", "user=me&password_file=/dev/null"


@pytest.mark.parametrize(
    ("hosts", "options", "is_sealed", "insecure", "expected"),
    [
        ("127.0.0.1:1,[::1]:1,localhost:1", "", False, False, ""),
        ("127.0.0.1:1,192.0.2.1:2", "", True, False, "Refusing to keep jobs in etcd at 192.0.2.1:2 without TLS"),
        ("etcd:1", "", True, False, "without credentials"),
        ("etcd:1", "?ca=/dev/null", True, False, "at etcd:1 without credentials"),
        ("etcd:1", f"?{USER}", True, False, "at etcd:1 without TLS"),
        ("etcd:1", f"?ca=/dev/null&{CERTIFICATE}", True, False, ""),
        ("etcd:1", f"?ca=/dev/null&{CERTIFICATE}", False, False, "at etcd:1 without a key"),
        ("etcd:1", f"?ca=/dev/null&{USER}", True, False, ""),
        ("etcd:1", "", True, True, "is used without TLS"),
        ("etcd:1", f"?ca=/dev/null&{USER}", False, True, "change what agents run"),
        ("etcd:1", f"?ca=/dev/null&{USER}", True, True, ""),
    ],
)
def test_exposure_of_the_store(hosts: str, options: str, is_sealed: bool, insecure: bool, expected: str) -> None:
    try:
        found = check_store_exposure(EtcdAddress.parse(f"etcd://{hosts}{options}"), is_sealed, insecure)
    except ValueError as error:
        found = str(error)
    assert expected in found
    assert bool(expected) == bool(found)


def test_the_embedded_one_off_loopback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedCoordinator("0.0.0.0:0") as coordinator:
        assert coordinator.token, "it has made one"
    assert IN_THE_CLEAR in caplog.text
    caplog.clear()
    with EmbeddedCoordinator("0.0.0.0:0", tls=Authority(tmp_path).server(mutual=True)):
        pass
    with EmbeddedCoordinator("0.0.0.0:0", insecure=True):
        assert SERVES_EVERYBODY in caplog.text
    assert all(record.levelno == logging.WARNING for record in caplog.records if "coordinator" in record.name)
