"""Coordinators of one store believe each other, and tell each other the token, by their certificates only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from error_codes import ends_with
from event_words import NO_COORDINATOR_THERE, tells
from test_runtime_session import request

from horovod.base.errors import AccessCode, SettingCode
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.peers import Peers
from horovod.coordinator.tls import ServerTls
from horovod.protos.v1 import membership_pb2, membership_pb2_grpc
from horovod.worker.runtime.session import Session

JOB = "job"  # of request()
TOKEN = "the-token-of-all-coordinators"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "other")


@pytest.fixture
def serving(ours: Authority) -> Iterator[membership_pb2.Serving]:
    """A coordinator that serves a job, as the store names it."""
    with EmbeddedCoordinator(tls=ours.server(mutual=True), token=TOKEN) as coordinator:
        session = Session(coordinator.address, TOKEN, tls=ours.client(cert=True))
        try:
            session.join(request(size=1), time.monotonic() + 20)
            assert coordinator.server is not None
            assert coordinator.server._hub is not None
            assert coordinator.server._hub.serving.serves(JOB)
            yield membership_pb2.Serving(replica=coordinator.server._hub.serving.replica, address=coordinator.address)
        finally:
            session.close()


def believes(tls: ServerTls | None, holder: membership_pb2.Serving, token: str = TOKEN) -> bool:
    async def ask() -> bool:
        return await Peers(token, tls).serves(holder, JOB)

    return asyncio.run(ask())


def test_one_that_serves_the_job_is_believed(ours: Authority, serving: membership_pb2.Serving) -> None:
    tls = ours.server(mutual=True, name="asking")
    assert believes(tls, serving)
    assert believes(ServerTls(tls.cert, tls.key, peer_ca=ours.file), serving)
    earlier = membership_pb2.Serving(replica="of-a-process-before", address=serving.address)
    assert not believes(tls, earlier)
    assert believes(tls, earlier, token="another"), "it lives, but refuses to say more"


def test_without_a_certificate_that_counts_there_it_is_not_heard(
    ours: Authority, other: Authority, serving: membership_pb2.Serving
) -> None:
    stranger = other.server(name="asking")
    assert not believes(ServerTls(stranger.cert, stranger.key, peer_ca=ours.file), serving)
    assert not believes(None, serving)


class Impostor(membership_pb2_grpc.MembershipServicer):
    """Says that it serves whatever it is asked for, and keeps what it is told. It knows the replica's id, which is in
    the store and in no certificate: at the worst an attacker has read it.
    """

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self.told: list[Any] = []

    def Serves(self, request: membership_pb2.ServesRequest, context: Any) -> membership_pb2.ServesAnswer:  # noqa: N802
        self.told.append(context.invocation_metadata())
        return membership_pb2.ServesAnswer(replica=self._replica, serves=True)


@pytest.mark.parametrize(
    ("authority", "names", "words"),
    [("other", ["127.0.0.1"], "certificate"), ("ours", ["node-b.cluster"], "IP address mismatch")],
)
def test_who_is_not_known_is_told_nothing(
    ours: Authority,
    other: Authority,
    authority: str,
    names: list[str],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = {"ours": ours, "other": other}[authority].issue("false", *names)
    impostor = Impostor("r")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    membership_pb2_grpc.add_MembershipServicer_to_server(impostor, server)
    credentials = grpc.ssl_server_credentials([(Path(pair.key).read_bytes(), Path(pair.cert).read_bytes())])
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        with caplog.at_level(logging.WARNING):
            assert not believes(ours.server(mutual=True), membership_pb2.Serving(replica="r", address=address))
        assert impostor.told == []
        assert tells(caplog.text, address, NO_COORDINATOR_THERE)
        assert words in caplog.text
    finally:
        server.stop(None).wait()


def test_one_that_is_gone_is_not_believed_without_a_word(
    ours: Authority, serving: membership_pb2.Serving, caplog: pytest.LogCaptureFixture
) -> None:
    assert not believes(ours.server(mutual=True), membership_pb2.Serving(replica="r", address="127.0.0.1:9"))
    assert NO_COORDINATOR_THERE not in caplog.text


def test_certificates_that_were_renewed_are_shown(ours: Authority, other: Authority, tmp_path: Path) -> None:
    """What Peers shows and believes is read anew; files that do not fit are not taken."""
    mine = Authority(tmp_path / "mine")
    with EmbeddedCoordinator(tls=ours.server(mutual=True), token=TOKEN) as coordinator:
        assert coordinator.server is not None
        assert coordinator.server._hub is not None
        replica = coordinator.server._hub.serving.replica
        holder = membership_pb2.Serving(replica=replica, address=coordinator.address)
        session = Session(coordinator.address, TOKEN, tls=ours.client(cert=True))
        session.join(request(size=1), time.monotonic() + 20)
        tls = mine.server(name="asking", mutual=True)

        pair = ours.issue("renewed", "127.0.0.1")

        def copy(source: str, target: str) -> None:
            Path(target).write_bytes(Path(source).read_bytes())

        async def ask() -> list[bool]:
            found = []
            peers = Peers(TOKEN, tls)
            found.append(await peers.serves(holder, JOB))
            copy(ours.file, mine.file)
            copy(pair.cert, tls.cert)
            found.append(await peers.serves(holder, JOB))  # the key does not fit yet
            copy(pair.key, tls.key)
            found.append(await peers.serves(holder, JOB))
            return found

        try:
            assert asyncio.run(ask()) == [False, False, True]
        finally:
            session.close()


# -- before a coordinator serves ---------------------------------------------------------------------------------------
def test_each_must_be_able_to_know_the_others(ours: Authority) -> None:
    tls = ours.server()
    with pytest.raises(ValueError, match=ends_with(SettingCode.MISSING_SETTING, "--tls-peer-ca")):
        tls.check_between("127.0.0.1")
    ServerTls(tls.cert, tls.key, peer_ca=ours.file).check_between("127.0.0.1")
    ours.server(mutual=True).check_between("localhost")


def test_a_certificate_that_the_others_would_not_believe(ours: Authority, other: Authority, tmp_path: Path) -> None:
    tls = ours.server(mutual=True)
    for host in ("node-b", "192.0.2.1"):
        with pytest.raises(
            OSError, match=ends_with(AccessCode.UNTRUSTED_CERTIFICATE, repr(host), tls.cert, "--advertise")
        ):
            tls.check_between(host)
    with pytest.raises(OSError, match=ends_with(AccessCode.UNTRUSTED_CERTIFICATE, tls.cert, other.file)):
        ServerTls(tls.cert, tls.key, peer_ca=other.file).check_between("127.0.0.1")
    with pytest.raises(OSError, match=ends_with(AccessCode.UNTRUSTED_CERTIFICATE, "--tls-client-ca", other.file)):
        ServerTls(tls.cert, tls.key, client_ca=other.file, peer_ca=ours.file).check_between("127.0.0.1")
    junk = tmp_path / "junk.pem"
    junk.write_text("nothing")
    with pytest.raises(OSError, match=ends_with(AccessCode.UNUSABLE_CERTIFICATE, junk, "PEM")):
        ServerTls(tls.cert, tls.key, peer_ca=str(junk)).check_between("127.0.0.1")
