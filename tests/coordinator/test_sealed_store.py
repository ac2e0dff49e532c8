"""Who can read and write etcd, and is no coordinator: finds no secret there, and brings nothing to life that it writes.

Jobs that agents run are attacked in tests/extended/runner/test_store_attacks.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import subprocess
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import etcd_server
import pytest
from error_codes import ends_with
from etcd_server import READY_S, Etcd, ctl, ctl_command
from test_store_conformance import WAIT_S, take

from horovod.base.errors import AccessCode, ClusterCode
from horovod.coordinator.store import Store, StoreKeyError, open_store
from horovod.coordinator.store.base import MISSING
from horovod.coordinator.store.records import SUBMITTED, read_records, submitted_key
from horovod.coordinator.store.seal import MAGIC, OVERHEAD_BYTES, Place, Seal, UnsealedError
from horovod.protos.v1 import jobs_pb2

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

SECRET, OTHER_SECRET = "the-secret-of-this-cluster", "the-secret-of-another-cluster"
LEADER = "cluster/leader"


def job(name: str, command: str) -> bytes:
    spec = jobs_pb2.JobSpec(command=[command], environment={"API_KEY": "key-of-the-user"})
    return jobs_pb2.JobRecord(id=name, spec=spec).SerializeToString(deterministic=True)


class Attacker:
    """Reads and writes what it likes under the prefix of one cluster, and has no key."""

    def __init__(self, etcd: Etcd) -> None:
        self._endpoint = etcd.endpoints[0]
        self.prefix = f"{uuid.uuid4()}/"
        self.url = f"{etcd.url}?prefix={self.prefix}"

    def get(self, key: str, *options: str) -> bytes:
        written = ctl(self._endpoint, "get", self.prefix + key, "-w", "json", *options)
        return base64.b64decode(json.loads(written)["kvs"][0]["value"])

    def first(self, key: str) -> bytes:
        """What was written when the entry was created."""
        written = json.loads(ctl(self._endpoint, "get", self.prefix + key, "-w", "json"))
        return self.get(key, f"--rev={written['kvs'][0]['create_revision']}")

    def put(self, key: str, value: bytes) -> None:
        command = [*ctl_command(self._endpoint), "put", self.prefix + key]
        subprocess.run(command, input=value, check=True, capture_output=True, timeout=READY_S)

    def delete(self, key: str) -> None:
        ctl(self._endpoint, "del", self.prefix + key)

    def everything(self) -> bytes:
        return b"".join(
            base64.b64decode(pair["value"])
            for pair in json.loads(ctl(self._endpoint, "get", "", "--prefix", "-w", "json"))["kvs"]
        )


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def attacker(etcd: Etcd) -> Attacker:
    return Attacker(etcd)


def with_store(attacker: Attacker, body: Callable[[Store], Awaitable[None]], *secrets: str) -> None:
    """secrets: of the coordinator; without any it does not seal."""

    async def main() -> None:
        store = open_store(attacker.url, Seal(secrets) if secrets else None)
        try:
            await asyncio.wait_for(body(store), 3 * WAIT_S)
        finally:
            await store.close()

    asyncio.run(main())


# -- what stands there -------------------------------------------------------------------------------------------------
def test_a_reader_finds_no_secret(attacker: Attacker) -> None:
    async def body(store: Store) -> None:
        for key in (submitted_key("a"), "jobs/a/world", LEADER, "replicas/x", "code/chunk/0/00000"):
            await store.put(key, job("a", "train.py"))
        everything = attacker.everything()
        assert b"key-of-the-user" not in everything
        assert b"train.py" not in everything
        assert everything.count(MAGIC) >= 6  # each entry, and the one that tells the key

    with_store(attacker, body, SECRET)


def forged(attacker: Attacker) -> None:
    attacker.put(submitted_key("a"), job("a", "steal.sh"))


def forged_with_a_key(attacker: Attacker) -> None:
    place = Place(1, 2)
    sealed = Seal([OTHER_SECRET]).close(attacker.prefix + submitted_key("a"), job("a", "steal.sh"), place)
    attacker.put(submitted_key("a"), sealed)


def of_another_job(attacker: Attacker) -> None:
    attacker.put(submitted_key("a"), attacker.get(submitted_key("b")))


def of_another_key(attacker: Attacker) -> None:
    attacker.put(submitted_key("a"), attacker.get("jobs/a/world"))


def one_bit(attacker: Attacker) -> None:
    value = bytearray(attacker.get(submitted_key("a")))
    value[-20] ^= 1
    attacker.put(submitted_key("a"), bytes(value))


def the_same(attacker: Attacker) -> None:
    """Written again, it is no longer in its place."""
    attacker.put(submitted_key("a"), attacker.get(submitted_key("a")))


def older(attacker: Attacker) -> None:
    value = attacker.get(submitted_key("a"))
    attacker.put(submitted_key("a"), b"x")
    attacker.put(submitted_key("a"), value)


def older_after_deletion(attacker: Attacker) -> None:
    """As often written as the value says, but not created when it says."""
    first, value = attacker.first(submitted_key("a")), attacker.get(submitted_key("a"))
    attacker.delete(submitted_key("a"))
    attacker.put(submitted_key("a"), first)
    attacker.put(submitted_key("a"), value)


def cut(attacker: Attacker) -> None:
    attacker.put(submitted_key("a"), attacker.get(submitted_key("a"))[: OVERHEAD_BYTES - 1])


ATTACKS = (
    forged, forged_with_a_key, of_another_job, of_another_key, one_bit, the_same, older, older_after_deletion, cut,
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_no_coordinator_wrote_is_not_there_and_is_named(
    attacker: Attacker, attack: Callable[[Attacker], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for a coordinator that begins, nor for one that watches; and what else is there goes on."""
    key = submitted_key("a")

    async def submit(store: Store) -> None:
        await store.put("jobs/a/world", b"a world")
        for name in "ab":
            assert await store.put_if(submitted_key(name), job(name, "train.py"), MISSING) is not None

    async def attacked(store: Store) -> None:
        _, revision = await store.range(SUBMITTED)
        watching = store.watch(SUBMITTED, revision + 1)
        await asyncio.to_thread(attack, attacker)
        changes = await take(watching, 1)
        assert changes == [(key, None)]
        assert await store.get(key) is None

    async def begins(store: Store) -> None:
        found = await read_records(store)
        assert [record.id for record, _ in found] == ["b"]
        assert await store.put_if(key, job("a", "again.py"), 1) is None
        assert await store.put_if(key, job("a", "again.py"), MISSING) is not None
        assert [record.spec.command for record, _ in await read_records(store)] == [["again.py"], ["train.py"]]

    with_store(attacker, submit, SECRET)
    with_store(attacker, attacked, SECRET)
    with_store(attacker, begins, SECRET)
    # gRPC may log that a loop is closed, since `with_store` begins one for each store.
    ours = [record for record in caplog.records if record.name.startswith("horovod.")]
    told = [record.getMessage() for record in ours if record.levelno == logging.ERROR]
    assert told
    for sentence in told:
        assert re.search(ends_with(ClusterCode.STORE_TAMPERED, attacker.prefix + key), sentence)


