"""Process sets in the engine: operations of their own, alone, side by side and overlapping, over every transport."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from resources import descriptors, held, leaks
from world import ALLREDUCE, AVERAGE, BARRIER, EVERY_TRANSPORT, EngineWorld, Member, connect

from horovod._core import OpSpec
from horovod.base.errors import EngineCode, OperationCode


@pytest.fixture(params=EVERY_TRANSPORT)
def world(request: pytest.FixtureRequest):
    with EngineWorld(4, request.param) as made:
        yield made


def full(value: float, count: int = 4) -> np.ndarray:
    return np.full(count, value, np.float32)


def in_set(ranks: tuple[int, ...], body: Any) -> Any:
    """`body` for the members only."""
    return lambda member: body(member) if member.rank in ranks else None


def test_every_collective_counts_the_members_only(world: EngineWorld) -> None:
    ranks = (1, 3)
    number = world.add_set(5, *ranks)

    def body(m: Member) -> None:
        place = ranks.index(m.rank)
        np.testing.assert_array_equal(m.allreduce(full(m.rank), process_set=number), 4)
        np.testing.assert_array_equal(m.allreduce(full(m.rank), op=AVERAGE, process_set=number), 2)
        np.testing.assert_array_equal(m.broadcast(full(m.rank), 3, process_set=number), 3)
        np.testing.assert_array_equal(m.broadcast(full(m.rank, 5000), 1, process_set=number), 1)
        gathered = m.allgather(full(m.rank, place + 1), process_set=number)
        np.testing.assert_array_equal(gathered, [1, 3, 3])
        received, splits = m.alltoall(np.array([10, 11, 12]) + m.rank, [1, 2], process_set=number)
        assert splits == ([1, 1] if place == 0 else [2, 2])
        np.testing.assert_array_equal(received, [[11, 13], [12, 13, 14, 15]][place])
        np.testing.assert_array_equal(m.reducescatter(np.arange(3), process_set=number), [[0, 2], [4]][place])
        m.barrier(process_set=number)

    world.run(in_set(ranks, body))
    # The coordinator hears of global ranks.
    assert {op[6] for op in world.negotiator.announced if op[1] == 2} == {1, 3}


def test_one_name_in_several_sets_at_the_same_time(world: EngineWorld) -> None:
    low, high, all_but_one = world.add_set(1, 0, 1), world.add_set(2, 2, 3), world.add_set(3, 0, 2, 3)
    sums = {0: 6, low: 1, high: 5, all_but_one: 5}

    def body(m: Member) -> None:
        for _ in range(5):
            mine = [s for s in (0, low, high, all_but_one) if m.rank in world.negotiator.sets[s]]
            if m.rank % 2:
                mine.reverse()
            handles = {s: m.allreduce_async(full(m.rank, 3000), "allreduce.x", process_set=s) for s in mine}
            for s in mine:
                np.testing.assert_array_equal(m.wait(handles[s]), sums[s])

    world.run(body)


def test_a_set_goes_on_while_an_overlapping_one_waits_for_a_late_rank(world: EngineWorld) -> None:
    waiting, running = world.add_set(1, 0, 1), world.add_set(2, 1, 2)
    late = threading.Event()

    def body(m: Member) -> None:
        if m.rank == 0:
            late.wait(30)
            np.testing.assert_array_equal(m.allreduce(full(1), "allreduce.late", process_set=waiting), 2)
        if m.rank == 1:
            handle = m.allreduce_async(full(1), "allreduce.late", process_set=waiting)
        if m.rank in (1, 2):
            for i in range(20):
                np.testing.assert_array_equal(m.allreduce(full(i, 20_000), process_set=running), 2 * i)
        if m.rank == 1:
            assert not handle.done()
            late.set()
            np.testing.assert_array_equal(m.wait(handle), 2)

    world.run(body)


def test_a_set_goes_on_while_a_disjoint_one_waits_for_a_late_rank(world: EngineWorld) -> None:
    waiting, running = world.add_set(1, 0, 1), world.add_set(2, 2, 3)
    submitted, done = threading.Event(), threading.Event()

    def body(m: Member) -> None:
        if m.rank == 0:
            assert done.wait(60)
            np.testing.assert_array_equal(m.allreduce(full(1), "allreduce.late", process_set=waiting), 2)
        elif m.rank == 1:
            handle = m.allreduce_async(full(1), "allreduce.late", process_set=waiting)
            submitted.set()
            assert done.wait(60)
            np.testing.assert_array_equal(m.wait(handle), 2)
        else:
            assert submitted.wait(60)
            for i in range(20):
                np.testing.assert_array_equal(m.allreduce(full(i, 20_000), process_set=running), 2 * i)
            m.barrier(process_set=running)
            if m.rank == 2:
                done.set()

    world.run(body, timeout=120)


def test_a_thread_that_waits_in_one_set_does_not_keep_another_from_running(world: EngineWorld) -> None:
    """Rank 1 is inside wait() for the slow set; its part in the other one is done by the background thread."""
    slow, other = world.add_set(1, 0, 1), world.add_set(2, 1, 2)
    other_done = threading.Event()

    def body(m: Member) -> None:
        if m.rank == 0:
            assert other_done.wait(30)
            m.allreduce(full(1), "allreduce.slow", process_set=slow)
        elif m.rank == 1:
            m.allreduce_async(full(1), "allreduce.other", process_set=other)
            m.allreduce(full(1), "allreduce.slow", process_set=slow)
        elif m.rank == 2:
            np.testing.assert_array_equal(m.allreduce(full(1), "allreduce.other", process_set=other), 2)
            other_done.set()

    world.run(body)


def test_a_set_of_one_needs_nobody(world: EngineWorld) -> None:
    number = world.add_set(1, 2)
    member = world.members[2]
    np.testing.assert_array_equal(member.allreduce(full(7), op=AVERAGE, process_set=number), 7)
    np.testing.assert_array_equal(member.broadcast(full(7), 2, process_set=number), 7)
    np.testing.assert_array_equal(member.allgather(full(7), process_set=number), 7)


def test_wrong_use_is_refused_and_leaves_the_engine_usable(world: EngineWorld) -> None:
    number = world.add_set(1, 0, 2)
    with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_IN_SET, "x: Rank 1", "[0, 2]")):
        world.members[1].allreduce(full(1), "x", process_set=number)
    with pytest.raises(ValueError, match=ends_with(OperationCode.NO_SUCH_SET, "process set 9")):
        world.members[0].allreduce(full(1), process_set=9)
    with pytest.raises(ValueError, match=ends_with(OperationCode.INVALID_ROOT, "root rank 1", "[0, 2]")):
        world.members[0].broadcast(full(1), 1, process_set=number)
    with pytest.raises(ValueError, match=ends_with(OperationCode.WRONG_SPLITS, "4 ", "2 ranks")):
        world.members[0].alltoall(full(1), [1, 0, 0, 0], process_set=number)
    engine = world.engines[0]
    for wrong, ranks in [(2, (0, 4)), (2, (1, 0)), (2, (0, 0)), (2, ()), (0, (0,)), (number, (1,))]:
        with pytest.raises(ValueError, match=ends_with(EngineCode.INTERNAL, f"Process set {wrong}")):
            engine.add_process_set(wrong, ranks)
    with pytest.raises(ValueError, match=ends_with(EngineCode.INTERNAL, "rank 1")):
        engine.add_process_set(2, (0, 1))
    world.run(in_set((0, 2), lambda m: m.allreduce(full(1), process_set=number)))
    world.run(lambda m: m.allreduce(full(1)))


def test_removing_a_set_ends_it_and_nothing_else(world: EngineWorld) -> None:
    kept = world.add_set(1, 0, 1)
    for number in (2, 3, 4):
        world.add_set(number, 0, 1, 2)
        for got in world.run(in_set((0, 1, 2), lambda m, s=number: m.allreduce(full(1), process_set=s)))[:3]:
            np.testing.assert_array_equal(got, 3)
        world.remove_set(number)
        world.remove_set(number)  # nothing happens
        for member in world.members:
            with pytest.raises(ValueError, match=ends_with(OperationCode.NO_SUCH_SET, f"process set {number}")):
                member.allreduce(full(1), process_set=number)
    world.run(in_set((0, 1), lambda m: m.allreduce(full(1), process_set=kept)))
    world.run(lambda m: m.allreduce(full(1)))
    assert world.engines[0].counters()["agreed"] == 5  # of removed sets, too


def test_what_runs_in_a_removed_set_fails_in_words(world: EngineWorld) -> None:
    number = world.add_set(1, 0, 1)
    world.run(in_set((0, 1), lambda m: m.allreduce(full(1), "allreduce.known", process_set=number)))
    assert [engine.pending(number) for engine in world.engines] == [0, 0, 0, 0]
    member = world.members[0]
    known = member.allreduce_async(full(1), "allreduce.known", process_set=number)
    new = member.allreduce_async(full(1), "allreduce.new", process_set=number)
    assert member.engine.pending(number) == 2
    member.engine.remove_process_set(number)
    for handle in (known, new):
        with pytest.raises(RuntimeError, match=ends_with(OperationCode.NO_SUCH_SET, "ranks [0, 1]")):
            member.wait(handle)
    with pytest.raises(RuntimeError, match=ends_with(OperationCode.NO_SUCH_SET, "rank 0", "ranks [0, 1]")):
        world.members[1].allreduce(full(1), "allreduce.known", process_set=number)
    world.run(lambda m: m.allreduce(full(1)))


def test_a_set_whose_driver_is_still_busy_is_removed_without_harm(world: EngineWorld) -> None:
    """After an operation was withdrawn the members of a set listen to each other for a while."""
    for number in range(1, 11):
        world.add_set(number, 0, 1)
        world.run(in_set((0, 1), lambda m, s=number: m.allreduce(full(1), "allreduce.known", process_set=s)))
        handle = world.members[0].allreduce_async(full(1), "allreduce.known", process_set=number)
        for engine in world.engines[:2]:  # the coordinator tells all members
            engine.apply_error(number, "allreduce.known", "Mismatched operations: made up.")
        with pytest.raises(RuntimeError, match="made up"):
            world.members[0].wait(handle)
        for _ in range(3):  # the set's background thread begins to drive meanwhile
            world.run(lambda m: m.barrier())
        world.remove_set(number)
        for engine in world.engines:
            engine.check()
    world.run(lambda m: m.allreduce(full(1)))


def test_an_abort_ends_all_sets_on_all_ranks(world: EngineWorld) -> None:
    number = world.add_set(1, 0, 1)
    world.run(lambda m: m.barrier())
    world.run(in_set((0, 1), lambda m: m.barrier(process_set=number)))
    # Rank 3 waits for the world and is no member; rank 2 waits for nothing.
    waits = {
        0: world.members[0].allreduce_async(full(1), "allreduce.never", process_set=number),
        3: world.members[3].allreduce_async(full(1), "allreduce.never"),
    }
    world.engines[1].abort("rank 1 on host here ran out of luck.")
    for rank, handle in waits.items():
        with pytest.raises(RuntimeError, match="ran out of luck"):
            world.members[rank].wait(handle)
    with pytest.raises(RuntimeError, match="ran out of luck"):
        world.members[0].allreduce(full(1))
    with pytest.raises(RuntimeError, match="ran out of luck"):
        world.engines[0].check()  # the set may have heard of it before the world
    with pytest.raises(RuntimeError, match="ran out of luck"):
        world.members[1].allreduce(full(1), process_set=number)


def test_a_failure_that_one_set_sees_ends_the_others(world: EngineWorld) -> None:
    """Rank 0 hears of rank 1's end through their set, and rank 2, which is in no set, from rank 0."""
    number = world.add_set(1, 0, 1)
    world.run(in_set((0, 1), lambda m: m.barrier(process_set=number)))
    world.run(lambda m: m.barrier())
    in_the_set = world.members[0].allreduce_async(full(1), "allreduce.a", process_set=number)
    in_the_world = world.members[2].allreduce_async(full(1), "allreduce.b")
    world.engines[1].abort("rank 1 on host here ran out of luck.")
    for member, handle in ((world.members[0], in_the_set), (world.members[2], in_the_world)):
        with pytest.raises(RuntimeError, match="ran out of luck"):
            member.wait(handle)


