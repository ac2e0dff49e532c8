"""GPU tensors by way of the host's memory: when that way is taken, that it computes what the CPU computes, how its
copies overlap, what it holds, and how it fails. That it runs every collective is in test_gpu_collectives.py.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from event_words import NO_NCCL, THROUGH_HOST_MEMORY
from gpu_world import GpuMember, GpuWorld, StandIns, ended
from resources import eventually
from world import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    AVERAGE,
    BROADCAST,
    DTYPES,
    MAX,
    PRODUCT,
    REDUCESCATTER,
    SUM,
    Member,
    spec,
)

from horovod.base.errors import EngineCode, OperationCode, code_of

CHUNK = 64 << 10


@pytest.fixture(params=["in_process", "tcp"])
def pair(request: pytest.FixtureRequest, libraries: StandIns) -> Iterator[GpuWorld]:
    with GpuWorld(libraries, 2, request.param, without_nccl=(0, 1), staging_bytes=CHUNK) as made:
        yield made


def noise(rank: int, count: int, dtype: str) -> np.ndarray:
    """Sums of these depend on the order of summation, and are rounded."""
    random = np.random.default_rng(rank)
    if dtype == "bfloat16":
        return (random.standard_normal(count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if np.issubdtype(np.dtype(dtype), np.floating):
        return random.standard_normal(count).astype(dtype)
    return random.integers(0, 100, count).astype(dtype)


def on_cpu(member: GpuMember, kind: int, name: str, array: np.ndarray, dtype: str, **options: Any) -> np.ndarray:
    """The same operation on a tensor of the host."""
    array = array.copy()
    output = array.ctypes.data if kind == ALLREDUCE else 0
    tensor = (array.ctypes.data, output, DTYPES[dtype], array.shape)
    result = member.engine.submit(
        spec(kind, options), name, [tensor], **options, finish=lambda received: received
    ).result()
    return array if result is None else Member._adopt(result[0], array.dtype)


def on_gpu(member: GpuMember, kind: int, name: str, array: np.ndarray, dtype: str, **options: Any) -> np.ndarray:
    sent = member.array(array)
    output = sent if kind == ALLREDUCE else None
    result = member.finish(member.start(kind, name, [sent], [output], dtype=dtype, **options))
    return sent.numpy() if result is None else result[0].numpy()


# -- which way ---------------------------------------------------------------------------------------------------------
WHAT_NCCL_CAN_NOT_DO = [
    ("int16", {"reduce_op": SUM}, "NCCL does not reduce int16"),
    ("uint16", {"reduce_op": MAX}, "NCCL does not reduce uint16"),
    ("int32", {"reduce_op": SUM, "prescale": 0.5}, "NCCL can't multiply int32 by a fraction"),
    ("float16", {"reduce_op": SUM, "postscale": 1e-6}, "float16 can't hold the factor 0.000001"),
    ("bfloat16", {"reduce_op": PRODUCT, "postscale": 1e-39}, "bfloat16 can't hold the factor"),
]


@pytest.mark.parametrize(("dtype", "options", "why"), WHAT_NCCL_CAN_NOT_DO)
@pytest.mark.parametrize("transport", ["in_process", "hosts"])
def test_what_nccl_can_not_do_is_done_by_the_host(
    libraries: StandIns, transport: str, dtype: str, options: dict[str, Any], why: str
) -> None:
    """And has the CPU's bits, while all else in the same world goes by NCCL."""
    with GpuWorld(libraries, 4, transport, staging_bytes=CHUNK) as world:

        def body(member: GpuMember) -> None:
            mine = noise(member.rank, 50_000, dtype)
            expected = on_cpu(member, ALLREDUCE, "allreduce.cpu", mine, dtype, **options)
            got = on_gpu(member, ALLREDUCE, "allreduce.gpu", mine, dtype, **options)
            np.testing.assert_array_equal(got, expected)

        groups = libraries.count("groups")
        world.run(body)
        assert libraries.count("groups") == groups
        world.run(lambda m: m.allreduce(np.ones(4, np.float32)))
        assert libraries.count("groups") == groups + 4
        [sentence] = {sentence for _, worth_saying, sentence in world.negotiator.notes if not worth_saying}
        assert sentence.startswith(f"allreduce.gpu goes {THROUGH_HOST_MEMORY}: ")
        assert why in sentence


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", [ALLREDUCE, REDUCESCATTER])
@pytest.mark.parametrize("transport", ["in_process", "tcp", "hosts"])
def test_bits_are_those_of_the_cpu(libraries: StandIns, transport: str, kind: int, dtype: str) -> None:
    with GpuWorld(libraries, 5, transport, without_nccl=range(5), staging_bytes=CHUNK) as world:

        def body(member: GpuMember) -> None:
            options = {"reduce_op": AVERAGE, "prescale": 0.7}
            mine = noise(member.rank, 90_000, dtype).reshape(-1, 3)[:29_998]
            expected = on_cpu(member, kind, "x.cpu", mine, dtype, **options)
            got = on_gpu(member, kind, "x.gpu", mine, dtype, **options)
            np.testing.assert_array_equal(got, expected)
            again = on_gpu(member, kind, "x.gpu", mine, dtype, **options)
            np.testing.assert_array_equal(again, expected)

        world.run(body)


