"""Members that meet over TLS: with certificates that fit, and a sentence with a remedy for each that does not."""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from error_codes import ends_with
from event_words import OLD_CERTIFICATE_STAYS, OWN_CERTIFICATE
from resources import eventually
from runtime_harness import threads_of_streams
from tcp_proxy import Proxy
from test_runtime_session import answering, echo, refusal, request

from horovod.base.errors import AccessCode, SettingCode, WorldCode, code_of
from horovod.base.settings import Settings, resolve
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.tls import ServerTls
from horovod.worker.runtime.channel import RenewedChannel
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.session import Session
from horovod.worker.runtime.tls import ClientTls

UNUSABLE = AccessCode.UNUSABLE_CERTIFICATE
LONG_AGO = datetime.datetime(2020, 1, 1)
FAR_AHEAD = datetime.datetime(2090, 1, 1)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "other")


def joins(address: str, token: str | None, tls: ClientTls | None) -> None:
    """A world of one, which stands and is left."""
    session = Session(address, token, tls=tls)
    try:
        assert session.join(request(size=1), time.monotonic() + 20).size == 1
    finally:
        session.close()


def test_tls_and_mtls(ours: Authority) -> None:
    for mutual in (False, True):
        with EmbeddedCoordinator(tls=ours.server(mutual=mutual)) as coordinator:
            joins(coordinator.address, coordinator.token, ours.client(cert=mutual))
            joins(coordinator.address, None, ours.client(cert=mutual))  # finds the token
    assert not threads_of_streams()


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_who_reads_the_network_sees_the_token_only_without_tls(ours: Authority, with_tls: bool) -> None:
    token = "0123456789abcdef0123456789abcdef"
    with (
        EmbeddedCoordinator(tls=ours.server() if with_tls else None, token=token) as coordinator,
        Proxy(coordinator.address) as network,
    ):
        network.seen = bytearray()
        session = Session(network.address, token, tls=ours.client() if with_tls else None)
        try:
            secret = session.join(request(size=1), time.monotonic() + 20).secret
        finally:
            session.close()
        for what in (token.encode(), secret):
            assert (what in network.seen) is not with_tls, what
        assert network.seen


