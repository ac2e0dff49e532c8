"""Which of the members behind a relay get a world, and which the word that the relay is to repeat it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from horovod.base.protocol import RELAY_FRAME
from horovod.coordinator.services import sending as sending_module
from horovod.coordinator.services.sending import REPEATED_FROM_BYTES, Repeats
from horovod.protos.v1.relay_pb2 import RelayFrame

DEADLINE_S = 60.0
WORLD = b"w" * REPEATED_FROM_BYTES


def played(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def frame(written: bytes) -> RelayFrame:
    assert written.startswith(RELAY_FRAME)
    return RelayFrame.FromString(written[len(RELAY_FRAME) :])


def test_the_first_member_brings_it_and_the_others_get_the_key() -> None:
    async def story() -> None:
        repeats = Repeats(arrival_s=1000.0)
        first, *others = [repeats.of("r1", "j") for _ in range(4)]
        brought = frame(await first.shortened(WORLD))
        assert brought.message == WORLD
        waiting = [asyncio.create_task(one.shortened(WORLD)) for one in others]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        waiting.pop().cancel()  # one that goes away keeps nobody
        first.arrived()
        for written in await asyncio.gather(*waiting):
            assert (frame(written).key, frame(written).message) == (brought.key, b"")

    played(story)


def test_each_relay_gets_it_once() -> None:
    async def story() -> None:
        repeats = Repeats()
        one, other = [await repeats.of(relay, "j").shortened(WORLD) for relay in ("r1", "r2")]
        assert frame(one).message == WORLD
        assert one is other, "thousands of frames of a large world in memory would be gigabytes"

    played(story)


def test_all_get_it_when_the_first_breaks_or_is_slow() -> None:
    async def story() -> None:
        repeats = Repeats(arrival_s=1000.0)
        first, second = repeats.of("r1", "j"), repeats.of("r1", "j")
        await first.shortened(WORLD)
        waiting = asyncio.create_task(second.shortened(WORLD))
        await asyncio.sleep(0)
        first.close()
        assert await waiting == WORLD
        slow = Repeats(arrival_s=0.0)
        first, second = slow.of("r1", "j"), slow.of("r1", "j")
        await first.shortened(WORLD)
        assert await second.shortened(WORLD) == WORLD
        first.arrived()  # too late
        assert await slow.of("r1", "j").shortened(WORLD) == WORLD

    played(story)


def test_small_messages_and_direct_streams_are_left_alone() -> None:
    async def story() -> None:
        repeats = Repeats()
        for relay, message in (("", WORLD), ("r1", WORLD[1:])):
            for _ in range(2):
                assert await repeats.of(relay, "j").shortened(message) == message

    played(story)


def test_a_job_that_joins_again_and_again_keeps_one_world() -> None:
    async def story() -> None:
        repeats = Repeats(arrival_s=1000.0)
        slow = repeats.of("r1", "j")
        await slow.shortened(WORLD)
        waits = asyncio.create_task(repeats.of("r1", "j").shortened(WORLD))
        await asyncio.sleep(0)
        for number in range(50):
            message = WORLD + bytes([number])
            stream = repeats.of(f"r{number % 3}", "j")
            assert frame(await stream.shortened(message)).message == message
            assert repeats.kept_bytes == 2 * len(message)
        assert await waits == WORLD, "forgotten while it waited: it gets the message itself"
        assert len(repeats._sent) == 1

    played(story)


def test_what_all_jobs_keep_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_module, "MAX_KEPT_BYTES", 8 * len(WORLD))
    monkeypatch.setattr(sending_module, "MAX_SENT", 5)

    async def story() -> None:
        repeats = Repeats()
        for number in range(20):
            await repeats.of("r1", f"job {number}").shortened(WORLD)
            assert repeats.kept_bytes <= 8 * len(WORLD)
        for number in range(20):
            await repeats.of(f"r{number}", "j").shortened(WORLD)
            assert len(repeats._sent) <= 5

    played(story)
