"""What every store must do. A new implementation joins by a line in STORES."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import etcd_server
import pytest
from error_codes import ends_with
from etcd_server import Etcd

from horovod.base.errors import ClusterCode
from horovod.coordinator.core.cluster.job_record import MAX_RECORD_BYTES
from horovod.coordinator.store import (
    Change,
    FencedError,
    Guard,
    LeaseLostError,
    Store,
    StoreError,
    TooLargeError,
    open_store,
)
from horovod.coordinator.store.base import MAX_WRITE_BYTES, MISSING
from horovod.coordinator.store.holding import release
from horovod.coordinator.store.jobs import (
    claim,
    epoch_key,
    expire_epoch,
    forget_job,
    next_epoch,
    publish_world,
    read_world,
    retract_world,
    serving_key,
    world_key,
    write_gone,
)
from horovod.coordinator.store.seal import Seal
from horovod.protos.v1 import membership_pb2

WAIT_S = 20.0


STORES = {
    "memory": 0.02,
    "sqlite": 0.02,
    "etcd": 1.0,
    "sealed": 1.0,
}  # the shortest lease that each can give, in seconds

Body = Callable[[Store], Awaitable[None]]


@dataclass(frozen=True)
class Kind:
    make: Callable[[], Store]
    short_ttl_s: float


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    if why := etcd_server.missing():
        pytest.skip(why)
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture(params=list(STORES))
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    """Each test has keys of its own."""
    name = request.param
    url = {"memory": "memory:", "sqlite": f"sqlite:{tmp_path}/store"}.get(name)
    if url is None:
        url = f"{request.getfixturevalue('etcd').url}?prefix={uuid.uuid4()}/"
    seal = Seal(["a secret of the cluster"]) if name == "sealed" else None
    return Kind(lambda: open_store(url, seal), STORES[name])


@pytest.fixture
def run(kind: Kind) -> Callable[[Body], None]:
    def run_body(body: Body) -> None:
        async def main() -> None:
            store = kind.make()
            try:
                await asyncio.wait_for(body(store), WAIT_S)
            finally:
                await store.close()

        asyncio.run(main())

    return run_body


async def take(changes: AsyncIterator[Change], count: int) -> list[tuple[str, bytes | None]]:
    found = []
    for _ in range(count):
        change = await asyncio.wait_for(changes.__anext__(), WAIT_S)
        found.append((change.key, change.value))
    return found


def test_put_get_delete(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        assert await store.get("a") is None
        written = await store.put("a", b"1")
        assert await store.get("a") == written
        again = await store.put("a", b"")
        assert again.revision > written.revision
        assert (await store.get("a")) == again
        assert await store.delete("a")
        assert await store.get("a") is None
        assert not await store.delete("a")

    run(body)


def test_compare_and_swap(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        first = await store.put_if("a", b"1", MISSING)
        assert first is not None
        assert await store.put_if("a", b"2", MISSING) is None
        second = await store.put_if("a", b"2", first.revision)
        assert second is not None
        assert await store.put_if("a", b"3", first.revision) is None
        assert not await store.delete("a", first.revision)
        assert await store.get("a") == second
        assert await store.delete("a", second.revision)
        assert await store.put_if("a", b"4", second.revision) is None
        assert await store.put_if("a", b"4", MISSING) is not None

    run(body)


def test_a_write_under_a_guard_that_does_not_hold_is_none(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        held = await store.put("guard", b"mine")
        guard = Guard("guard", held.revision)
        free = Guard("other", MISSING)
        written = await store.put("a", b"1", guard=guard)
        assert await store.put_if("a", b"2", MISSING, guard=guard) is None  # the guard holds, the condition does not
        written = await store.put_if("a", b"2", written.revision, guard=free) or written
        await store.put("guard", b"theirs")
        for fenced in (
            store.put("a", b"3", guard=guard),
            store.put_if("a", b"3", written.revision, guard=guard),
            store.put_if("a", b"3", MISSING, guard=guard),
            store.delete("a", guard=guard),
            store.delete("a", written.revision, guard=guard),
        ):
            with pytest.raises(FencedError):
                await fenced
        assert await store.get("a") == written
        assert await store.delete("a", guard=free)
        assert not await store.delete("a", guard=free)
        await store.put("other", b"")
        with pytest.raises(FencedError):
            await store.put("a", b"4", guard=free)

    run(body)


def test_range_is_ordered_and_exact(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        assert (await store.range("jobs/"))[0] == []
        for key in ("jobs/b", "jobs", "jobs/a", "jobsx", "jobs/a/x"):
            await store.put(key, key.encode())
        entries, revision = await store.range("jobs/")
        assert [entry.key for entry in entries] == ["jobs/a", "jobs/a/x", "jobs/b"]
        assert revision >= max(entry.revision for entry in entries)

    run(body)


def test_what_no_store_takes_is_refused_and_changes_nothing(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        largest = b"x" * (MAX_WRITE_BYTES - 1)
        held = await store.put("a", largest)
        for refused in (
            store.put("a", largest + b"x"),
            store.put("a", largest + b"x", guard=Guard("a", held.revision)),
            store.put_if("a", largest + b"x", held.revision),
            store.put_if("a", largest + b"x", held.revision, guard=Guard("a", held.revision)),
        ):
            with pytest.raises(
                TooLargeError, match=ends_with(ClusterCode.TOO_LARGE_FOR_STORE, "1,500,001", "1,500,000")
            ):
                await refused
        assert await store.get("a") == held
        assert await store.put_if("a", largest, held.revision, guard=Guard("a", held.revision)) is not None

    run(body)


def test_a_range_has_all_entries_however_many(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        await asyncio.gather(*(store.put(f"many/{number:03}", b"%d" % number) for number in range(100)))
        entries, revision = await store.range("many/")
        assert [int(entry.value) for entry in entries] == list(range(100))
        assert revision >= max(entry.revision for entry in entries)

    run(body)


def test_one_of_many_writers_wins(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        results = await asyncio.gather(*(store.put_if("a", b"%d" % number, MISSING) for number in range(20)))
        winners = [entry for entry in results if entry]
        assert len(winners) == 1
        assert await store.get("a") == winners[0]

    run(body)


def test_a_watch_sees_changes_of_its_prefix_in_order(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        _, revision = await store.range("")
        changes = store.watch("jobs/", revision + 1)
        waiting = asyncio.create_task(take(changes, 3))
        await store.put("jobs/a", b"1")
        await store.put("other", b"x")
        await store.put("jobs/a", b"2")
        await store.delete("jobs/a")
        assert await waiting == [("jobs/a", b"1"), ("jobs/a", b"2"), ("jobs/a", None)]

    run(body)


def test_a_watch_resumes_where_another_one_stopped(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        _, revision = await store.range("")
        for number in range(5):
            await store.put("a", b"%d" % number)
        first = store.watch("a", revision + 1)
        seen = [await first.__anext__() for _ in range(2)]
        second = store.watch("a", seen[-1].revision + 1)
        assert await take(second, 3) == [("a", b"2"), ("a", b"3"), ("a", b"4")]

    run(body)


def test_a_lease_that_ends_takes_its_entries_along(run: Callable[[Body], None], kind: Kind) -> None:
    async def body(store: Store) -> None:
        lease = await store.grant(kind.short_ttl_s)
        await store.put("leased", b"1", lease)
        await store.put("kept", b"1", lease)
        entry = await store.put("kept", b"2")  # the latest write decides, and it has no lease
        assert await take(store.watch("leased", entry.revision + 1), 1) == [("leased", None)]
        assert await store.get("leased") is None
        assert await store.get("kept") == entry
        with pytest.raises(LeaseLostError):
            await store.keep_alive(lease)
        with pytest.raises(LeaseLostError):
            await store.put("leased", b"1", lease)
        await store.revoke(lease)  # nothing happens

    run(body)


def test_a_revoked_lease_ends_at_once(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        lease, other = await store.grant(1000.0), await store.grant(1000.0)
        assert lease != other
        await store.keep_alive(lease)
        assert await store.put_if("a", b"1", MISSING, lease) is not None
        await store.put("b", b"1", other)
        await store.revoke(lease)
        assert await store.get("a") is None
        assert await store.get("b") is not None

    run(body)


def test_a_closed_store_says_so(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        changes = store.watch("", 1)
        waiting = asyncio.create_task(take(changes, 1))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(StoreError):
            await waiting
        with pytest.raises(StoreError):
            await store.get("a")

    run(body)


# -- the keys of a job, on every store -------------------------------------------------------------------------------


def test_epochs_only_grow_whoever_asks(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        epochs = await asyncio.gather(*(next_epoch(store, "digits") for _ in range(10)))
        assert sorted(epochs) == list(range(1, 11))
        assert await next_epoch(store, "other") == 1

    run(body)


def record(epoch: int) -> membership_pb2.WorldRecord:
    return membership_pb2.WorldRecord(world=membership_pb2.World(job="digits", epoch=epoch))


def gone_member(rank: int) -> membership_pb2.MemberGone:
    sentence = f"Rank {rank} (pid 1) on host a-host-with-a-long-name left: it called hvd.shutdown() or ended."
    return membership_pb2.MemberGone(
        epoch=1, rank=rank, host="a-host-with-a-long-name", orderly=True, sentence=sentence
    )


def large_record(epoch: int, members: int = 40_000) -> membership_pb2.WorldRecord:
    large = record(epoch)
    large.world.secret = b"%d" % epoch * 32
    for rank in range(members):
        large.world.members.add(member_id=f"{epoch}-{rank}-{'x' * 30}", pid=rank)
    return large


async def keys(store: Store, prefix: str = "jobs/") -> list[str]:
    return [entry.key for entry in (await store.range(prefix))[0]]


def test_a_world_that_no_store_takes_in_one_write_is_there_as_others_are(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        first, second = large_record(1), large_record(2, 50_000)
        assert first.ByteSize() > MAX_WRITE_BYTES
        assert await publish_world(store, first) is not None
        found = await read_world(store, "digits")
        assert found is not None
        assert found[0] == first
        assert await publish_world(store, second) is not None
        found = await read_world(store, "digits")
        assert found is not None
        assert found[0] == second
        assert not [key for key in await keys(store) if "/00000000000000000001/" in key]  # the parts of the first
        assert await publish_world(store, first) is None
        await retract_world(store, "digits", found[1])
        assert await keys(store) == []

    run(body)


def test_who_is_gone_of_the_largest_world_is_kept(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        guard = await claim(store, "digits", membership_pb2.Serving(replica="a"), None)
        assert guard is not None
        await publish_world(store, record(1), guard)
        gone = membership_pb2.GoneRecord(epoch=1, gone=[gone_member(rank) for rank in range(1 << 16)])
        assert gone.ByteSize() > MAX_WRITE_BYTES
        await write_gone(store, "digits", gone, guard)
        found = await read_world(store, "digits")
        assert found is not None
        kept = found[2].gone
        assert [(one.rank, one.orderly) for one in kept] == [(rank, True) for rank in range(1 << 16)]
        assert kept[0] == gone.gone[0]
        assert kept[-1].sentence == "Rank 65535 is gone."

    run(body)


def test_the_counter_of_a_job_that_is_over_goes_unless_it_forms_again(
    run: Callable[[Body], None], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod.coordinator.store.jobs.KEPT_EPOCH_S", kind.short_ttl_s)

    async def body(store: Store) -> None:
        guard = await claim(store, "digits", membership_pb2.Serving(replica="a"), None)
        assert guard is not None
        await expire_epoch(store, "digits", guard)  # of a job that never had one
        for number in (1, 2):
            assert await next_epoch(store, "digits") == number
            await expire_epoch(store, "digits", guard)
        formed = await store.get(epoch_key("digits"))
        assert formed is not None
        assert await take(store.watch(epoch_key("digits"), formed.revision + 1), 1) == [(epoch_key("digits"), None)]
        assert await next_epoch(store, "digits") == 1
        await forget_job(store, "digit")  # another job
        assert await keys(store) == [epoch_key("digits"), serving_key("digits")]
        await forget_job(store, "digits")
        assert await keys(store) == []

    run(body)


def test_an_earlier_world_never_replaces_a_later_one(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        first = await publish_world(store, record(1))
        third = await publish_world(store, record(3))
        assert first is not None
        assert third is not None
        assert await publish_world(store, record(2)) is None
        await retract_world(store, "digits", first.revision)
        assert await store.get(world_key("digits")) == third
        await retract_world(store, "digits", third.revision)
        assert await store.get(world_key("digits")) is None

    run(body)


def test_the_record_of_a_job_leaves_room_for_its_key() -> None:
    assert MAX_RECORD_BYTES < MAX_WRITE_BYTES - 1000


def test_job_names_cannot_reach_other_keys() -> None:
    assert world_key("a/epoch") != epoch_key("a")
    assert epoch_key("../x").count("/") == 2


def test_one_serves_a_job_and_who_was_replaced_decides_nothing_more(run: Callable[[Body], None]) -> None:
    async def body(store: Store) -> None:
        first, second = (membership_pb2.Serving(replica=name, address=f"{name}:1") for name in "ab")
        guards = await asyncio.gather(*(claim(store, "digits", one, None) for one in (first, second)))
        assert sorted(guard is None for guard in guards) == [False, True]
        old = next(guard for guard in guards if guard)
        assert await publish_world(store, record(1), old) is not None
        gone = membership_pb2.GoneRecord(epoch=1, gone=[gone_member(3)])
        await write_gone(store, "digits", gone, old)
        new = await claim(store, "digits", second, await store.get(serving_key("digits")))
        assert new is not None
        assert new.revision > old.revision
        for fenced in (
            publish_world(store, record(2), old),
            write_gone(store, "digits", membership_pb2.GoneRecord(epoch=1), old),
        ):
            with pytest.raises(FencedError):
                await fenced
        await release(store, old)  # nothing happens
        found = await read_world(store, "digits")
        assert found is not None
        assert (found[0], found[2]) == (record(1), gone)
        assert await publish_world(store, record(2), new) is not None
        found = await read_world(store, "digits")
        assert found is not None
        assert (found[0], list(found[2].gone)) == (record(2), [])  # who was gone of another epoch does not count
        await retract_world(store, "digits", found[1], new)
        assert await read_world(store, "digits") is None
        await release(store, new)
        assert await store.get(serving_key("digits")) is None

    run(body)
