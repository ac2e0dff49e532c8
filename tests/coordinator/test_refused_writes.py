"""Writes that the store refuses: whose they are hears of it, none is repeated that can't succeed, and others go on.

With a real etcd: one that takes small requests only, and one whose database is full.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import etcd_server
import pytest
from coordinator_builders import request
from error_codes import ends_with
from etcd_server import Etcd, ctl

from horovod.base.errors import ClusterCode, WorldCode, code_of
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.core.cluster.job_record import MAX_RECORD_BYTES
from horovod.coordinator.pages import Readiness
from horovod.coordinator.services.cluster import ClusterHub, CommandOutbox
from horovod.coordinator.services.follower import Follower
from horovod.coordinator.services.hub import EventOutbox, Hub
from horovod.coordinator.services.sending import Outbox
from horovod.coordinator.store import MemoryStore, Store, TooLargeError, WritesRefusedError, open_store
from horovod.coordinator.store.records import read_records
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2, membership_pb2

DEADLINE_S = 60.0
SMALL_REQUEST_BYTES = 20_000
QUOTA_BYTES = 1 << 20

needs_etcd = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

Body = Callable[[Store, ClusterHub], Awaitable[None]]


def with_hub(store: Store, body: Body) -> None:
    async def main() -> None:
        hub = ClusterHub(store, "1.0")
        await hub.start()
        try:
            assert hub.serves
            await asyncio.wait_for(body(store, hub), DEADLINE_S)
        finally:
            await hub.stop()
            await store.close()

    asyncio.run(main())


def attach(hub: ClusterHub, name: str = "h1", slots: int = 4) -> CommandOutbox:
    commands: CommandOutbox = Outbox(100)
    register = pb.Register(protocol_version=PROTOCOL_VERSION, version="1.0", name=name, instance=name, slots=slots)
    assert hub.attach(register, commands) is None
    return commands


class Told:
    """What an agent is told, job by job."""

    def __init__(self, commands: CommandOutbox) -> None:
        self._commands = commands
        self.kinds: list[tuple[str, str]] = []

    async def until(self, kind: str, job: str) -> None:
        while (kind, job) not in self.kinds:
            for command in await self._commands.take():
                name = command.WhichOneof("command") or ""
                self.kinds.append((name, getattr(getattr(command, name), "job", "")))


def spec(bytes_of_environment: int = 0, processes: int = 1) -> jobs_pb2.JobSpec:
    environment = {"LONG": "x" * bytes_of_environment} if bytes_of_environment else {}
    return jobs_pb2.JobSpec(command=["true"], processes=processes, environment=environment)


async def submitted(hub: ClusterHub, wanted: jobs_pb2.JobSpec) -> str:
    record = await hub.submit(wanted)
    assert isinstance(record, jobs_pb2.JobRecord), record
    return record.id


def report(hub: ClusterHub, commands: CommandOutbox, job: str, *, code: int | None = None) -> None:
    told = pb.JobReport(job=job, over=code is not None)
    told.ranks.add(rank=0, pid=123, ended=code is not None, code=code)
    hub.received("h1", commands, pb.AgentMessage(report=told))


class Events:
    """What a launcher hears of a job."""

    def __init__(self, hub: ClusterHub, job: str) -> None:
        self._outbox: Outbox[jobs_pb2.JobEvent] = Outbox(1000)
        hub.follow(Follower(jobs_pb2.Open(job=job), self._outbox))

    async def until(self, state: jobs_pb2.JobState.ValueType) -> jobs_pb2.JobRecord:
        while True:
            for event in await self._outbox.take():
                if event.HasField("record") and event.record.state == state:
                    return event.record


# -- too large ---------------------------------------------------------------------------------------------------------


def test_a_description_that_no_store_takes_is_refused_at_once_and_others_go_on() -> None:
    """14 variables of 125 kB, as in the report."""

    async def body(store: Store, hub: ClusterHub) -> None:
        told = Told(commands := attach(hub))
        running = await submitted(hub, spec())
        await told.until("start", running)
        large = jobs_pb2.JobSpec(command=["true"], processes=1)
        for number in range(14):
            large.environment[f"LARGE_{number}"] = "x" * 125_000
        refused = await hub.submit(large)
        assert isinstance(refused, str)
        too_large = ends_with(ClusterCode.JOB_TOO_LARGE, "1,750,", "environment", "env -u LARGE_")
        assert re.search(too_large, str(refused)), refused
        assert hub.placement(large) == refused
        events = Events(hub, running)
        report(hub, commands, running, code=0)
        assert (await events.until(jobs_pb2.JOB_STATE_SUCCEEDED)).exit_code == 0
        assert [record.id for record, _ in await read_records(store)] == [running]

    with_hub(MemoryStore(), body)


def test_the_largest_job_that_is_taken_is_kept_however_its_ranks_end() -> None:
    """Losses with long causes are what makes a record grow most."""

    async def body(store: Store, hub: ClusterHub) -> None:
        processes = 5000
        told = Told(commands := attach(hub, slots=processes))
        (room,) = re.findall(r"may have ([\d,]+)", str(await hub.submit(spec(2_000_000, processes))))
        job = await submitted(hub, spec(int(room.replace(",", "")) - 200, processes))
        await told.until("start", job)
        events = Events(hub, job)
        lost = pb.JobReport(job=job, over=True, error="what the agent says of it is long, " * 20)
        hub.received("h1", commands, pb.AgentMessage(report=lost))
        record = await events.until(jobs_pb2.JOB_STATE_FAILED)
        assert record.ByteSize() > MAX_RECORD_BYTES
        ((kept, _),) = await read_records(store)
        assert kept.ByteSize() <= MAX_RECORD_BYTES
        assert kept.state == jobs_pb2.JOB_STATE_FAILED
        assert [one.rank for one in kept.outcomes if one.lost] == list(range(processes))
        assert "what the agent says" in kept.outcomes[0].lost
        assert hub.listing(10).ByteSize() < 200_000

    with_hub(MemoryStore(), body)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    flags = ["--max-request-bytes", str(SMALL_REQUEST_BYTES)]
    with Etcd(tmp_path_factory.mktemp("small"), flags=flags) as etcd:
        yield etcd


@needs_etcd
def test_a_new_job_that_this_store_does_not_take_is_refused_and_leaves_nothing(small: Etcd) -> None:
    async def body(store: Store, hub: ClusterHub) -> None:
        told = Told(attach(hub, slots=1))
        with pytest.raises(TooLargeError, match=ends_with(ClusterCode.TOO_LARGE_FOR_STORE, "etcd at ")):
            await hub.submit(spec(2 * SMALL_REQUEST_BYTES))
        assert not hub.cluster.jobs
        job = await submitted(hub, spec())  # whose slot would have been taken
        await told.until("start", job)
        assert [record.id for record, _ in await read_records(store)] == [job]

    with_hub(open_store(f"{small.url}?prefix=new/"), body)


@needs_etcd
def test_a_job_whose_record_outgrows_this_store_ends_with_a_sentence_and_others_go_on(small: Etcd) -> None:
    async def body(store: Store, hub: ClusterHub) -> None:
        large = await submitted(hub, spec(SMALL_REQUEST_BYTES - 400))  # without hosts it fits
        events = Events(hub, large)
        told = Told(attach(hub, "a-host-with-a-name-that-is-long-" * 20))
        record = await events.until(jobs_pb2.JOB_STATE_FAILED)
        assert code_of(record.sentence) is ClusterCode.TOO_LARGE_FOR_STORE
        other = await submitted(hub, spec())
        await told.until("start", other)
        assert ("start", large) not in told.kinds
        kept = {record.id: record for record, _ in await read_records(store)}
        assert kept[large].state == jobs_pb2.JOB_STATE_FAILED
        assert kept[large].sentence == record.sentence

    with_hub(open_store(f"{small.url}?prefix=grows/"), body)


@needs_etcd
def test_a_running_job_whose_record_outgrows_this_store_is_ended(small: Etcd) -> None:
    async def body(store: Store, hub: ClusterHub) -> None:
        told = Told(commands := attach(hub, "h1"))
        job = await submitted(hub, spec(SMALL_REQUEST_BYTES - 700, processes=2))
        await told.until("start", job)
        report(hub, commands, job)
        grown = pb.JobReport(job=job)
        for rank in range(2):
            grown.ranks.add(rank=rank, pid=1 << 60, ended=rank == 0, code=0)
        hub.cluster.jobs[job].record.shares[0].interfaces.append("x" * 1000)
        hub.received("h1", commands, pb.AgentMessage(report=grown))
        await told.until("end", job)
        events = Events(hub, job)
        report(hub, commands, job, code=0)
        last = pb.JobReport(job=job, over=True)
        last.ranks.add(rank=1, pid=5, ended=True, code=-15, stopped=True)
        hub.received("h1", commands, pb.AgentMessage(report=last))
        failed = await events.until(jobs_pb2.JOB_STATE_FAILED)
        assert code_of(failed.sentence) is ClusterCode.TOO_LARGE_FOR_STORE
        await told.until("forget", job)
        assert (await read_records(store))[0][0].state == jobs_pb2.JOB_STATE_FAILED

    with_hub(open_store(f"{small.url}?prefix=runs/"), body)


# -- no space ----------------------------------------------------------------------------------------------------------


async def fill(store: Store) -> None:
    """Until nothing goes in any more, however short."""

    async def write(size: int) -> None:
        for number in range(1000):
            await store.put(f"filling/{size}/{number}", b"x" * size)

    for size in (200_000, 1_000):
        with pytest.raises(WritesRefusedError, match=ends_with(ClusterCode.STORE_TAKES_NO_WRITES, "NOSPACE")):
            await write(size)


def make_room(etcd: Etcd) -> None:
    endpoint = etcd.endpoints[0]
    ctl(endpoint, "del", "--prefix", "full/filling/")
    found = re.search(r'"revision":(\d+)', ctl(endpoint, "endpoint", "status", "--write-out=json"))
    assert found
    ctl(endpoint, "compact", found[1], "--physical")
    ctl(endpoint, "defrag")
    ctl(endpoint, "alarm", "disarm")


@needs_etcd
def test_with_a_store_that_is_full_what_runs_goes_on_and_what_is_new_is_refused(tmp_path: Path) -> None:
    async def body(store: Store, hub: ClusterHub) -> None:
        told = Told(commands := attach(hub))
        runs, ends, fails = [await submitted(hub, spec()) for _ in range(3)]
        for job in (runs, ends, fails):
            await told.until("start", job)
        ready = Readiness(store)
        assert await ready() == ""
        await fill(store)
        assert code_of(await Readiness(store)()) is ClusterCode.STORE_TAKES_NO_WRITES
        with pytest.raises(WritesRefusedError, match=ends_with(ClusterCode.STORE_TAKES_NO_WRITES, "etcdctl")):
            await hub.submit(spec())
        with pytest.raises(WritesRefusedError):
            await store.grant(10.0)
        code = jobs_pb2.CodeChunk(code=jobs_pb2.Code(sha256="0" * 64, size=1), data=b"x")
        with pytest.raises(WritesRefusedError):
            await hub.code.put(code)
        assert set(hub.cluster.jobs) == {runs, ends, fails}
        # A launcher hears how its job ends, although that is not stored yet; its agent keeps the evidence.
        events = Events(hub, ends)
        report(hub, commands, ends, code=0)
        assert (await events.until(jobs_pb2.JOB_STATE_SUCCEEDED)).exit_code == 0
        assert ("forget", ends) not in told.kinds
        stopped = await hub.signal(fails, 15, stop=True)
        assert stopped is not None
        assert code_of(stopped.sentence) is ClusterCode.STORE_TAKES_NO_WRITES
        await told.until("signal", fails)
        assert hub.serves
        await asyncio.to_thread(make_room, etcd)
        await told.until("forget", ends)
        states = {record.id: record.state for record, _ in await read_records(store)}
        assert states[ends] == jobs_pb2.JOB_STATE_SUCCEEDED
        await submitted(hub, spec())

    with Etcd(tmp_path, flags=["--quota-backend-bytes", str(QUOTA_BYTES)]) as etcd:
        with_hub(open_store(f"{etcd.url}?prefix=full/"), body)


@needs_etcd
def test_a_coordinator_that_can_not_begin_to_lead_says_why(tmp_path: Path) -> None:
    """It names no other coordinator, since there is none."""

    async def body(store: Store, hub: ClusterHub) -> None:
        await fill(store)
        await hub.stop()
        second = ClusterHub(store, "1.0")
        await second.start()
        assert not second.serves
        assert re.search(ends_with(ClusterCode.STORE_TAKES_NO_WRITES, "etcd at ", "NOSPACE"), second.not_serving)
        await second.stop()

    with Etcd(tmp_path, flags=["--quota-backend-bytes", str(QUOTA_BYTES)]) as etcd:
        with_hub(open_store(f"{etcd.url}?prefix=full/"), body)


# -- worlds ------------------------------------------------------------------------------------------------------------


def with_worlds(store: Store, body: Callable[[Store, Hub], Awaitable[None]]) -> None:
    async def main() -> None:
        hub = Hub(store)
        hub.serving.address = "127.0.0.1:1"
        try:
            await asyncio.wait_for(body(store, hub), DEADLINE_S)
        finally:
            await hub.stop()
            await store.close()

    asyncio.run(main())


async def join(hub: Hub, job: str, size: int) -> list[EventOutbox]:
    assert await hub.serve(job) == ""
    boxes: list[EventOutbox] = [Outbox(100) for _ in range(size)]
    for rank, box in enumerate(boxes):
        assert hub.join(request(f"{job}-{rank:020}", job=job, size=size, rank=rank), box) == ""
    return boxes


async def event(box: EventOutbox, kind: str) -> membership_pb2.MembershipEvent:
    while events := await box.take():
        if found := [one for one in events if one.WhichOneof("event") == kind]:
            return found[0]
    raise AssertionError(f"the stream ended without {kind}")


@needs_etcd
def test_members_of_a_world_that_this_store_does_not_take_are_refused_and_other_worlds_form(small: Etcd) -> None:
    async def body(store: Store, hub: Hub) -> None:
        for box in await join(hub, "large", 400):
            sentence = (await event(box, "refused")).refused.sentence
            assert re.search(ends_with(WorldCode.WORLD_TOO_LARGE, "'large'"), sentence)
            assert await box.take() == []  # the stream is over
        (box,) = await join(hub, "small", 1)
        assert (await event(box, "world")).world.epoch == 1

    with_worlds(open_store(f"{small.url}?prefix=worlds/"), body)


@needs_etcd
def test_with_a_store_that_is_full_members_wait_for_their_world_and_are_told_why(tmp_path: Path) -> None:
    async def body(store: Store, hub: Hub) -> None:
        assert await hub.serve("digits") == ""
        (running,) = await join(hub, "runs", 1)
        await event(running, "world")
        await fill(store)
        (box,) = await join(hub, "digits", 1)
        assert "NOSPACE" in (await event(box, "progress")).progress.sentence
        hub.leave("runs-" + "0" * 20, "")  # what is deleted needs no space
        await asyncio.to_thread(make_room, etcd)
        assert (await event(box, "world")).world.epoch >= 1

    with Etcd(tmp_path, flags=["--quota-backend-bytes", str(QUOTA_BYTES)]) as etcd:
        with_worlds(open_store(f"{etcd.url}?prefix=full/"), body)