def test_bytes_that_are_changed_on_the_way_reach_nobody(ours: Authority, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedCoordinator(tls=ours.server(), token="t") as coordinator, Proxy(coordinator.address) as network:
        joins(network.address, "t", ours.client())
        network.alters = True
        assert refusal(network.address, token="t", tls=ours.client())
        network.alters = False
        joins(network.address, "t", ours.client())
        assert coordinator.server is not None
        assert coordinator.server.overview() == [], "nobody has got in"
    assert OWN_CERTIFICATE not in caplog.text


def test_a_token_is_asked_for_over_tls_too(ours: Authority) -> None:
    with EmbeddedCoordinator(tls=ours.server(mutual=True), token="right") as coordinator:
        text = refusal(coordinator.address, token="wrong", tls=ours.client(cert=True))
        assert code_of(text) is AccessCode.WRONG_TOKEN


def test_another_name(ours: Authority) -> None:
    with EmbeddedCoordinator(tls=ours.server("node-a.cluster"), token="t") as coordinator:
        text = refusal(coordinator.address, token="t", tls=ours.client())
        facts = (coordinator.address, "'127.0.0.1'", "HOROVOD_TLS_SERVER_NAME")
        assert re.search(ends_with(AccessCode.UNTRUSTED_CERTIFICATE, *facts), text)
        joins(coordinator.address, "t", ours.client(server_name="node-a.cluster"))


def test_an_authority_that_is_not_known(ours: Authority, other: Authority) -> None:
    with EmbeddedCoordinator(tls=ours.server(), token="t") as coordinator:
        text = refusal(coordinator.address, token="t", tls=other.client())
        assert re.search(ends_with(AccessCode.UNTRUSTED_CERTIFICATE, repr(other.file), "HOROVOD_TLS_CA"), text)


def test_a_process_without_tls(ours: Authority) -> None:
    with EmbeddedCoordinator(tls=ours.server(), token="t") as coordinator:
        text = refusal(coordinator.address, token="t")
        assert re.search(ends_with(AccessCode.TLS_ON_ONE_SIDE, "Set HOROVOD_TLS_CA"), text)


def test_a_coordinator_without_tls(ours: Authority) -> None:
    with EmbeddedCoordinator(token="t") as coordinator:
        text = refusal(coordinator.address, token="t", tls=ours.client())
        assert re.search(ends_with(AccessCode.TLS_ON_ONE_SIDE, "--tls-cert", "--tls-key"), text)


def test_no_grpc_behind_tls(ours: Authority) -> None:
    pair = ours.issue("web", "127.0.0.1")
    context = ours_web(pair.cert, pair.key)
    with answering(lambda client: echo(context.wrap_socket(client, server_side=True))) as address:
        assert code_of(refusal(address, tls=ours.client())) is WorldCode.NOT_A_COORDINATOR


def ours_web(cert: str, key: str) -> Any:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


@pytest.mark.parametrize(
    ("which", "fact"),
    [("none", "HOROVOD_TLS_CERT and HOROVOD_TLS_KEY"), ("expired", "expired"), ("foreign", "foreign")],
)
def test_certificates_of_members(ours: Authority, other: Authority, which: str, fact: str) -> None:
    tls = ours.client()
    if which != "none":
        more = {"not_before": LONG_AGO, "not_after": LONG_AGO + datetime.timedelta(1)} if which == "expired" else {}
        pair = (other if which == "foreign" else ours).issue(which, "member.test", **more)
        tls = ClientTls(ours.file, pair.cert, pair.key)
    with EmbeddedCoordinator(tls=ours.server(mutual=True), token="t") as coordinator:
        text = refusal(coordinator.address, token="t", tls=tls)
        assert re.search(ends_with(AccessCode.REFUSED_CERTIFICATE, coordinator.address, fact), text)


def test_a_certificate_that_expires_while_the_coordinator_runs(ours: Authority, tmp_path: Path) -> None:
    """The coordinator checks what it loads; time passes all the same. Here a server that does not look serves one."""
    pair = ours.issue("old", "127.0.0.1", not_before=LONG_AGO, not_after=LONG_AGO + datetime.timedelta(1))
    context = ours_web(pair.cert, pair.key)
    with answering(lambda client: echo(context.wrap_socket(client, server_side=True))) as address:
        text = refusal(address, tls=ours.client())
        assert re.search(ends_with(AccessCode.UNTRUSTED_CERTIFICATE, address, "expired"), text)


# -- rotation ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def session(address: str, tls: ClientTls) -> Iterator[Session]:
    made = Session(address, "t", tls=tls)
    try:
        yield made
    finally:
        made.close()


def test_the_coordinator_takes_new_files(tmp_path: Path, other: Authority, caplog: pytest.LogCaptureFixture) -> None:
    first = Authority(tmp_path / "first")
    tls = first.server()
    with EmbeddedCoordinator(tls=tls, token="t") as coordinator:
        joins(coordinator.address, "t", first.client())
        renewed = other.issue("renewed", "127.0.0.1")
        Path(tls.cert).write_bytes(Path(renewed.cert).read_bytes())  # the key is still the old one's
        joins(coordinator.address, "t", first.client())
        assert OLD_CERTIFICATE_STAYS in caplog.text
        Path(tls.key).write_bytes(Path(renewed.key).read_bytes())
        joins(coordinator.address, "t", other.client())
        text = refusal(coordinator.address, token="t", tls=first.client())
        assert re.search(ends_with(AccessCode.UNTRUSTED_CERTIFICATE, repr(first.file)), text)
        Path(tls.key).unlink()
        joins(coordinator.address, "t", other.client())
        assert caplog.text.count(OLD_CERTIFICATE_STAYS) >= 2, (
            "of a key that is another one's, and of a key that is gone"
        )


def test_a_member_comes_back_with_its_new_certificate(ours: Authority) -> None:
    """A member whose certificate has run out while it trained shows the one that has taken its place."""
    tls = ours.client(cert=True)
    assert tls.cert is not None
    with (
        EmbeddedCoordinator(tls=ours.server(mutual=True), token="t") as coordinator,
        session(coordinator.address, tls) as one,
    ):
        one.join(request(size=1), time.monotonic() + 20)
        before = Path(tls.cert).read_bytes()
        ours.issue("client", "member.test")
        assert Path(tls.cert).read_bytes() != before
        channel = one.coordinators.current.channel
        assert isinstance(channel, RenewedChannel)
        older = channel._latest
        one.member.stream.cancel()
        eventually(lambda: channel._latest is not older and one.member.attached and older.streams == 0)


# -- what the settings say ---------------------------------------------------------------------------------------------
def checked(settings: Settings) -> None:
    tls = ClientTls.of(settings)
    assert tls is not None
    tls.checked_credentials()


def test_settings(ours: Authority, tmp_path: Path) -> None:
    pair = ours.issue("own", "member.test")
    assert ClientTls.of(resolve({})) is None
    given = {"HOROVOD_TLS_CA": ours.file, "HOROVOD_TLS_CERT": pair.cert, "HOROVOD_TLS_KEY": pair.key}
    assert ClientTls.of(resolve(given)) == ClientTls(ours.file, pair.cert, pair.key)
    junk = tmp_path / "junk.pem"
    junk.write_text("nothing")
    other_key = ours.issue("another", "x.test").key
    for changes, code, facts in (
        ({"HOROVOD_TLS_CA": ""}, SettingCode.MISSING_SETTING, ["HOROVOD_TLS_CA"]),
        ({"HOROVOD_TLS_KEY": ""}, SettingCode.MISSING_SETTING, ["HOROVOD_TLS_CERT", "HOROVOD_TLS_KEY"]),
        ({"HOROVOD_TLS_CA": str(tmp_path / "none")}, UNUSABLE, [tmp_path / "none", "No such file or directory"]),
        ({"HOROVOD_TLS_CA": str(junk)}, UNUSABLE, ["HOROVOD_TLS_CA", junk]),
        ({"HOROVOD_TLS_CERT": str(junk)}, UNUSABLE, [junk, pair.key]),
        ({"HOROVOD_TLS_KEY": other_key}, UNUSABLE, [pair.cert, other_key]),
    ):
        with pytest.raises(StartError, match=ends_with(code, *facts)):
            checked(resolve({**given, **changes}))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda a: a.server(not_before=LONG_AGO, not_after=LONG_AGO + datetime.timedelta(1)), "has expired"),
        (lambda a: a.server(not_before=FAR_AHEAD, not_after=FAR_AHEAD + datetime.timedelta(1)), "is not valid yet"),
        (
            lambda a: ServerTls(a.issue("one", "x.test").cert, a.issue("two", "x.test").key),
            "not that of the certificate",
        ),
        (
            lambda a: ServerTls("/nowhere.pem", a.issue("one", "x.test").key),
            "Can't read the certificate '/nowhere.pem'",
        ),
        (lambda a: ServerTls(a.issue("one", "x.test").key, a.issue("one", "x.test").key), "not in PEM|no certificate"),
    ],
)
def test_a_coordinator_does_not_start_with(ours: Authority, make: Any, expected: str) -> None:
    with pytest.raises(OSError, match=expected):
        EmbeddedCoordinator(tls=make(ours)).start()
