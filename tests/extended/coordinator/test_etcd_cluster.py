"""A store in three nodes of etcd that die, stop and come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import etcd_server
import pytest
from error_codes import ends_with
from etcd_server import Etcd, stopped
from test_etcd_store import SHORT_S, with_store
from test_store_conformance import WAIT_S, take

from horovod.base.errors import ClusterCode
from horovod.coordinator.config import Limits
from horovod.coordinator.store import Store, StoreError, UncertainError
from horovod.coordinator.store.etcd import EtcdStore
from horovod.coordinator.store.etcd_address import EtcdAddress
from horovod.coordinator.store.jobs import next_epoch

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path, 3) as etcd:
        yield etcd


def test_nodes_may_be_lost_one_after_the_other(three: Etcd) -> None:
    async def body(store: Store) -> None:
        _, revision = await store.range("")
        changes = store.watch("", revision + 1)
        lease = await store.grant(60)
        written = 0
        for node in range(3):
            await store.put("a", b"%d" % written)
            assert await take(changes, 1) == [("a", b"%d" % written)]
            written += 1
            three.kill(node)
            for _ in range(5):  # the other two go on, at once or when they have a leader
                while True:
                    with contextlib.suppress(UncertainError):
                        await store.put("a", b"%d" % written)
                        break
                written += 1
            values = [int(value or b"") for _, value in await take(changes, 5)]
            while values[-1] < written - 1:  # of writes that were uncertain, some have happened
                values += [int(value or b"") for _, value in await take(changes, 1)]
            assert sorted(set(values)) == list(range(written - 5, written)), "a change is missing"
            await store.keep_alive(lease)
            ready = three.start(node)
            assert await asyncio.to_thread(ready.wait, WAIT_S)

    with_store(three.url, body)


def test_a_node_that_is_stopped_is_left(three: Etcd) -> None:
    async def body(store: Store) -> None:
        epochs = [await next_epoch(store, "job")]
        with stopped(three, 0):
            epochs += [await next_epoch(store, "job") for _ in range(3)]
        epochs += [await next_epoch(store, "job")]
        assert epochs == sorted(set(epochs))

    with_store(three.url, body)


def test_a_watch_at_a_node_that_is_stopped_goes_on_elsewhere(three: Etcd) -> None:
    """Before anybody can be lost for want of what it would have told."""

    async def body(store: Store) -> None:
        _, revision = await store.range("")
        changes = store.watch("", revision + 1)
        await store.put("a", b"1")
        assert await take(changes, 1) == [("a", b"1")]
        others = EtcdStore(EtcdAddress.parse("etcd://" + ",".join(three.endpoints[1:])))
        with stopped(three, 0):
            while (entry := await others.get("a")) is None or entry.value != b"2":  # when they have a leader
                with contextlib.suppress(UncertainError):
                    await others.put("a", b"2")
            assert await asyncio.wait_for(take(changes, 1), Limits().reattach_grace_s) == [("a", b"2")]
        await others.close()

    with_store(three.url, body)


def test_without_a_majority_nothing_is_answered(three: Etcd) -> None:
    async def body(store: Store) -> None:
        await store.put("a", b"1")
        for node in (1, 2):
            three.kill(node)
        impatient = EtcdStore(EtcdAddress.parse(three.url), SHORT_S)
        with pytest.raises(StoreError, match=ends_with(ClusterCode.STORE_FAILED, "127.0.0.1:")):
            await impatient.get("a")
        with pytest.raises(StoreError):
            await impatient.put("a", b"2")
        await impatient.close()
        for ready in [three.start(node) for node in (1, 2)]:
            assert await asyncio.to_thread(ready.wait, WAIT_S)
        entry = await store.get("a")
        assert entry is not None
        assert entry.value in (b"1", b"2")

    with_store(three.url, body)