def test_one_rank_without_nccl_decides_for_all(libraries: StandIns) -> None:
    groups = libraries.count("groups")
    with GpuWorld(libraries, 3, without_nccl=[1]) as world:
        assert {r[0] for r in world.run(lambda m: m.allreduce(np.ones(4, np.float32)))} == {3.0}
        assert libraries.count("groups") == groups
        for rank, worth_saying, sentence in world.negotiator.notes:
            assert worth_saying == (rank == 0)
            assert sentence.startswith(f"GPU tensors of the world go {THROUGH_HOST_MEMORY}, for the reason of rank 1 ")
            assert f"{NO_NCCL}: " in sentence
        assert sorted(rank for rank, *_ in world.negotiator.notes) == [0, 1, 2]


def test_settings_choose_by_operation(libraries: StandIns) -> None:
    with GpuWorld(
        libraries, 2, host_operations=1 << ALLREDUCE | 1 << BROADCAST, nccl_operations=1 << ALLGATHER
    ) as world:
        libraries.record()
        world.run(lambda m: (m.allreduce(np.ones(4, np.float32)), m.broadcast(np.ones(8, np.float32), 0)))
        assert len(libraries.recorded()) == 4 + 2
        groups = libraries.count("groups")
        world.run(lambda m: (m.allgather(np.ones(4, np.float32)), m.reducescatter(np.ones(4, np.float32))))
        assert libraries.count("groups") == groups + 4


def test_nccl_that_is_demanded_and_missing_is_told_at_once(libraries: StandIns) -> None:
    with GpuWorld(libraries, 2, without_nccl=[0, 1], nccl_operations=1 << ALLREDUCE) as world:
        member = world.members[0]
        array = member.array(np.ones(4, np.float32))
        with pytest.raises(ValueError, match=ends_with(EngineCode.NO_NCCL, "allreduce.x", "HOROVOD_GPU_ALLREDUCE")):
            member.start(ALLREDUCE, "allreduce.x", [array], [array])
        world.run(lambda m: m.allgather(np.ones(4, np.float32)))


