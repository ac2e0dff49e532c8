"""How operations and engines begin, fail and end, over every transport."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import numpy as np
import pytest
from error_codes import ends_with
from world import ALLREDUCE_SUM, BROADCAST, DTYPES, EVERY_TRANSPORT, SUM, EngineWorld, Member

from horovod.base.errors import OperationCode


@pytest.fixture(params=EVERY_TRANSPORT)
def pair(request: pytest.FixtureRequest):
    with EngineWorld(2, request.param) as made:
        yield made


@pytest.fixture(params=EVERY_TRANSPORT)
def trio(request: pytest.FixtureRequest):
    with EngineWorld(3, request.param) as made:
        yield made


def ones(count: int = 4) -> np.ndarray:
    return np.ones(count, np.float32)


def wait_until(condition, timeout: float = 20.0) -> None:
    """Polls a counter that has no event; fails loudly."""
    done = threading.Event()
    for _ in range(int(timeout / 0.005)):
        if condition():
            return
        done.wait(0.005)
    raise TimeoutError("the condition did not come true")


def test_a_known_operation_is_not_announced_again(pair: EngineWorld) -> None:
    def step(member: Member) -> None:
        handles = [member.allreduce_async(ones(i + 1), f"allreduce.w{i}") for i in range(20)]
        member.allreduce(ones())
        for handle in handles:
            member.wait(handle)

    pair.run(step)
    announced = [engine.counters()["announced"] for engine in pair.engines]
    assert announced == [21, 21]
    for _ in range(3):
        pair.run(step)
    # Unnamed operations are known by their signature, 32 of which may overlap: each of the first 32 is announced once.
    assert [engine.counters()["announced"] for engine in pair.engines] == [24, 24]


def test_more_unnamed_operations_in_flight_than_lanes(pair: EngineWorld) -> None:
    def body(member: Member) -> None:
        for _ in range(2):
            arrays = [np.full(3, i + member.rank, np.int64) for i in range(100)]
            handles = [member.allreduce_async(array) for array in arrays]
            for i, handle in enumerate(handles):
                np.testing.assert_array_equal(member.wait(handle), 2 * i + 1)

    pair.run(body)


def test_a_name_with_another_shape_is_negotiated_anew_and_both_stay_known(pair: EngineWorld) -> None:
    def body(member: Member) -> None:
        for count in (3, 4, 3, 4):
            np.testing.assert_array_equal(member.allreduce(ones(count), "allreduce.x"), 2.0)

    pair.run(body)
    assert pair.engines[0].counters()["announced"] == 2


def test_duplicate_name_in_flight(pair: EngineWorld) -> None:
    first = pair.members[0].allreduce_async(ones(), "allreduce.twice")
    with pytest.raises(ValueError, match=ends_with(OperationCode.NAME_IN_FLIGHT, "allreduce.twice", "rank 0")):
        pair.members[0].allreduce_async(ones(), "allreduce.twice")
    np.testing.assert_array_equal(pair.members[1].allreduce(ones(), "allreduce.twice"), 2.0)
    np.testing.assert_array_equal(pair.members[0].wait(first), 2.0)


def test_bad_arguments_leave_the_engine_usable(pair: EngineWorld) -> None:
    member = pair.members[0]
    with pytest.raises(ValueError, match=ends_with(OperationCode.INVALID_ROOT, "broadcast.x", "root rank 2")):
        member.submit(BROADCAST, "broadcast.x", [ones()], [ones()], root=2)
    with pytest.raises(ValueError, match=ends_with(OperationCode.NO_ROWS, "reducescatter")):
        member.reducescatter(np.array(1.0))
    with pytest.raises(ValueError, match=ends_with(OperationCode.WRONG_SPLITS, "3 entries", "2 ranks")):
        member.alltoall(ones(), splits=[1, 1, 1])
    with pytest.raises(ValueError, match=ends_with(OperationCode.WRONG_SPLITS, "(5)", "(4)")):
        member.alltoall(ones(), splits=[4, 1])
    with pytest.raises(ValueError, match=ends_with(OperationCode.WRONG_SPLITS, "(3)", "(2)")):
        member.alltoall(ones(3))
    with pytest.raises(ValueError, match=ends_with(OperationCode.NO_SUCH_SET, "process set 7")):
        member.allreduce(ones(), process_set=7)
    pair.run(lambda m: m.allreduce(ones()))


def test_handles(pair: EngineWorld) -> None:
    handle = pair.members[0].allreduce_async(ones(), "allreduce.h")
    assert not handle.done()
    pair.members[1].allreduce(ones(), "allreduce.h")
    pair.members[0].wait(handle)
    assert handle.result() is None
    with pytest.raises(ValueError, match=ends_with(OperationCode.CLEARED_HANDLE)):
        handle.done()


def test_a_handle_makes_the_result_of_what_the_engine_gives(pair: EngineWorld) -> None:
    def body(member: Member) -> None:
        array = ones()
        tensor = (array.ctypes.data, array.ctypes.data, DTYPES["float32"], array.shape)
        submit = member.engine.submit
        assert submit(ALLREDUCE_SUM, "allreduce.a", [tensor], keep="kept").result() == "kept"
        finished = submit(
            ALLREDUCE_SUM, "allreduce.b", [tensor], keep="kept", finish=lambda received: (received, "made")
        )
        assert finished.result() == (None, "made")

        def fails(received: object) -> None:
            raise LookupError("of the caller's own")

        broken = submit(ALLREDUCE_SUM, "allreduce.c", [tensor], finish=fails)
        with pytest.raises(LookupError, match="of the caller's own"):
            broken.result()
        assert broken.result() is None

    pair.run(body)


class AlarmError(Exception):
    """Raised by a signal's handler; an ordinary exception, unlike that of Ctrl-C."""


