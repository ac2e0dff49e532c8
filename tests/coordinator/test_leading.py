"""Coordinators that serve agents and jobs for a while: what is not theirs to do any more when another one took over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from resources import eventually

from horovod.base.errors import ClusterCode, code_of
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.services.cluster import ClusterHub, CommandOutbox, NotServingError
from horovod.coordinator.services.follower import Follower
from horovod.coordinator.services.leading import LEADER, Leading
from horovod.coordinator.services.sending import Outbox
from horovod.coordinator.store.base import Entry, FencedError, Guard, StoreError
from horovod.coordinator.store.memory import MemoryStore
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

DEADLINE_S = 60.0


class HoldingStore(MemoryStore):
    """The next write of a job's record waits for `go`, and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = StoreError("it does not answer")
        self.held, self.go = asyncio.Event(), asyncio.Event()
        self.is_armed = False

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        if self.is_armed:
            self.is_armed = False
            self.held.set()
            await self.go.wait()
            raise self.answer
        return await super().put(key, value, lease, guard=guard)


def with_hub(body: Callable[[HoldingStore, ClusterHub], Awaitable[None]]) -> None:
    async def main() -> None:
        store = HoldingStore()
        hub = ClusterHub(store, "1.0")
        await hub.start()
        try:
            await asyncio.wait_for(body(store, hub), DEADLINE_S)
        finally:
            await hub.stop()

    asyncio.run(main())


def attach(hub: ClusterHub) -> CommandOutbox:
    commands: CommandOutbox = Outbox(100)
    register = pb.Register(protocol_version=PROTOCOL_VERSION, version="1.0", name="h1", instance="i", slots=1)
    assert hub.attach(register, commands) is None
    return commands


async def kinds(commands: CommandOutbox) -> list[str | None]:
    return [command.WhichOneof("command") for command in await commands.take()]


def spec(submission: str = "") -> jobs_pb2.JobSpec:
    return jobs_pb2.JobSpec(command=["true"], processes=1, submission=submission)


async def leads_again_with_a_write_under_way(store: HoldingStore, hub: ClusterHub) -> None:
    store.is_armed = True
    asked = asyncio.create_task(hub.submit(spec()))
    await store.held.wait()
    await store.delete(LEADER)
    with pytest.raises(NotServingError):
        await asked
    assert await asyncio.to_thread(eventually, lambda: hub.serves)


def test_a_leader_whose_key_was_taken_hears_of_it() -> None:
    """Although its lease lives, and although it writes nothing."""

    async def main() -> None:
        store = MemoryStore()
        ended: list[str] = []
        over = asyncio.Event()

        async def begin() -> None:
            pass

        def end(sentence: str) -> None:
            ended.append(sentence)
            over.set()

        leading = Leading(store, begin, end, lease_s=1.0)
        await leading.attempt()
        work = asyncio.create_task(leading.run())
        await store.put(LEADER, b"another one")
        await asyncio.wait_for(over.wait(), DEADLINE_S)
        assert not leading.leads
        assert len(ended) == 1
        work.cancel()

    asyncio.run(main())


def test_who_led_before_a_store_of_one_coordinator_was_opened_is_dead() -> None:
    """So nobody waits for its lease; but who takes the key later, as it can in a store that is shared, leads."""

    class SharedStore(MemoryStore):
        is_shared = True

    async def leads(store: MemoryStore) -> list[bool]:
        await store.put(LEADER, b"a former one")

        async def begin() -> None:
            pass

        leading = Leading(store, begin, lambda sentence: None)
        found = []
        for _ in range(2):
            await leading.attempt()
            found.append(leading.leads)
        leading.lose()
        await store.put(LEADER, b"another one")
        await leading.attempt()
        return [*found, leading.leads]

    assert asyncio.run(leads(MemoryStore())) == [True, True, False]
    assert asyncio.run(leads(SharedStore())) == [False, False, False]