def test_who_decides_writes_over_it_as_over_its_own(attacker: Attacker) -> None:
    """A leader does not read what it has in memory, so its next write brings the truth back."""
    key = submitted_key("a")

    async def body(store: Store) -> None:
        await store.put(key, job("a", "train.py"))
        for attack in (forged, older, attacker_deletes):
            await asyncio.to_thread(attack, attacker)
            written = await store.put(key, job("a", "train.py"))
            assert await store.get(key) == written

    def attacker_deletes(attacker: Attacker) -> None:
        attacker.delete(key)

    with_store(attacker, body, SECRET)


def test_an_entry_that_was_only_created_is_not_there(attacker: Attacker) -> None:
    """As after the end of a coordinator between the two writes; or by an attacker, for whom it is a deletion."""
    key = submitted_key("a")

    async def body(store: Store) -> None:
        await store.put(key, job("a", "train.py"))
        blank = attacker.first(key)
        assert blank != attacker.get(key)
        attacker.delete(key)
        attacker.put(key, blank)
        assert await store.get(key) is None
        assert (await store.range(SUBMITTED))[0] == []
        written = await store.put_if(key, job("a", "train.py"), MISSING)
        assert written is not None
        assert await store.get(key) == written

    with_store(attacker, body, SECRET)


@pytest.mark.parametrize("value", [b"x", b"\x0a\x04evil\x12\x09evil:1234", MAGIC])
def test_a_key_that_one_coordinator_holds_is_free_when_another_writes_there(attacker: Attacker, value: bytes) -> None:
    """The holder sees that its revision is another one; nobody is sent to the address in a forged value."""

    async def body(store: Store) -> None:
        held = await store.put_if(LEADER, b"me", MISSING)
        assert held is not None
        await asyncio.to_thread(attacker.put, LEADER, value)
        assert await store.get(LEADER) is None
        assert await store.put_if(LEADER, b"me", held.revision) is None
        again = await store.put_if(LEADER, b"me", MISSING)
        assert again is not None
        assert await store.put_if(LEADER, b"another", MISSING) is None
        assert await store.get(LEADER) == again

    with_store(attacker, body, SECRET)