def test_a_wait_that_a_signal_cuts_short_leaves_the_handle_usable(pair: EngineWorld) -> None:
    def raises(signum: int, frame: object) -> None:
        raise AlarmError

    handle = pair.members[0].allreduce_async(ones(), "allreduce.h")
    before = signal.signal(signal.SIGALRM, raises)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(AlarmError):
            handle.result()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not handle.done()
    np.testing.assert_array_equal(pair.members[1].allreduce(ones(), "allreduce.h"), 2.0)
    np.testing.assert_array_equal(pair.members[0].wait(handle), 2.0)


def test_the_coordinator_refuses_an_operation(pair: EngineWorld) -> None:
    handle = pair.members[0].allreduce_async(ones(), "allreduce.refused")
    pair.engines[0].apply_error(0, "allreduce.refused", "allreduce.refused: made up. [mismatched-operations]")
    with pytest.raises(RuntimeError, match=ends_with(OperationCode.MISMATCHED, "allreduce.refused: made up")):
        pair.members[0].wait(handle)
    pair.run(lambda m: m.allreduce(ones()))


def test_an_operation_is_taken_back_from_the_data_plane(trio: EngineWorld) -> None:
    """Ranks 0 and 1 wait under a known id, the coordinator finds that rank 2 never will."""
    trio.run(lambda m: m.allreduce(ones(), "allreduce.known"))
    handles = [trio.members[rank].allreduce_async(ones(), "allreduce.known") for rank in (0, 1)]
    for rank in (0, 1):
        trio.engines[rank].apply_error(0, "allreduce.known", "made up. [mismatched-operations]")
    for rank, handle in zip((0, 1), handles, strict=True):
        with pytest.raises(RuntimeError, match=ends_with(OperationCode.MISMATCHED, "made up")):
            trio.members[rank].wait(handle)
    for got in trio.run(lambda m: m.allreduce(ones(), "allreduce.known")):
        np.testing.assert_array_equal(got, 3.0)


