"""One message for many members: serialized once, large ones a few at a time, and nobody waits for a deaf peer."""

from __future__ import annotations

import asyncio

from coordinator_builders import op

from horovod.coordinator.core.agreement import operations
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.coordinator.services.sending import KEPT, LARGE_BYTES, Serializer, Turns, as_bytes
from horovod.protos.v1 import membership_pb2 as pb
from horovod.protos.v1 import negotiation_pb2


def world(text: str = "x" * 5000) -> pb.MembershipEvent:
    return pb.MembershipEvent(world=pb.World(job=text))


def test_an_object_is_serialized_once_and_another_one_anew() -> None:
    serializer = Serializer()
    first, second = world(), world("y" * 5000)
    assert serializer(first) is serializer(first)
    assert serializer(second) == second.SerializeToString() != serializer(first)
    assert as_bytes(serializer(first)) == as_bytes(first)
    small = world("z")
    assert serializer(small) is not serializer(small)


def test_what_is_kept_is_bounded_and_its_identity_is_not_given_away() -> None:
    serializer = Serializer()
    for number in range(10 * KEPT):
        made = world(f"{number}" * 3000)  # takes the memory of one that was dropped, if nothing holds that
        assert serializer(made) == made.SerializeToString()


def test_large_messages_take_turns() -> None:
    async def play() -> None:
        turns = Turns(most_bytes=2 * LARGE_BYTES, patience_s=3600)
        at_once, most = 0, 0

        async def write() -> None:
            nonlocal at_once, most
            async with turns.turn(LARGE_BYTES):
                at_once += 1
                most = max(most, at_once)
                await asyncio.sleep(0)
                at_once -= 1

        await asyncio.gather(*(write() for _ in range(20)))
        assert most == 2
        async with turns.turn(10 * LARGE_BYTES), turns.turn(100):  # one is always let through, and small ones are
            pass

    asyncio.run(play())


def test_a_peer_that_does_not_read_keeps_others_waiting_for_a_moment_only() -> None:
    async def play() -> None:
        turns = Turns(most_bytes=LARGE_BYTES, patience_s=0.01)
        async with turns.turn(LARGE_BYTES), turns.turn(LARGE_BYTES):
            pass  # the second came in though the first had not ended
        async with turns.turn(LARGE_BYTES):
            pass

    asyncio.run(asyncio.wait_for(play(), 20))


def test_what_all_ranks_announce_is_looked_at_once() -> None:
    operations._signature_of.cache_clear()
    negotiation = Negotiation(1, 64)
    for rank in range(64):
        message = negotiation_pb2.NegotiationMessage(epoch=1, announce=[op(f"w{index}") for index in range(10)])
        answers = negotiation.receive(rank, message, float(rank))
    assert len(answers[0][1].plans) == 10
    assert operations._signature_of.cache_info().misses == 10


def test_the_oldest_announcement_says_how_long_an_operation_waits() -> None:
    negotiation = Negotiation(1, 3)
    for rank, now_s in ((0, 0.0), (1, 5.0)):
        negotiation.receive(rank, negotiation_pb2.NegotiationMessage(epoch=1, announce=[op("w")]), now_s)
    assert negotiation.stalls(10.0, 1.0)[0].waited_s == 10.0
    changed = negotiation_pb2.NegotiationMessage(epoch=1, announce=[op("w", shape=(9,))])
    negotiation.receive(0, changed, 8.0)  # it announces something else under the name
    assert negotiation.stalls(10.0, 1.0)[0].waited_s == 5.0