def test_a_rank_that_leaves_is_named_by_those_who_wait_in_a_set(world: EngineWorld) -> None:
    number = world.add_set(1, 0, 1)
    world.run(in_set((0, 1), lambda m: m.barrier(process_set=number)))
    handle = world.members[0].submit(ALLREDUCE, "allreduce.never", [full(1)], [full(1)], process_set=number)
    known = world.members[0].engine.submit(OpSpec(BARRIER, process_set=number), "barrier.noname", [])
    world.engines[1].close()
    with pytest.raises(RuntimeError, match=ends_with(OperationCode.SHUT_DOWN, "rank 1 (thread 1) on host here")):
        known.result()
    with pytest.raises(RuntimeError, match=ends_with(OperationCode.SHUT_DOWN, "rank 1 (thread 1) on host here")):
        world.members[0].wait(handle)


def test_the_coordinator_says_that_a_rank_left(world: EngineWorld) -> None:
    number = world.add_set(1, 0, 3)
    engine = world.engines[0]
    engine.check()
    waits = world.members[0].allreduce_async(full(1), "allreduce.never", process_set=number)
    engine.peer_left(3, "rank 3 on host here left.")
    with pytest.raises(RuntimeError, match="rank 3 on host here left"):
        world.members[0].wait(waits)
    with pytest.raises(RuntimeError, match="rank 3 on host here left"):
        engine.check()


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_sets_come_and_go_without_a_trace(transport: str) -> None:
    with EngineWorld(3, transport) as world:
        for number in range(1, 31):
            world.add_set(number, 0, 1, 2)
            world.run(lambda m, s=number: m.allreduce(full(1), process_set=s))
            world.remove_set(number)
            if number == 10:
                before = held()
        assert not leaks(before)


def test_sockets_of_a_refused_set_are_closed() -> None:
    with EngineWorld(2, "tcp") as world:
        gc.collect()
        before = descriptors()
        for ranks in [(0, 1, 2), (1,)]:
            mine, theirs = connect(2, 2)
            with pytest.raises(ValueError, match="rank 2") if 2 in ranks else contextlib.nullcontext():
                world.engines[0].add_process_set(1, ranks, sockets=mine)
            for fd in theirs[0]:
                os.close(fd)
        assert descriptors() <= before
