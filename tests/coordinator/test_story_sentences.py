"""The story of a job: what its entries say, how many there are, and that it outlives the coordinator that wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from coordinator_builders import request
from takeover_model import settle
from test_elastic_worlds import Elastic

from horovod.base.errors import WorldCode, code_of
from horovod.base.telemetry.metrics import text_of
from horovod.coordinator.core.world import story as told
from horovod.coordinator.core.world.effects import Effect, Formed, Gone
from horovod.coordinator.core.world.story import FORMED, LEFT, LOST, OVER, TAKEN_OVER, WAITS, Moment, Story
from horovod.coordinator.core.world.work import NEW_RUN_S
from horovod.coordinator.services.hub import EventOutbox, Hub
from horovod.coordinator.services.sending import Outbox
from horovod.coordinator.store import Entry, Guard, MemoryStore, StoreError
from horovod.coordinator.store.records import STORIES, read_story, story_key
from horovod.protos.v1 import membership_pb2 as pb

WALL_S = 1_700_000_000.0


class Told(Elastic):
    """A job whose story is told; a look at its members ends each time that passes."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.story = Story("digits")
        self.evidence: list[str] = []  # of losses

    def moment(self) -> Moment:
        return Moment(self.now_s, WALL_S + self.now_s)

    def take(self, effects: Sequence[Effect]) -> None:
        if self.membership.knows("digits"):
            self.story.came(self.moment())
        for effect in effects:
            if isinstance(effect, Formed):
                self.story.formed(effect.world, effect.claims, self.moment())
            elif isinstance(effect, Gone):
                self.story.gone(effect.told, self.moment())
                self.evidence += [] if effect.told.orderly else [effect.evidence]
        super().take(effects)

    def pass_time(self, seconds: float, *vouched: str) -> None:
        super().pass_time(seconds, *vouched)
        self.story.waits(self.membership.waits_for("digits"), self.moment())

    def events(self) -> list[int]:
        return [entry.event for entry in self.story.entries]

    def last(self) -> str:
        return self.story.entries[-1].sentence


# -- what the entries say ----------------------------------------------------------------------------------------------
def test_a_member_is_lost_and_the_others_go_on() -> None:
    job = Told(most=4, size=4)
    job.come_all("ab", host="h1")
    job.now_s += 1.5
    job.come_all("cd", host="h2")
    assert job.last() == "World 1 began with 4 members on hosts h1 and h2, 1.5 s after the first of them came."
    job.lose("b1", "it ended by signal 9 (SIGKILL)")
    (lost,) = [entry for entry in job.story.entries if entry.event == LOST]
    assert (lost.epoch, lost.rank, lost.host, lost.at) == (1, 1, "h1", WALL_S + 1.5)
    assert lost.sentence.endswith("on host h1 was lost: it ended by signal 9 (SIGKILL).")
    assert (job.story.size, job.story.members) == (4, 3)
    job.now_s += 0.024
    job.again("acd")
    assert job.events() == [FORMED, LOST, FORMED], "those that join again have no entry"
    assert job.last() == (
        "World 2 began with 3 members on host node-a, 24 ms after rank 1 on host h1 was lost: rank 0 of world 1 keeps "
        "its number, ranks 2 and 3 are now ranks 1 and 2."
    )


def test_newcomers_wait_and_are_taken_in() -> None:
    job = Told(most=4, size=2)
    job.come_all("ab")
    job.come_all("cd")
    job.pass_time(1.0)
    assert job.events() == [FORMED, WAITS]
    assert "2 processes wait to join" in job.last()
    job.again("ab")
    assert job.last().endswith(
        "0 ms after the first of its members left world 1 to join again: the members of world 1 keep their ranks, "
        "ranks 2 and 3 are new."
    )


def test_who_is_awaited_is_one_entry_that_changes() -> None:
    job = Told(fewest=3, most=4, size=4)
    job.come_all("ab")
    job.pass_time(1.0)
    job.come_all("c")
    for _ in range(3):
        job.pass_time(1.0)
    assert job.events() == [WAITS]
    assert "waiting for 1 more" in job.last()
    assert job.story.entries[-1].number == 2
    job.come_all("d")
    job.lose("a1")
    job.lose("b1")
    job.again("cd")
    job.pass_time(0.1)
    assert job.events() == [WAITS, FORMED, LOST, LOST], "it is not late yet"
    job.pass_time(1.0)
    assert job.events() == [WAITS, FORMED, LOST, LOST, WAITS]
    assert "waiting for 1 more" in job.last(), "it is news once more"
    job.come_all("e")
    assert "after ranks 0 and 1 were lost" in job.last()


