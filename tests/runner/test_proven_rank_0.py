"""Between hosts rank 0 proves that it knows the token before the others show theirs. Here others answer in its place.

Each attacker keeps everything that it is sent. None may get the token, and each rank ends with a sentence.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from error_codes import ends_with
from resources import eventually
from tcp_proxy import Proxy

from horovod.base.errors import AccessCode, ClusterCode, ErrorCode, SettingCode, WorldCode
from horovod.base.proofs import NONCE, NONCE_LENGTH, PROOF, coordinator_proof
from horovod.base.run_certificate import SERVER_NAME, UnnamedCertificate, unnamed_certificate
from horovod.base.settings import resolve
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.tls import ServerTls
from horovod.protos.v1 import membership_pb2
from horovod.rendezvous import join
from horovod.rendezvous.clusters import Task
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.local_member import PROTOCOL_VERSION
from horovod.worker.runtime.session import Session
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.runtime.token_proof import proven_certificate

TOKEN, OTHER = "the-token-of-this-job", "the-token-of-another-job"
NONCE_OF_TEST = "0" * NONCE_LENGTH


@dataclass
class Impostor:
    """A gRPC server that answers every method, and keeps what it is sent."""

    port: int = 0
    heard: list[dict[str, Any]] = field(default_factory=list)  # metadata of each call
    requests: list[bytes] = field(default_factory=list)
    proof: Callable[[str], str | None] = lambda nonce: None

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        metadata = dict(details.invocation_metadata or ())
        self.heard.append(metadata)

        def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            if (proof := self.proof(metadata.get(NONCE, ""))) is not None:
                context.set_trailing_metadata(((PROOF, proof),))
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "No.")
            self.requests.append(next(requests))
            yield b""

        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(answer)
        return handler

    def names(self) -> set[str]:
        """Of all metadata that it was sent, without gRPC's own."""
        return {name for metadata in self.heard for name in metadata} - {"user-agent"}


@contextlib.contextmanager
def impostor(certificate: UnnamedCertificate | None = None, **more: Any) -> Iterator[Impostor]:
    """certificate: it speaks TLS with it; None: it does not."""
    found = Impostor(**more)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[found])
    if certificate is None:
        found.port = server.add_insecure_port("127.0.0.1:0")
    else:
        key, cert = (Path(name).read_bytes() for name in (certificate.key, certificate.cert))
        found.port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
    server.start()
    try:
        yield found
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def made() -> Iterator[UnnamedCertificate]:
    if (certificate := unnamed_certificate()) is None:
        pytest.skip("neither openssl nor cryptography is here")
    try:
        yield certificate
    finally:
        certificate.close()


@pytest.fixture
def rank_0() -> Iterator[EmbeddedCoordinator]:
    """The true coordinator."""
    with (
        made() as certificate,
        EmbeddedCoordinator(
            "127.0.0.1:0", TOKEN, tls=ServerTls(certificate.cert, certificate.key), proves_token=True
        ) as coordinator,
    ):
        yield coordinator


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def meet(port: int, token: str = TOKEN, rank: int = 1, **explicit: Any) -> join._Met:
    """As hvd.init() does in rank 1 of a srun whose rank 0 should be at this port of this host."""
    task = Task("srun", rank, 2, False, ("run",), first_host="127.0.0.1", ports=range(port, port + 1))
    return join._meet_between_hosts(task, "127.0.0.1", token, resolve({}, {"start_timeout_seconds": 1.0, **explicit}))


def refused(port: int, *facts: str, token: str = TOKEN, code: ErrorCode = AccessCode.UNPROVEN) -> str:
    with pytest.raises(StartError, match=ends_with(code, *facts)) as caught:
        meet(port, token)
    assert token not in str(caught.value)
    return str(caught.value)


def request() -> membership_pb2.JoinRequest:
    host = membership_pb2.HostIdentity(name="node-a")
    return membership_pb2.JoinRequest(
        protocol_version=PROTOCOL_VERSION, job="j", member_id="m", size=1, host=host, pid=1
    )


def joined(address: str, met: join._Met) -> None:
    session = Session(address, met.token, tls=ClientTls(met.tls["tls_ca"], server_name=met.tls["tls_server_name"]))
    try:
        assert session.join(request, time.monotonic() + 5).size == 1
    finally:
        session.close()