def test_who_goes_on_after_an_error_does_not_complete_what_another_rank_waits_for(pair: EngineWorld) -> None:
    """They wait for each other in f and g. Rank 1 hears of the errors first and calls f, for which rank 0 waits."""
    names = ("allreduce.f", "allreduce.g")
    for name in names:
        pair.run(lambda m, name=name: m.allreduce(ones(), name))  # type: ignore[misc]
    waiting = [pair.members[rank].allreduce_async(ones(), names[rank]) for rank in (0, 1)]
    errors = [(0, name, "made up. [deadlock]") for name in reversed(names)]
    again = {}
    for rank in (1, 0):
        pair.engines[rank].apply_failures(errors, [(0, [0, 1])])
        with pytest.raises(RuntimeError, match=ends_with(OperationCode.DEADLOCK)):
            pair.members[rank].wait(waiting[rank])
        again[rank] = pair.members[rank].allreduce_async(ones(), "allreduce.f")
    for rank, handle in again.items():
        np.testing.assert_array_equal(pair.members[rank].wait(handle), 2.0)


@pytest.mark.parametrize("told", [1, 2])
def test_recall_frees_ids_and_announces_pending_operations_again(trio: EngineWorld, told: int) -> None:
    """Also where ranks are told again before the first one is settled."""
    trio.run(lambda m: m.allreduce(ones(), "allreduce.a"))
    handles = [trio.members[rank].allreduce_async(ones(), "allreduce.a") for rank in (0, 1)]
    for rank, engine in enumerate(trio.engines):
        engine.apply_recall(0, [0] * (told if rank < 2 else 1))
    wait_until(lambda: len(trio.negotiator.recalled) == 3)
    assert sorted(trio.negotiator.recalled) == [(0, [0]), (1, [0]), (2, [0])]
    np.testing.assert_array_equal(trio.members[2].allreduce(ones(), "allreduce.a"), 3.0)
    for rank, handle in zip((0, 1), handles, strict=True):
        np.testing.assert_array_equal(trio.members[rank].wait(handle), 3.0)
    assert [engine.counters()["announced"] for engine in trio.engines] == [2, 2, 2]


def test_a_long_wait_is_reported_as_blocked_again_and_again(pair: EngineWorld) -> None:
    waiter = threading.Thread(target=pair.members[0].allreduce, args=(ones(), "allreduce.late"))
    waiter.start()
    wait_until(lambda: len(pair.negotiator.blocked) >= 2)
    pair.members[1].allreduce(ones(), "allreduce.late")
    waiter.join()
    assert set(pair.negotiator.blocked) == {(0, "allreduce.late")}


def test_abort_ends_every_rank_with_the_first_cause(trio: EngineWorld) -> None:
    trio.run(lambda m: m.barrier())
    handles = {rank: trio.members[rank].allreduce_async(ones(), "allreduce.never") for rank in (0, 1)}
    trio.engines[2].abort("rank 2 on host here ran out of luck. [peer-lost]")
    expected = ends_with(OperationCode.PEER_LOST, "rank 2 on host here ran out of luck. (", "allreduce.never")
    for rank, handle in handles.items():
        with pytest.raises(RuntimeError, match=expected):
            trio.members[rank].wait(handle)
    for member in trio.members:
        with pytest.raises(RuntimeError, match="ran out of luck"):
            member.allreduce(ones(), "allreduce.after")


def test_a_rank_that_leaves_is_named_by_those_who_wait(trio: EngineWorld) -> None:
    trio.run(lambda m: m.barrier())
    handles = {rank: trio.members[rank].allreduce_async(ones(), "allreduce.never") for rank in (0, 1)}
    trio.engines[2].close()
    for rank, handle in handles.items():
        with pytest.raises(RuntimeError, match=ends_with(OperationCode.SHUT_DOWN, "rank 2 (thread 2) on host here")):
            trio.members[rank].wait(handle)


def test_a_rank_may_leave_right_after_its_last_operation(trio: EngineWorld) -> None:
    def body(member: Member) -> np.ndarray:
        array = np.full(300_000, member.rank, np.float32)
        result = member.allreduce(array, "allreduce.last")
        member.engine.close()
        return result

    for got in trio.run(body):
        np.testing.assert_array_equal(got, 3.0)