def test_who_does_not_join_again_is_named() -> None:
    job = Told(most=3, size=3)
    job.come_all("abc")
    for name in "abc":
        job.go(name)
    job.lose("b1")
    job.come("a")
    job.come("c")
    assert job.last().endswith("rank 2 is now rank 1, rank 1 of world 1 did not join again.")


def test_who_has_waited_in_vain_does_not_wait_for_ever() -> None:
    job = Told(fewest=2)
    job.story.over(job.moment())
    assert not job.story.entries
    job.come_all("a")
    job.pass_time(2.0)
    job.lose("a1")
    job.story.over(job.moment())
    assert job.events() == [WAITS, OVER]
    assert "job is over" not in job.last()  # its launcher may start others


def test_the_end_is_told_once_and_the_job_may_begin_anew() -> None:
    job = Told(most=3, size=3)
    job.come_all("abc")
    for name in "abc":
        job.leave(job.member(name))
    assert job.events() == [FORMED, LEFT]
    assert job.last() == "World 1: ranks 0-2 have done their work and left."
    for _ in range(2):
        job.story.over(job.moment())
    assert job.events() == [FORMED, LEFT, OVER]
    assert job.story.members == 0
    job.come_all("def")
    assert job.last() == "World 2 began with 3 members on host node-a, 0 ms after the first of them came."


def test_losses_have_evidence() -> None:
    job = Told(most=4, size=4)
    job.come_all("abcd")
    job.take(job.membership.process_ended("a1", "its process ended", job.now_s))
    job.disconnect("a1")
    job.disconnect("b1")
    job.pass_time(11.0)
    job.lose("c1")
    assert job.evidence == ["process_ended", "connection_lost", "other"]


# -- how many there are ------------------------------------------------------------------------------------------------
def world(size: int, epoch: int = 1) -> pb.World:
    hosts = [pb.Host(identity=pb.HostIdentity(name=f"h{number}")) for number in range(8)]
    members = [pb.Member(member_id=f"m{rank}", host=rank % 8) for rank in range(size)]
    return pb.World(job="digits", epoch=epoch, hosts=hosts, members=members, secret=b"s" * 32)


def gone(rank: int, sentence: str, *, epoch: int = 1, done: bool = False) -> pb.MemberGone:
    return pb.MemberGone(epoch=epoch, rank=rank, host="h", orderly=done, done=done, sentence=sentence)


NOW = Moment(0.0, WALL_S)


def test_a_large_world_has_a_short_story() -> None:
    story = Story("digits")
    story.formed(world(5000), {}, NOW)
    assert "h0, h1, h2, h3 and 4 more" in story.entries[-1].sentence
    for rank in range(2000):
        story.gone(gone(rank, f"Rank {rank} was lost: its host is down."), NOW)
    for rank in range(2000, 5000):
        story.gone(gone(rank, f"Rank {rank} left: it ended.", done=True), NOW)
    sentences = [entry.sentence for entry in story.entries]
    assert len(sentences) == 1 + told.MAX_TOLD + 2
    assert sentences[-2:] == [
        "World 1: 1992 further members left or were lost.",
        "World 1: 3000 members have done their work and left.",
    ]
    assert story.members == 0


def test_its_size_is_bounded() -> None:
    story = Story("digits")
    for epoch in range(1, 1000):
        story.formed(world(2, epoch), {}, NOW)
        story.gone(gone(1, "Rank 1 was lost: " + "\u2028é" * 5000, epoch=epoch), NOW)
    assert 10 < len(story.entries) <= told.MAX_ENTRIES
    assert story.record.ByteSize() < told.MAX_BYTES + 1000
    assert [entry.number for entry in story.entries] == list(range(story.number - len(story.entries) + 1, 1999))
    assert all(entry.sentence.isprintable() for entry in story.entries)
    assert len(told.after(story.entries, story.number - 3)) == 3


# -- other coordinators ------------------------------------------------------------------------------------------------
def test_a_world_that_was_taken_over_whole_goes_on_as_it_was() -> None:
    story = Story("digits")
    record = pb.WorldRecord(world=world(2))
    story.taken_over(record, pb.GoneRecord(epoch=1), NOW)
    later = Moment(3600.0, WALL_S + 3600.0)
    for rank in range(2):
        story.gone(pb.MemberGone(epoch=1, rank=rank, orderly=True, returns=True), later)
    assert story.formed(world(2, epoch=2), {"m0": 0, "m1": 1}, later) == 0.0