def test_a_blocking_nccl_is_not_used(libraries: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's environment says overrides the engine, and a lost rank would never be noticed."""
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    with GpuWorld(libraries, 2, nccl_operations=1 << ALLGATHER) as world:
        before = libraries.count("communicators")
        for got in world.run(lambda m: m.allreduce(np.ones(4, np.float32))):
            np.testing.assert_array_equal(got, 2.0)
        assert libraries.count("communicators") == before
        member = world.members[0]
        array = member.array(np.ones(4, np.float32))
        with pytest.raises(ValueError, match=ends_with(EngineCode.NO_NCCL, "allgather.x", "NCCL_COMM_BLOCKING=1")):
            member.start(ALLGATHER, "allgather.x", [array], [None])


# -- order and overlap -------------------------------------------------------------------------------------------------
def test_copies_are_in_order_and_overlap(libraries: StandIns) -> None:
    """The next chunk is on its way from the device before the host works on this one, whose result follows at once."""
    with GpuWorld(libraries, 2, without_nccl=range(2), staging_bytes=CHUNK) as world:
        arrays = [member.array(np.full(5 * CHUNK // 4 - 100, member.rank + 1, np.float32)) for member in world.members]
        libraries.record()

        def body(member: GpuMember) -> None:
            array = arrays[member.rank]
            member.finish(member.start(ALLREDUCE, "allreduce.x", [array], [array], reduce_op=SUM))
            np.testing.assert_array_equal(array.numpy(), 3.0)

        world.run(body)
        copies = libraries.recorded()
        for rank, array in enumerate(arrays):
            mine = [(way, (at - array.address) // CHUNK) for device, way, at, _ in copies if device == rank]
            assert mine == [
                ("in", 0), ("in", 1), ("out", 0), ("in", 2), ("out", 1), ("in", 3), ("out", 2), ("in", 4), ("out", 3),
                ("out", 4),
            ]  # fmt: skip
            sizes = [size for device, way, _, size in copies if device == rank and way == "in"]
            assert sizes == [CHUNK] * 4 + [CHUNK - 400]


def test_a_fused_batch_shares_chunks(libraries: StandIns) -> None:
    with GpuWorld(libraries, 2, without_nccl=range(2), staging_bytes=CHUNK) as world:

        def body(member: GpuMember) -> None:
            arrays = [np.full(10 + i, i + member.rank, np.float32) for i in range(161)]
            handle = member.submit(ALLREDUCE, "g", arrays, list(arrays), reduce_op=SUM)
            for i, got in enumerate(member.wait(handle)):
                np.testing.assert_array_equal(got, 2 * i + 1)
            parts = [np.full((2, 1 + i), i + member.rank, np.int16) for i in range(50)]
            for i, got in enumerate(member.wait(member.submit(REDUCESCATTER, "r", parts, [None] * 50, reduce_op=SUM))):
                np.testing.assert_array_equal(got, np.full((1, 1 + i), 2 * i + 1))
            for i, got in enumerate(member.wait(member.submit(ALLGATHER, "a", parts, [None] * 50))):
                np.testing.assert_array_equal(got[:, 0], [i, i, i + 1, i + 1])

        before = [engine.counters()["batches"] for engine in world.engines]
        world.run(body)
        assert [engine.counters()["batches"] for engine in world.engines] == [one + 3 for one in before]


def test_results_come_after_what_was_queued_before(pair: GpuWorld) -> None:
    """The host waits for the framework's work on the tensors, and nothing is read before that has ended."""
    held = [gpu.hold() for gpu in pair.gpus]

    def body(member: GpuMember) -> None:
        array = member.array(np.full(40_000, member.rank + 1, np.float32))  # is copied when the stream goes on
        handle = member.start(ALLREDUCE, "allreduce.x", [array], [array], reduce_op=SUM)
        assert not handle.done()
        member.gpu.release(held[member.rank])
        member.finish(handle)
        np.testing.assert_array_equal(array.numpy(), 3.0)

    pair.run(body)


# -- what it holds -----------------------------------------------------------------------------------------------------
def test_page_locked_memory_is_bounded_and_used_again(libraries: StandIns) -> None:
    before = libraries.count("pinned")

    def use(world: GpuWorld) -> None:
        sets = {world.add_set(1, 0, 1): (0, 1), world.add_set(2, 0, 2): (0, 2)}

        def body(member: GpuMember) -> None:
            for step in range(4):
                for number, ranks in sets.items():
                    if member.rank in ranks:
                        member.allreduce(np.ones(200_000, np.float32), f"allreduce.{number}.{step}", process_set=number)
                member.allreduce(np.ones(200_000, np.float32), f"allreduce.all.{step}")

        for _ in range(3):
            world.run(body)
            # Three buffers for each process set that a rank is in, at most.
            assert libraries.count("pinned") <= before + 3 * (3 + 2 + 2)

    def one_world() -> None:
        with GpuWorld(libraries, 3, without_nccl=range(3), staging_bytes=CHUNK) as world:
            use(world)

    one_world()
    gc.collect()
    assert eventually(lambda: libraries.count("pinned") == before)


def test_twenty_worlds_leave_nothing(libraries: StandIns) -> None:
    """Half of them end badly, in the middle of a batch."""

    def body(member: GpuMember) -> None:
        member.allreduce(np.ones(100_000, np.float32), op=AVERAGE, prescale=0.5)
        member.allgather(np.ones((3, 2), np.float32))
        member.alltoall(np.ones((4, 2), np.float32))
        member.reducescatter(np.ones((3, 2), np.float32))

    def cycle(badly: bool) -> None:
        with GpuWorld(libraries, 2, without_nccl=range(2), staging_bytes=CHUNK) as world:
            world.run(body)
            if not badly:
                return
            held = world.gpus[1].hold()
            arrays = [member.array(np.ones(300_000, np.float32)) for member in world.members]
            handles = [
                m.start(ALLREDUCE, "allreduce.never", [a], [a]) for m, a in zip(world.members, arrays, strict=True)
            ]
            assert eventually(lambda: world.engines[0].counters()["batches"] == 5)
            world.engines[1].abort("rank 1 on host here gave up.")
            for member, handle in zip(world.members, handles, strict=True):
                with pytest.raises(RuntimeError, match="gave up"):
                    member.finish(handle)
            world.gpus[1].release(held)

    libraries.check_nothing_is_left(cycle)


# -- NCCL beside it ----------------------------------------------------------------------------------------------------
def queue_what_never_ends(world: GpuWorld) -> Any:
    """By NCCL: rank 1's stream stands still, so that the others' kernels wait for it."""
    held = world.gpus[1].hold()

    def body(member: GpuMember) -> Any:
        array = member.array(np.ones(4, np.float32))
        member.finish(member.start(ALLREDUCE, "allreduce.queued", [array], [array], reduce_op=SUM))
        return array

    return held, world.run(body)


def stage(member: GpuMember, options: dict[str, Any]) -> tuple[Any, Any]:
    """Starts an operation through the host: rank 1's tensor is behind what stands still, that of others is there."""
    member.current_stream = member.gpu.stream() if member.rank != 1 else 0
    array = member.array(np.ones(1000, np.int16))
    return member.start(ALLREDUCE, "allreduce.staged", [array], [array], reduce_op=SUM, **options), array


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("transport", ["in_process", "tcp"])
def test_an_error_of_nccl_ends_a_wait_of_the_host(libraries: StandIns, transport: str, who: int, waiting: bool) -> None:
    """Rank 1 waits for its own GPU, rank 0 for rank 1. The thread that waits is the only one that can notice."""
    with GpuWorld(libraries, 2, transport) as world:
        world.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.good"))
        held, arrays = queue_what_never_ends(world)
        started = [stage(member, {"wait_follows": waiting}) for member in world.members]
        errors: list[str] = []

        def wait(member: GpuMember) -> None:
            with pytest.raises(RuntimeError) as raised:
                member.finish(started[member.rank][0])
            errors.append(str(raised.value))

        waiters = [threading.Thread(target=wait, args=(member,)) for member in world.members if waiting]
        for waiter in waiters:
            waiter.start()
        assert eventually(lambda: all(engine.counters()["batches"] == 3 for engine in world.engines))
        libraries.fail(f"ncclCommGetAsyncError@{who}", 3)
        assert eventually(lambda: all(ended(engine) is not None for engine in world.engines))
        for engine in world.engines:
            assert re.search(ends_with(EngineCode.NCCL_FAILED, "ncclCommGetAsyncError", "(3)"), ended(engine) or "")
        world.gpus[0].synchronize()  # its kernel was ended
        world.gpus[1].release(held)
        for waiter in waiters:
            waiter.join(60)
        assert len(errors) == len(waiters)
        del arrays


# -- failures ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemHostAlloc"])
def test_a_copy_that_fails_ends_the_epoch_everywhere(pair: GpuWorld, libraries: StandIns, function: str) -> None:
    arrays = [member.array(np.ones(100_000, np.float32)) for member in pair.members]
    libraries.fail(function, 719, skip=3)

    def steps(member: GpuMember) -> None:
        for step in range(2):
            array = arrays[member.rank]
            member.finish(member.start(ALLREDUCE, f"allreduce.{step}", [array], [array], reduce_op=SUM))
            member.barrier()

    def body(member: GpuMember) -> str:
        with pytest.raises(RuntimeError) as raised:
            steps(member)
        return str(raised.value)

    for error in pair.run(body):
        assert re.search(ends_with(EngineCode.GPU_FAILED, function, "CUDA_ERROR_LAUNCH_FAILED (719"), error)
    for member in pair.members:
        member.gpu.synchronize()


def test_memory_that_can_not_be_page_locked_is_told(pair: GpuWorld, libraries: StandIns) -> None:
    libraries.fail("cuMemHostAlloc", 2)
    with pytest.raises(RuntimeError, match=ends_with(EngineCode.OUT_OF_MEMORY, "65536 bytes", "ulimit -l")):
        pair.run(lambda m: m.allreduce(np.ones(4, np.float32)))


@pytest.mark.parametrize("kind", [ALLREDUCE, ALLGATHER, ALLTOALL, REDUCESCATTER, BROADCAST])
def test_a_peer_that_is_lost_while_staging_is_told(pair: GpuWorld, kind: int) -> None:
    """Rank 1 waits for its own GPU, rank 0 for rank 1; the end of the epoch frees both."""
    pair.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.good"))
    held = pair.gpus[1].hold()
    arrays = [member.array(np.ones(100_000, np.float32)) for member in pair.members]
    in_place = kind in (ALLREDUCE, BROADCAST)
    handles = [
        member.start(kind, "x", [array], [array if in_place else None], **({"root": 1} if kind == BROADCAST else {}))
        for member, array in zip(pair.members, arrays, strict=True)
    ]
    assert eventually(lambda: all(engine.counters()["batches"] == 2 for engine in pair.engines))
    assert not any(handle.done() for handle in handles)
    pair.engines[0].abort("rank 0 on host here was lost.")
    with pytest.raises(RuntimeError):  # rank 0 may see first that rank 1 has hung up for that reason
        pair.members[0].finish(handles[0])
    with pytest.raises(RuntimeError, match="rank 0 on host here was lost"):
        pair.members[1].finish(handles[1])
    pair.gpus[1].release(held)
    pair.gpus[1].synchronize()


def test_a_device_that_does_not_go_on_ends_the_epoch(libraries: StandIns) -> None:
    with GpuWorld(libraries, 2, without_nccl=range(2), progress_timeout_ms=1000) as world:
        world.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.good"))
        held = world.gpus[1].hold()
        arrays = [member.array(np.ones(4, np.float32)) for member in world.members]
        for member, array in zip(world.members, arrays, strict=True):
            member.start(ALLREDUCE, "allreduce.x", [array], [array])
        assert eventually(lambda: all(ended(engine) for engine in world.engines))
        # Whichever of both rank 0's data plane and rank 1's own wait is the first to lose patience.
        for engine in world.engines:
            error = ended(engine) or ""
            assert "Rank 1 (thread 1) on host here" in error
            assert code_of(error) in (OperationCode.NO_PROGRESS, EngineCode.GPU_STALLED)
        world.gpus[1].release(held)


def test_leaving_finishes_what_is_on_its_way(libraries: StandIns) -> None:
    with GpuWorld(libraries, 2, "tcp", without_nccl=range(2)) as world:
        arrays = [member.array(np.ones(400_000, np.float32)) for member in world.members]

        def body(member: GpuMember) -> None:
            array = arrays[member.rank]
            member.finish(member.start(ALLREDUCE, "allreduce.x", [array], [array], reduce_op=SUM))

        world.run(body)
        leaving = threading.Thread(target=world.engines[0].close)
        leaving.start()
        leaving.join(60)
        assert not leaving.is_alive()
        for array in arrays:
            np.testing.assert_array_equal(array.numpy(), 2.0)
