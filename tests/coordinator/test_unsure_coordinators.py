"""Coordinators that can not be sure: whether they were replaced, as their store is silent, or whether a write was done.

One that may have been replaced declares nobody lost for being away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from coordinator_builders import request
from event_words import NOT_BACK
from resources import eventually
from stopped_jobs import let_pass

from horovod.base.proofs import attach_proof
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.config import Limits
from horovod.coordinator.services.hub import EventOutbox, Hub
from horovod.coordinator.services.leading import LEADER, Leading
from horovod.coordinator.services.sending import Outbox
from horovod.coordinator.store import Entry, FencedError, Guard, MemoryStore, StoreError, UncertainError
from horovod.coordinator.store.jobs import serving_key, world_key
from horovod.protos.v1 import membership_pb2 as pb

GRACE_S, LEASE_S = 0.5, 0.3
DEADLINE_S = 60.0
JOB = "digits"


class SilentStore(MemoryStore):
    is_silent = False

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        if self.is_silent:
            raise StoreError("It does not answer.")
        return await super().range(prefix)


class ForgetfulStore(MemoryStore):
    """The answer to the first write of each key is lost, once the write is done."""

    def __init__(self) -> None:
        super().__init__()
        self._written: set[str] = set()

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        entry = await super().put_if(key, value, revision, lease, guard=guard)
        if key not in self._written:
            self._written.add(key)
            raise UncertainError("The answer was lost.")
        return entry


async def next_of(events: EventOutbox, kind: str, heard: list[pb.MembershipEvent]) -> pb.MembershipEvent:
    while True:
        found = next((event for event in heard if event.HasField(kind)), None)
        if found is not None:
            return found
        heard += await asyncio.wait_for(events.take(), DEADLINE_S)


def test_members_that_are_away_meanwhile_come_back() -> None:
    async def story() -> None:
        store = SilentStore()
        hub = Hub(store, limits=Limits(reattach_grace_s=GRACE_S), lease_s=LEASE_S)
        hub.serving.address = "here:1"
        work = [asyncio.create_task(one) for one in (hub.serving.keep(), hub.watch_clock())]
        try:
            assert await hub.serve(JOB) == ""
            streams: list[EventOutbox] = [Outbox(100), Outbox(100)]
            for number, stream in enumerate(streams):
                assert hub.join(request(f"m{number}", job=JOB, host=f"h{number}"), stream) == ""
            heard: list[list[pb.MembershipEvent]] = [[], []]
            world = (await next_of(streams[1], "world", heard[1])).world
            for number in range(2):
                hub.received(f"m{number}", world.epoch)

            store.is_silent = True
            loop = asyncio.get_running_loop()

            async def is_sure() -> bool:
                return hub.serving.is_sure()

            def is_told() -> bool:
                return asyncio.run_coroutine_threadsafe(is_sure(), loop).result(DEADLINE_S)

            assert await asyncio.to_thread(eventually, lambda: not is_told())
            hub.disconnected("m1", streams[1])
            await asyncio.to_thread(let_pass, 3 * GRACE_S)
            version = PROTOCOL_VERSION
            attach = pb.Attach(protocol_version=version, job=JOB, epoch=world.epoch, member_id="m1", rank=1)
            nonce = hub.challenge(attach)
            assert isinstance(nonce, bytes), nonce
            again: EventOutbox = Outbox(100)
            assert hub.attach(attach, nonce, attach_proof(world.secret, attach, nonce), again) is None

            store.is_silent = False
            hub.disconnected("m1", again)
            gone = await next_of(streams[0], "gone", heard[0])
            assert NOT_BACK in gone.gone.sentence
        finally:
            for task in work:
                task.cancel()
            await hub.stop()

    asyncio.run(story())


def test_who_does_not_know_whether_it_has_taken_a_key_takes_it_once_more() -> None:
    async def nothing() -> None:
        pass

    async def story() -> None:
        store = ForgetfulStore()
        hub = Hub(store)
        assert await hub.serve(JOB) == ""
        leading = Leading(store, begin=nothing, end=lambda sentence: None)
        await leading.attempt()
        assert not leading.leads, "it may be another one that does"
        await leading.attempt()
        assert leading.leads
        for key, guard in ((serving_key(JOB), hub.serving.guard(JOB)), (LEADER, leading.guard)):
            entry = await store.get(key)
            assert entry is not None
            assert guard == Guard(key, entry.revision)
        await leading.resign()
        await hub.stop()

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


@pytest.mark.parametrize("error", [StoreError("It does not answer."), FencedError("Another coordinator serves it.")])
def test_a_process_that_comes_while_the_release_of_its_job_fails_does_not_wait_for_ever(error: StoreError) -> None:
    async def story() -> None:
        hub = Hub(MemoryStore())
        assert await hub.serve(JOB) == ""
        events: EventOutbox = Outbox(100)

        async def fail(_guard: Guard) -> None:
            assert hub.join(request("m0", job=JOB, size=1), events) == ""
            raise error

        await hub.serving.release(JOB, lambda: not hub.overview(), fail)
        if isinstance(error, FencedError):
            await events.ended.wait()  # it comes again
            assert events.failure is not None
            assert events.failure[0] is grpc.StatusCode.UNAVAILABLE
        else:
            assert (await next_of(events, "world", [])).world.epoch == 1
        await hub.stop()

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_what_is_told_of_the_work_while_the_job_is_released_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last processes are gone, and an agent says that they had done the work while the store is written."""
    world = pb.World(job=JOB, epoch=1, sizes=pb.Sizes())
    work = pb.JobWork(committed_epoch=1)
    others: list[asyncio.Task[None]] = []

    class Told(MemoryStore):
        async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
            entry = await super().put(key, value, lease, guard=guard)
            if key == world_key(JOB) and not work.done:
                work.done = True
                others.append(asyncio.create_task(hub._worlds.release(JOB)))  # another process has come and gone
            return entry

    store = Told()
    hub = Hub(store)

    async def story() -> None:
        monkeypatch.setattr(hub._membership, "kept", lambda job: pb.WorldRecord(world=world, work=work))
        assert await hub.serve(JOB) == ""
        await hub._worlds.release(JOB)
        await asyncio.gather(*others)
        kept = await store.get(world_key(JOB))
        assert kept is not None
        assert pb.WorldRecord.FromString(kept.value).work.done
        assert hub.serving.guard(JOB) is None
        await hub.stop()

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