@pytest.mark.parametrize("is_written", [True, False])
def test_it_goes_on_at_another_coordinator(is_written: bool) -> None:
    """is_written: the first one had time to write the latest entries down."""

    async def play() -> None:
        store = MemoryStore()
        hubs = [Hub(store), Hub(store)]
        for number, hub in enumerate(hubs):
            hub.serving.address = f"here:{number}"
        streams: list[EventOutbox] = [Outbox(100) for _ in range(3)]
        assert await hubs[0].serve("digits") == ""
        for number, stream in enumerate(streams):
            assert hubs[0].join(request(f"m{number}", size=3), stream) == ""
        for stream in streams:
            while not any(event.HasField("world") for event in await stream.take()):
                pass
        for number in range(3):
            hubs[0].received(f"m{number}", 1)
        hubs[0].lost("m1", "its host is down")
        while not any(event.HasField("gone") for event in await streams[0].take()):
            pass
        lost = 'horovod_members_lost_total{job="digits",evidence="other"} 1'
        assert lost in text_of(hubs[0].metrics.registry).splitlines()
        await hubs[0].stories.settled("digits")
        before = await read_story(store, "digits")
        assert before is not None
        assert [entry.event for entry in before.entries] == [FORMED, LOST]
        if not is_written:
            await store.delete(story_key("digits"))
        await hubs[0].stop()
        assert await hubs[1].serve("digits") == ""
        entries = hubs[1].stories.entries("digits")
        assert [entry.event for entry in entries] == [FORMED, LOST, TAKEN_OVER]
        assert (entries[1].epoch, entries[1].rank, entries[1].host) == (1, 1, "node-a")
        assert "its host is down" in entries[1].sentence
        assert "2 of its 3 members" in entries[2].sentence
        assert list(entries[:2]) == list(before.entries) or not is_written
        await hubs[1].stories.settled("digits")
        for number in (0, 2):
            hubs[1].leave(f"m{number}", "the script ended")
        await settle()
        assert hubs[1].serving.guard("digits") is None
        kept = await read_story(store, "digits")
        assert kept is not None
        assert [entry.event for entry in kept.entries] == [FORMED, LOST, TAKEN_OVER, LEFT, OVER]
        assert list(hubs[1].stories.entries("digits")) == list(kept.entries), "also when it is over"
        await hubs[1].stop()

    asyncio.run(asyncio.wait_for(play(), 30))


def test_a_job_whose_work_is_done_begins_a_new_training_after_a_rest() -> None:
    """Whoever comes before that is refused, and counts as a sign that something starts what has ended again."""

    async def play() -> None:
        hub = Hub(MemoryStore())
        now_s = 1e9
        hub._worlds._wall_clock = lambda: now_s

        async def come(member_id: str) -> str:
            """Why it is refused; "" once it is in a world."""
            assert await hub.serve("digits") == ""
            stream: EventOutbox = Outbox(100)
            if refusal := hub.join(request(member_id, size=1, sizes=(1, 1)), stream):
                await settle()
                return refusal
            while not any(event.HasField("world") for event in await stream.take()):
                pass
            return ""

        assert await come("m0") == ""
        hub.received("m0", 1)
        for work in (pb.Work(epoch=1, committed=True), pb.Work(epoch=1, done=True)):
            hub.reported("m0", pb.MemberMessage(work=work))
        hub.leave("m0", "the script ended")
        await settle()
        for number in range(1, 4):
            now_s += NEW_RUN_S - 1
            assert code_of(await come(f"m{number}")) is WorldCode.JOB_DONE
            assert hub.serving.guard("digits") is None
        now_s += NEW_RUN_S
        assert await come("m4") == ""
        await hub.stop()

    asyncio.run(asyncio.wait_for(play(), 30))


class Reluctant(MemoryStore):
    """Takes no story at first."""

    is_willing = False

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        if key.startswith(STORIES) and not self.is_willing:
            raise StoreError("Not now.")
        return await super().put(key, value, lease, guard=guard)


def test_nothing_waits_for_a_store_that_does_not_take_it() -> None:
    async def play() -> None:
        store = Reluctant()
        hub = Hub(store)
        assert await hub.serve("digits") == ""
        stream: EventOutbox = Outbox(100)
        assert hub.join(request("m0", size=1), stream) == ""
        while not any(event.HasField("world") for event in await stream.take()):
            pass
        await hub.stories.settled("digits")
        assert await read_story(store, "digits") is None
        store.is_willing = True
        hub.stories.waits("digits", "")  # the next look at the job's members
        await hub.stories.settled("digits")
        kept = await read_story(store, "digits")
        assert kept is not None
        assert [entry.event for entry in kept.entries] == [FORMED]
        await hub.stop()

    asyncio.run(asyncio.wait_for(play(), 30))