# -- which key ---------------------------------------------------------------------------------------------------------
async def _writes(store: Store) -> None:
    written = await store.put(submitted_key("a"), job("a", "train.py"))
    assert await store.get(submitted_key("a")) == written


async def _is_refused(store: Store) -> None:
    """Nothing is taken for tampered, since then agents would end what runs."""
    for call in (store.get(submitted_key("a")), store.range(""), store.put("b", b""), store.put_if("b", b"", MISSING)):
        with pytest.raises(StoreKeyError, match=ends_with(ClusterCode.STORE_KEY, "--token-file")):
            await call
    with pytest.raises(StoreKeyError):
        await take(store.watch("", 1), 1)


def test_a_coordinator_with_another_key_does_nothing(attacker: Attacker) -> None:
    with_store(attacker, _writes, SECRET)
    with_store(attacker, _is_refused, OTHER_SECRET)
    with_store(attacker, _writes, SECRET)


def test_a_coordinator_without_a_key_does_not_read_what_is_sealed(attacker: Attacker) -> None:
    async def body(store: Store) -> None:
        with pytest.raises(StoreKeyError, match=ends_with(ClusterCode.STORE_KEY, "--token-file")):
            await store.range("")

    with_store(attacker, _writes, SECRET)
    with_store(attacker, body)


def test_what_was_written_without_a_key_is_not_believed(attacker: Attacker) -> None:
    """An upgrade: the sentence says how to begin with an empty store."""

    async def body(store: Store) -> None:
        with pytest.raises(
            StoreKeyError, match=ends_with(ClusterCode.STORE_KEY, f"etcdctl del --prefix {attacker.prefix}")
        ):
            await store.range("")

    with_store(attacker, _writes)
    with_store(attacker, body, SECRET)
    attacker.delete(submitted_key("a"))
    with_store(attacker, _writes, SECRET)


def test_keys_are_replaced_while_coordinators_run(attacker: Attacker) -> None:
    async def is_there(store: Store) -> None:
        assert await store.get(submitted_key("a")) is not None

    with_store(attacker, _writes, OTHER_SECRET)
    with_store(attacker, is_there, OTHER_SECRET, SECRET)  # first, all learn the new one
    with_store(attacker, is_there, SECRET, OTHER_SECRET)  # then all seal with it
    with_store(attacker, _is_refused, OTHER_SECRET)
    with_store(attacker, _writes, SECRET, OTHER_SECRET)
    with_store(attacker, is_there, SECRET)


def test_the_entry_that_tells_the_key_may_go(attacker: Attacker) -> None:
    with_store(attacker, _writes, SECRET)
    attacker.delete("sealed")
    with_store(attacker, _writes, SECRET)
    attacker.delete("sealed")
    with_store(attacker, _is_refused_as_unknown, OTHER_SECRET)
    attacker.put("sealed", b"rubbish")

    async def body(store: Store) -> None:
        with pytest.raises(StoreKeyError, match=ends_with(ClusterCode.STORE_KEY, f"etcdctl del {attacker.prefix}sea")):
            await store.range("")

    with_store(attacker, body, SECRET)
    attacker.delete("sealed")
    with_store(attacker, _writes, SECRET)


async def _is_refused_as_unknown(store: Store) -> None:
    with pytest.raises(StoreKeyError, match=ends_with(ClusterCode.STORE_KEY)):
        await store.range("")


# -- the seal alone ----------------------------------------------------------------------------------------------------
def test_a_seal_holds_for_one_key_and_one_place() -> None:
    seal = Seal([SECRET])
    sealed = seal.close("k", b"value", Place(7, 2))
    assert seal.open("k", sealed, Place(7, 2)) == b"value"
    assert len(sealed) == len(b"value") + OVERHEAD_BYTES
    for key, place in (("l", Place(7, 2)), ("k", Place(7, 3)), ("k", Place(8, 2)), ("k", Place(72, 0))):
        with pytest.raises(UnsealedError):
            seal.open(key, sealed, place)
    assert seal.close("k", b"value", Place(7, 2)) != sealed, "a nonce was used twice"


def test_secrets_that_are_too_short_and_files_that_hold_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=ends_with(AccessCode.WEAK_TOKEN, "15 characters")):
        Seal([SECRET, "x" * 15])
    file = tmp_path / "keys"
    for content in ("", "\n \n", "two words on a line\n"):
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(OSError, match=ends_with(AccessCode.UNUSABLE_TOKEN, str(file), "--store-key-file")):
            Seal.from_file(str(file))
    file.write_text(f"{SECRET}\n\n{OTHER_SECRET}\n")
    sealed = Seal([OTHER_SECRET]).close("k", b"value")
    found = Seal.from_file(str(file))
    assert found.open("k", sealed) == b"value"
    assert Seal([SECRET]).open("k", found.close("k", b"other")) == b"other"