# -- who answers in place of rank 0 ------------------------------------------------------------------------------------
def test_a_grpc_server_without_tls_is_told_nothing() -> None:
    with impostor() as one:
        sentence = refused(one.port, f"127.0.0.1:{one.port}", "HOROVOD_TOKEN", "rank 1 of 2")
    assert one.heard == [], sentence


def test_a_grpc_server_with_a_certificate_of_its_own_gets_a_nonce() -> None:
    with made() as certificate, impostor(certificate) as one:
        refused(one.port, f"127.0.0.1:{one.port}", "gave no proof")
    assert one.names() == {NONCE}
    assert one.requests == [b""]


def test_a_proof_that_was_made_up_is_none() -> None:
    for answer in ("", "0" * 64, "x" * 4000):
        with made() as certificate, impostor(certificate, proof=lambda nonce, answer=answer: answer) as one:
            refused(one.port, f"127.0.0.1:{one.port}")
        assert one.names() == {NONCE}


def test_the_proof_of_the_true_rank_0_is_of_no_use_to_another(rank_0: EmbeddedCoordinator) -> None:
    """In the middle: it asks rank 0 with the nonce that it was sent, and passes the proof on."""
    passed_on: list[str] = []

    def ask(nonce: str) -> str:
        passed_on.append(proof_of(rank_0, ((NONCE, nonce),)) or "")
        return passed_on[-1]

    with made() as certificate, impostor(certificate, proof=ask) as one:
        refused(one.port, f"127.0.0.1:{one.port}", "another token")
    assert len(passed_on) == 1
    assert len(passed_on[0]) == 64
    assert one.names() == {NONCE}


def test_who_passes_bytes_on_sees_no_token_and_can_not_take_over(rank_0: EmbeddedCoordinator) -> None:
    with Proxy(rank_0.address) as proxy:
        met = meet(port_of(proxy.address))
        joined(proxy.address, met)
        with made() as certificate, impostor(certificate) as one:  # which now answers the rank that has met rank 0
            session = Session(
                f"127.0.0.1:{one.port}",
                met.token,
                tls=ClientTls(met.tls["tls_ca"], server_name=met.tls["tls_server_name"]),
            )
            with pytest.raises(StartError, match=ends_with(AccessCode.UNTRUSTED_CERTIFICATE, one.port)):
                session.join(request, time.monotonic() + 5)
            session.close()
            assert one.heard == []


@contextlib.contextmanager
def listener(answer: bytes | None) -> Iterator[tuple[int, bytearray]]:
    """Sends `answer` to everybody, and ends the connection; None: it says nothing."""
    heard = bytearray()
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = server.accept()
                    held.append(one)
                    heard.extend(one.recv(1 << 16))
                    if answer is not None:
                        one.sendall(answer)
                        one.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], heard
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for one in held:
                one.close()
            thread.join()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64, b"", None])
def test_any_other_program_is_sent_the_beginning_of_tls_alone(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_CONNECT_S", 0.2)
    with listener(answer) as (port, heard):
        refused(port, f"127.0.0.1:{port}")
    assert heard.startswith(b"\x16\x03")
    assert TOKEN.encode() not in heard


# -- ranks that do not fit ---------------------------------------------------------------------------------------------
def test_a_rank_with_another_token_says_so_at_once(rank_0: EmbeddedCoordinator) -> None:
    port = port_of(rank_0.address)
    refused(port, "another token", "HOROVOD_TOKEN", f"127.0.0.1:{port}", "rank 1 of 2", token=OTHER)
    joined(rank_0.address, meet(port))


def test_the_port_does_not_follow_from_the_token() -> None:
    """Else a rank with another token would find nobody, and could not say why."""
    ports = []
    for token in (TOKEN, OTHER):
        task = Task("srun", 1, 2, False, ("run", "7"), first_host="127.0.0.1")
        with pytest.raises(StartError, match=ends_with(WorldCode.INCOMPLETE_WORLD)) as caught:
            join._meet_between_hosts(task, "127.0.0.1", token, resolve({}, {"start_timeout_seconds": 0.001}))
        ports.append(re.findall(r"127\.0\.0\.1:(\d+)", str(caught.value)))
    assert ports[0] == ports[1] != []


def test_the_port_is_one_of_those_that_are_named() -> None:
    task = Task("srun", 1, 2, False, ("run", "7"), first_host="127.0.0.1")
    settings = resolve({"HOROVOD_PORTS": "29501"}, {"start_timeout_seconds": 0.001})
    with pytest.raises(StartError, match=ends_with(WorldCode.INCOMPLETE_WORLD, "127.0.0.1:29501")):
        join._meet_between_hosts(task, "127.0.0.1", TOKEN, settings)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_short_token_is_refused_by_every_rank(rank: int) -> None:
    with pytest.raises(StartError, match=ends_with(AccessCode.WEAK_TOKEN, f"rank {rank} of 2", "openssl rand")):
        meet(1, "short", rank)


def test_a_host_that_can_make_no_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(StartError, match=ends_with(SettingCode.MISSING_SETTING, "openssl", "HOROVOD_TLS_CA")):
        meet(1, rank=0)


def test_a_port_that_is_taken_is_said_by_rank_0_and_nothing_stays_open() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StartError, match=ends_with(ClusterCode.PORT_IN_USE, port)):
            meet(port, rank=0)
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