def test_close_fails_what_others_never_submitted(pair: EngineWorld) -> None:
    pair.run(lambda m: m.barrier())
    known = pair.members[0].submit(5, "barrier.noname", [], [])
    new = pair.members[0].allreduce_async(ones(), "allreduce.new")
    pair.engines[0].close()
    for handle in (known, new):
        with pytest.raises(RuntimeError, match=ends_with(OperationCode.SHUT_DOWN)):
            handle.result()
    with pytest.raises(RuntimeError, match=ends_with(OperationCode.SHUT_DOWN)):
        pair.members[0].allreduce(ones())


def test_several_threads_of_one_rank(pair: EngineWorld) -> None:
    def body(member: Member) -> None:
        errors: list[BaseException] = []

        def loop(thread: int) -> None:
            try:
                for i in range(50):
                    got = member.allreduce(np.full(50 + thread, i + member.rank, np.int64), f"allreduce.thread{thread}")
                    np.testing.assert_array_equal(got, 2 * i + 1)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=loop, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors, errors

    pair.run(body)


def test_asynchronous_operations_need_no_waiting_thread(pair: EngineWorld) -> None:
    handles = [member.allreduce_async(ones(), "allreduce.bg") for member in pair.members]
    wait_until(lambda: all(handle.done() for handle in handles))


def test_fusion_threshold_bounds_a_batch() -> None:
    with EngineWorld(2, "in_process", fusion_threshold_bytes=0) as world:

        def body(member: Member) -> None:
            handles = [member.allreduce_async(ones(), f"allreduce.f{i}", SUM) for i in range(10)]
            for handle in handles:
                member.wait(handle)

        world.run(body)
        assert world.engines[0].counters()["batches"] == 10


def test_a_world_of_one_needs_nothing() -> None:
    with EngineWorld(1) as world:
        member = world.members[0]
        np.testing.assert_array_equal(member.allreduce(ones(), op=0), 1.0)
        np.testing.assert_array_equal(member.allgather(ones()), 1.0)
        got, splits = member.alltoall(ones(5), splits=[3])
        assert (got.shape, splits) == ((3,), [3])
        np.testing.assert_array_equal(member.reducescatter(ones()), 1.0)
        member.broadcast(ones(), 0)
        member.barrier()


class Owner:
    """Stands for the tensors of an operation; only these can be referenced weakly."""


def test_what_is_kept_lives_until_an_abandoned_operation_is_over(pair: EngineWorld) -> None:
    array, owner = ones(), Owner()
    alive = weakref.ref(owner)
    tensor = (array.ctypes.data, array.ctypes.data, DTYPES["float32"], array.shape)
    engine = pair.engines[0]
    handle = engine.submit(ALLREDUCE_SUM, "allreduce.x", [tensor], keep=owner)
    del owner, handle
    assert engine.pending(0) == 1
    gc.collect()
    assert alive() is not None, "the engine may still write to it"
    pair.members[1].wait(pair.members[1].allreduce_async(ones(), "allreduce.x"))
    wait_until(lambda: engine.pending(0) == 0)
    np.testing.assert_array_equal(array, 2)
    pair.run(lambda member: member.allreduce(ones()))  # any later operation lets go
    assert alive() is None


def test_what_is_kept_is_let_go_when_the_operation_was_waited_for(pair: EngineWorld) -> None:
    def body(member: Member) -> None:
        array = ones()
        tensor = (array.ctypes.data, array.ctypes.data, DTYPES["float32"], array.shape)
        owners = [Owner(), Owner(), Owner()]
        alive = [weakref.ref(owner) for owner in owners]
        handle = member.engine.submit(ALLREDUCE_SUM, "allreduce.x", [tensor], keep=owners[0])
        handle.result()
        member.engine.run(ALLREDUCE_SUM, "allreduce.y", [tensor], keep=owners[1])
        with pytest.raises(TypeError, match=ends_with(OperationCode.INVALID)):
            member.engine.submit(ALLREDUCE_SUM, 99, [tensor], keep=owners[2])
        del owners
        assert [ref() for ref in alive] == [None, None, None]

    pair.run(body)
