"""What only etcd can do to a store: lost answers, histories that are cut, encryption, logins.

tests/extended/coordinator has a cluster whose nodes die, stop and come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import etcd_server
import pytest
import trustme
from error_codes import ends_with
from etcd_server import Etcd, ctl
from resources import eventually
from tcp_proxy import Proxy
from test_store_conformance import WAIT_S, take

from horovod.base.errors import ClusterCode, SettingCode
from horovod.base.protocol import STORE_FORMAT, __version__
from horovod.coordinator.store import CompactedError, Store, StoreError, StoreFormatError, UncertainError, open_store
from horovod.coordinator.store.base import MISSING
from horovod.coordinator.store.etcd import EtcdStore
from horovod.coordinator.store.etcd_address import EtcdAddress
from horovod.coordinator.store.etcd_client import CALL_S
from horovod.coordinator.store.jobs import next_epoch
from horovod.coordinator.store.seal import Seal

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

SHORT_S = 1.0  # for calls that can't succeed

Body = Callable[[Store], Awaitable[None]]


def with_store(url: str, body: Body, call_s: float = CALL_S, seal: Seal | None = None) -> None:
    async def main() -> None:
        store = EtcdStore(EtcdAddress.parse(url), call_s, seal)
        try:
            await asyncio.wait_for(body(store), 3 * WAIT_S)
        finally:
            await store.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


def test_a_store_of_another_format_is_left_alone(one: Etcd) -> None:
    """What coordinators of another release have written is neither read nor changed, and they are named."""
    url = f"{one.url}?prefix=formats/"

    async def writes(store: Store) -> None:
        await store.put("a", b"1")
        assert [entry.key for entry in (await store.range(""))[0]] == ["a"]

    async def is_refused(store: Store) -> None:
        facts = "Horovod 2.98.4", f"format {STORE_FORMAT + 1}", __version__, f"format {STORE_FORMAT}"
        for call in (store.get("a"), store.put("a", b"2"), store.put_if("b", b"", MISSING)):
            with pytest.raises(StoreFormatError, match=ends_with(ClusterCode.STORE_FORMAT, *facts)):
                await call

    with_store(url, writes)
    assert ctl(one.endpoints[0], "get", "--print-value-only", "formats/format") == f"{STORE_FORMAT} {__version__}\n"
    ctl(one.endpoints[0], "put", "formats/format", f"{STORE_FORMAT} 1.97.3")
    with_store(url, writes)  # of a release that writes as this one does
    ctl(one.endpoints[0], "put", "formats/format", f"{STORE_FORMAT + 1} 2.98.4")
    with_store(url, is_refused)
    assert ctl(one.endpoints[0], "get", "--print-value-only", "formats/a") == "1\n"


def test_nobody_takes_his_own_lost_answer_for_anothers_write(one: Etcd) -> None:
    """The write happens, its answer is lost: it must be neither repeated nor denied."""
    with Proxy(one.endpoints[0]) as proxy:

        async def body(store: Store) -> None:
            first = await store.put_if("lost/a", b"1", MISSING)
            assert first is not None
            proxy.mute(answers_only=True)
            writing = asyncio.create_task(store.put_if("lost/a", b"2", first.revision))
            await asyncio.to_thread(_await_value, one, "lost/a", "2")
            proxy.cut()
            with pytest.raises(UncertainError, match=ends_with(ClusterCode.STORE_WRITE_UNSURE, "etcd at ")):
                await writing
            entry = await store.get("lost/a")
            assert entry is not None
            assert entry.value == b"2"

            epochs = [await next_epoch(store, "lost")]
            proxy.mute(answers_only=True)
            direct = open_store(one.url)
            # Its first read has no answer either, so the number is taken by somebody else meanwhile.
            pending = asyncio.create_task(next_epoch(store, "lost"))
            epochs.append(await next_epoch(direct, "lost"))
            proxy.cut()
            epochs.append(await pending)
            await direct.close()
            assert epochs == sorted(set(epochs)), "an epoch was given twice"

        with_store(f"etcd://{proxy.address}", body)


def test_a_watch_that_wants_what_was_compacted_is_told(one: Etcd) -> None:
    async def body(store: Store) -> None:
        first = await store.put("compacted/a", b"1")
        last = await store.put("compacted/a", b"2")
        ctl(one.endpoints[0], "compact", str(last.revision))
        with pytest.raises(CompactedError, match=f"revision {last.revision} .* {first.revision} "):
            await take(store.watch("compacted/", first.revision), 1)
        assert await take(store.watch("compacted/", last.revision), 1) == [("compacted/a", b"2")]

    with_store(one.url, body)


def test_prefixes_keep_clusters_apart(one: Etcd) -> None:
    async def body(store: Store) -> None:
        await store.put("apart", b"1")
        other = open_store(one.url + "?prefix=other/")
        assert await other.get("apart") is None
        assert (await other.range(""))[0] == []
        await other.close()

    with_store(one.url, body)


def test_no_proxy_is_asked_for_the_way_to_etcd(one: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:3128")  # RFC 5737: nobody has this address

    async def body(store: Store) -> None:
        await store.put("direct", b"1")

    with_store(one.url, body)


def _await_value(etcd: Etcd, key: str, value: str) -> None:
    def is_there() -> bool:
        return ctl(etcd.endpoints[0], "get", "--print-value-only", f"horovod/{key}").strip() == value

    assert eventually(is_there)


# -- who is let in -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    for name, made in (("server", ca.issue_cert("127.0.0.1")), ("me", ca.issue_cert("me@example.org"))):
        made.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        for index, blob in enumerate(made.cert_chain_pems):
            blob.write_to_path(str(folder / f"{name}.pem"), append=index > 0)
    return folder


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Etcd]:
    """It wants a certificate of its clients."""
    flags = [
        "--cert-file", str(certificates / "server.pem"), "--key-file", str(certificates / "server.key"),
        "--trusted-ca-file", str(certificates / "ca.pem"), "--client-cert-auth",
    ]  # fmt: skip
    with Etcd(tmp_path_factory.mktemp("etcd"), 1, flags, scheme="https") as etcd:
        yield etcd


async def _writes(store: Store) -> None:
    assert (await store.put("a", b"1")) == await store.get("a")
    changes = store.watch("a", 1)
    assert (await take(changes, 1))[0][0] == "a"


async def _is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match=ends_with(ClusterCode.STORE_FAILED, "etcd at ")):
        await store.get("a")


def test_both_sides_show_a_certificate(mutual: Etcd, certificates: Path) -> None:
    ours = f"?ca={certificates}/ca.pem&cert={certificates}/me.pem&key={certificates}/me.key"
    with_store(mutual.url + ours, _writes)
    with_store(mutual.url + f"?ca={certificates}/ca.pem", _is_refused, SHORT_S)
    with_store(mutual.url + ours.replace("/ca.pem", "/other.pem"), _is_refused, SHORT_S)
    with_store(mutual.url, _is_refused, SHORT_S)


def test_users_log_in_again_when_they_have_to(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    with Etcd(tmp_path / "data", 1, ["--auth-token-ttl", "1"]) as etcd:
        for command in (["user", "add", "root:secret"], ["user", "grant-role", "root", "root"], ["auth", "enable"]):
            ctl(etcd.endpoints[0], *command)

        async def body(store: Store) -> None:
            await _writes(store)
            latest = (await store.range(""))[1]
            changes = store.watch("later", latest + 1)
            waiting = asyncio.create_task(take(changes, 1))
            await asyncio.wait([waiting], timeout=2.5)  # longer than a login lasts
            await store.put("later", b"1")
            assert await waiting == [("later", b"1")]
            lease = await store.grant(60)
            ctl(etcd.endpoints[0], "--user=root:secret", "user", "add", "another:one")  # makes logins old
            await store.keep_alive(lease)

        with_store(f"{etcd.url}?user=root&password_file={password}", body)
        password.write_text("wrong")

        async def refused(store: Store) -> None:
            with pytest.raises(StoreError, match=ends_with(ClusterCode.STORE_FAILED, "authentication failed")):
                await store.get("a")

        with_store(f"{etcd.url}?user=root&password_file={password}", refused)
        with_store(etcd.url, _is_not_let_in)


async def _is_not_let_in(store: Store) -> None:
    with pytest.raises(StoreError, match=ends_with(ClusterCode.STORE_FAILED, "user name is empty")):
        await store.put("a", b"1")


# -- addresses ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("redis://h:1", SettingCode.INVALID_SETTING, ("'redis://h:1'", "'sqlite:PATH'")),
        ("etcd://", SettingCode.INVALID_SETTING, ("'etcd://'", "'etcd://h1:2379,")),
        ("etcd://h1", SettingCode.INVALID_SETTING, ("'h1'", "HOST:PORT")),
        ("etcd://h1:2379,h2:x", SettingCode.INVALID_SETTING, ("'h2:x'", "HOST:PORT")),
        ("etcd://me@h1:2379", SettingCode.INVALID_SETTING, ("'etcd://me@h1:2379'", "'etcd://h1:2379,")),
        ("etcd://h1:2379/path", SettingCode.INVALID_SETTING, ("'etcd://h1:2379/path'", "'etcd://h1:2379,")),
        ("etcd://h1:2379?tls=yes", SettingCode.INVALID_SETTING, ("'tls'", "password_file")),
        ("etcd://h1:2379?ca", SettingCode.INVALID_SETTING, ("'ca'", "password_file")),
        ("etcd://h1:2379?ca=/does/not/exist", SettingCode.UNUSABLE_FILE, ("/does/not/exist", "No such file")),
        ("etcd://h1:2379?ca=/dev/null&cert=/dev/null", SettingCode.MISSING_SETTING, ("'cert'", "'key'")),
        ("etcd://h1:2379?cert=/dev/null&key=/dev/null", SettingCode.MISSING_SETTING, ("'cert'", "'ca'")),
        ("etcd://h1:2379?user=me", SettingCode.MISSING_SETTING, ("'user'", "'password_file'")),
    ],
)
def test_addresses_that_make_no_sense(text: str, code: SettingCode, facts: Sequence[str]) -> None:
    with pytest.raises(ValueError, match=ends_with(code, *facts)):
        open_store(text)


def test_nobody_listens_there() -> None:
    async def body(store: Store) -> None:
        with pytest.raises(StoreError, match=ends_with(ClusterCode.STORE_FAILED, "127.0.0.1:9", "refused")):
            await store.get("a")
        with pytest.raises(StoreError, match=ends_with(ClusterCode.STORE_FAILED, "127.0.0.1:9")):
            await store.put("a", b"1")

    with_store("etcd://127.0.0.1:9", body, SHORT_S)
