"""The certificate of one run: what makes it, who believes it, who can read its key."""

from __future__ import annotations

import ssl
import sys
import time
from pathlib import Path

import pytest

from horovod.base.protocol import PROTOCOL_VERSION
from horovod.base.run_certificate import SERVER_NAME, RunCertificate, run_certificate
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.tls import ServerTls
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.session import Session
from horovod.worker.runtime.tls import ClientTls


def joins(certificate: RunCertificate) -> None:
    """A member joins a coordinator that has it. gRPC checks the certificate, the member's probe does it by OpenSSL."""
    with EmbeddedCoordinator("127.0.0.1:0", token="t", tls=ServerTls(certificate.cert, certificate.key)) as coordinator:
        session = Session(coordinator.address, "t", tls=ClientTls(certificate.ca, server_name=SERVER_NAME))
        host = membership_pb2.HostIdentity(name="node-a")
        try:
            session.join(
                lambda: membership_pb2.JoinRequest(
                    protocol_version=PROTOCOL_VERSION, job="j", member_id="m", size=1, host=host, pid=1
                ),
                time.monotonic() + 20,
            )
        finally:
            session.close()


def described(certificate: RunCertificate) -> dict[str, object]:
    found: dict[str, object] = ssl._ssl._test_decode_cert(certificate.ca)  # type: ignore[attr-defined]
    return found


def in_memory(certificate: RunCertificate) -> None:
    """A handshake by Python's ssl as strict as it can be."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate.cert, certificate.key)
    client = ssl.create_default_context(cafile=certificate.ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


@pytest.fixture
def without_openssl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is too old, or is set up wrongly, fails; it counts as none."""
    (tmp_path / "openssl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "openssl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_openssl_makes_one_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)  # its import fails
    monkeypatch.setenv("OPENSSL_CONF", "/nowhere/at/all")  # the system's configuration is not read
    with run_certificate() as certificate:
        if certificate is None:
            pytest.skip("no openssl here")
        key = Path(certificate.key)
        assert key.stat().st_mode & 0o077 == 0
        assert key.parent.stat().st_mode & 0o077 == 0
        assert certificate.text().count("BEGIN CERTIFICATE") == 1
        assert "PRIVATE" not in certificate.text()
        about = described(certificate)
        assert about["subject"] == about["issuer"]
        assert about["subjectAltName"] == (("DNS", SERVER_NAME),)
        # A host whose clock is behind believes it all the same.
        assert time.time() - ssl.cert_time_to_seconds(str(about["notBefore"])) > 3600
        assert ssl.cert_time_to_seconds(str(about["notAfter"])) - time.time() > 3000 * 86400
        joins(certificate)
        in_memory(certificate)
    assert not key.parent.exists()


def test_another_run_s_is_not_believed() -> None:
    with run_certificate() as one, run_certificate() as other:
        if one is None or other is None:
            pytest.skip("neither openssl nor cryptography is here")
        assert one.text() != other.text()
        with pytest.raises(ssl.SSLCertVerificationError):
            in_memory(RunCertificate(one.cert, one.key, other.ca))


@pytest.mark.usefixtures("without_openssl")
def test_the_package_makes_one_without_openssl() -> None:
    pytest.importorskip("cryptography")
    with run_certificate() as certificate:
        assert certificate is not None
        joins(certificate)
        in_memory(certificate)


@pytest.mark.usefixtures("without_openssl")
def test_nothing_without_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with run_certificate() as certificate:
        assert certificate is None