def test_nothing_is_started_that_could_not_be_recorded() -> None:
    async def body(store: HoldingStore, hub: ClusterHub) -> None:
        commands = attach(hub)
        assert await kinds(commands) == ["registered"]
        await store.put(LEADER, b"another one")
        with pytest.raises(NotServingError):
            await hub.submit(spec())
        assert await kinds(commands) == []  # the stream is over
        assert commands.failure

    with_hub(body)


def test_what_was_decided_before_is_not_written_later() -> None:
    """A coordinator that leads again decides from the records: a write of its former self would undo that."""

    async def body(store: HoldingStore, hub: ClusterHub) -> None:
        await leads_again_with_a_write_under_way(store, hub)
        store.go.set()
        record = await hub.submit(spec())  # effects are in order: the old write would come first
        assert isinstance(record, jobs_pb2.JobRecord)
        entries, _ = await store.range("")
        assert sum(record.id in entry.key for entry in entries) == 1
        assert not [entry.key for entry in entries if "true-" in entry.key and record.id not in entry.key]

    with_hub(body)


def test_messages_of_a_former_stream_are_void() -> None:
    async def body(store: HoldingStore, hub: ClusterHub) -> None:
        former, commands = attach(hub), attach(hub)
        hub.received("h1", former, pb.AgentMessage(drain=pb.Drain()))
        assert not hub.cluster.agents["h1"].is_draining
        hub.received("h1", commands, pb.AgentMessage(drain=pb.Drain()))
        assert hub.cluster.agents["h1"].is_draining

    with_hub(body)


def test_a_submission_that_comes_twice_is_one_job() -> None:
    """The client got no answer and asks again, whether or not the first was in the store by then."""

    async def body(store: HoldingStore, hub: ClusterHub) -> None:
        first, again = await asyncio.gather(hub.submit(spec("s")), hub.submit(spec("s")))
        other, unnamed = await hub.submit(spec("t")), [await hub.submit(spec()) for _ in range(2)]
        found = [first, again, other, *unnamed]
        assert all(isinstance(record, jobs_pb2.JobRecord) for record in found)
        ids = [record.id for record in found if isinstance(record, jobs_pb2.JobRecord)]
        assert ids[0] == ids[1]
        assert len(set(ids)) == 4

    with_hub(body)


def test_a_repeated_submission_is_found_before_its_code_is_looked_for() -> None:
    """The archive of a job that is over may have made room for another one."""

    async def body(store: HoldingStore, hub: ClusterHub) -> None:
        first = await hub.submit(spec("s"))
        again = spec("s")
        again.code.sha256, again.code.size = "0" * 64, 1
        assert await hub.submit(again) == first
        again.submission = "t"
        assert code_of(str(await hub.submit(again))) is ClusterCode.CODE_NOT_HERE

    with_hub(body)


def test_a_write_of_an_earlier_term_does_not_end_the_next_one() -> None:
    async def body(store: HoldingStore, hub: ClusterHub) -> None:
        store.answer = FencedError("too late")
        await leads_again_with_a_write_under_way(store, hub)
        commands = attach(hub)
        store.go.set()
        assert isinstance(await hub.submit(spec()), jobs_pb2.JobRecord)
        assert commands.failure is None

    with_hub(body)


def test_who_stops_does_not_lead_again() -> None:
    async def body(store: HoldingStore, hub: ClusterHub) -> None:
        await hub.stop()
        assert not hub.serves
        assert await store.get(LEADER) is None

    with_hub(body)


def test_output_is_held_for_a_client_whose_stream_broke_and_not_for_one_that_has_all() -> None:
    async def body(store: HoldingStore, hub: ClusterHub) -> None:
        commands = attach(hub)
        record = await hub.submit(spec())
        assert isinstance(record, jobs_pb2.JobRecord)
        hub.received("h1", commands, pb.AgentMessage(report=pb.JobReport(job=record.id)))
        for has_all in (False, True):
            follower = Follower(jobs_pb2.Open(job=record.id, output=True, hold=True), Outbox(100))
            hub.follow(follower)
            if has_all:
                follower.end()
            hub.unfollow(follower)
        found = [command for command in await commands.take() if command.HasField("close")]
        assert [command.close.release for command in found] == [False, True]

    with_hub(body)