# -- what strangers get from rank 0 ------------------------------------------------------------------------------------
def proof_of(coordinator: EmbeddedCoordinator, metadata: tuple[tuple[str, str], ...]) -> str | None:
    """Joins as whoever shows this; the refusal must hold nothing but the proof, which is returned."""
    pem = ssl.get_server_certificate(("127.0.0.1", port_of(coordinator.address)))
    options = (("grpc.ssl_target_name_override", SERVER_NAME),)
    with grpc.secure_channel(coordinator.address, grpc.ssl_channel_credentials(pem.encode()), options) as channel:
        method = channel.stream_stream("/horovod.v1.Membership/Join")
        message = membership_pb2.MemberMessage(join=request()).SerializeToString()
        call: Any = method(iter([message]), metadata=metadata, timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        trailing = dict(error.trailing_metadata())
    assert trailing.keys() <= {PROOF}
    found: str | None = trailing.get(PROOF)
    return found


def test_who_shows_no_token_gets_a_proof_for_its_nonce_and_nothing_else(rank_0: EmbeddedCoordinator) -> None:
    certificate = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port_of(rank_0.address))))
    assert proof_of(rank_0, ()) is None
    for nonce in ("", "7", "z" * NONCE_LENGTH, "A" * NONCE_LENGTH, "0" * (NONCE_LENGTH + 1)):
        assert proof_of(rank_0, ((NONCE, nonce),)) is None
    for shown in ((), (("authorization", f"Bearer {OTHER}"),)):
        proof = proof_of(rank_0, ((NONCE, NONCE_OF_TEST), *shown))
        assert proof == coordinator_proof(TOKEN, certificate, NONCE_OF_TEST)
    others = {coordinator_proof(OTHER, certificate, NONCE_OF_TEST), coordinator_proof(TOKEN, b"", NONCE_OF_TEST)}
    assert proof not in others | {coordinator_proof(TOKEN, certificate, "1" * NONCE_LENGTH)}


def test_a_coordinator_with_certificates_of_its_users_proves_nothing() -> None:
    """Its members know it by them."""
    with (
        made() as certificate,
        EmbeddedCoordinator("127.0.0.1:0", TOKEN, tls=ServerTls(certificate.cert, certificate.key)) as coordinator,
    ):
        assert proof_of(coordinator, ((NONCE, NONCE_OF_TEST),)) is None
    for missing in (
        {"token": None, "tls": ServerTls(certificate.cert, certificate.key)},
        {"token": TOKEN, "tls": None},
    ):
        with pytest.raises(ValueError, match=ends_with(SettingCode.MISSING_SETTING, "proves_token")):
            EmbeddedCoordinator(proves_token=True, **missing)


def test_the_certificate_is_that_of_the_proof(rank_0: EmbeddedCoordinator) -> None:
    port = port_of(rank_0.address)
    pem = proven_certificate("127.0.0.1", port, TOKEN, SERVER_NAME, 5.0)
    assert pem.split() == ssl.get_server_certificate(("127.0.0.1", port)).split()
