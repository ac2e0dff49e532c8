"""Every collective on GPU tensors against NumPy: the engine with NCCL and the driver, which libraries stand in for, and
without NCCL by way of the host's memory, in chunks that are small enough for several of them.

The host waits for nothing: a result is read in the order of the stream that the engine was told of. What is particular
to devices (readiness, lifetime, failures) is in test_gpu_life.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gpu_world import GpuMember, GpuWorld, StandIns
from oracle import assert_allreduced, reduced, values
from world import ALLREDUCE, ALLREDUCE_SUM, AVERAGE, MAX, MIN, PRODUCT, REDUCESCATTER, SUM

REDUCED = ("uint8", "int8", "int16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bool")
MOVED = (*REDUCED, "uint16")
SIZES = (0, 1, 7, 1000, 70_001)
WORLDS = [(1, "in_process"), (2, "in_process"), (3, "in_process"), (2, "tcp"), (3, "hosts")]
BY_HOST = [(1, "in_process"), (2, "in_process"), (3, "tcp"), (4, "hosts"), (3, "gloo")]


PARAMS = [(*one, True) for one in WORLDS] + [(*one, False) for one in BY_HOST]


@pytest.fixture(scope="module", params=PARAMS, ids=lambda p: f"{p[0]}-{p[1]}-{'nccl' if p[2] else 'host'}")
def world(request: pytest.FixtureRequest, libraries: StandIns) -> Iterator[GpuWorld]:
    size, transport, nccl = request.param
    options = {} if nccl else {"staging_bytes": 40 << 10}
    with GpuWorld(libraries, size, transport, without_nccl=() if nccl else range(size), **options) as made:
        yield made


# But for averages of bool, which are refused: see test_gpu_life.py.
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(dtype, op) for dtype in REDUCED for op in (AVERAGE, SUM, MIN, MAX, PRODUCT) if (dtype, op) != ("bool", AVERAGE)],
)
def test_allreduce(world: GpuWorld, dtype: str, op: int) -> None:
    def body(member: GpuMember) -> None:
        for count in SIZES:
            got = member.allreduce(values(member.rank, count, dtype), op=op)
            assert_allreduced(got, [values(rank, count, dtype) for rank in range(member.size)], op)

    world.run(body)


def bfloat16(numbers: list[float]) -> np.ndarray:
    """Bits of numbers that need no rounding."""
    return (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("op", "wanted"), [(SUM, 6.0), (MAX, 3.0), (AVERAGE, None), (PRODUCT, 6.0)])
def test_bfloat16(world: GpuWorld, op: int, wanted: float | None) -> None:
    def body(member: GpuMember) -> None:
        array = member.array(bfloat16([member.rank + 1.0] * 5))
        handle = member.start(ALLREDUCE, f"allreduce.bf{op}", [array], [array], reduce_op=op, dtype="bfloat16")
        assert member.finish(handle) is None
        numbers = [rank + 1.0 for rank in range(member.size)]
        expected = {SUM: sum(numbers), MAX: max(numbers), AVERAGE: sum(numbers) / member.size}.get(op, np.prod(numbers))
        got = (array.numpy().astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(got, expected, rtol=1e-2)
        assert wanted is None or member.size != 3 or got[0] == wanted

    world.run(body)


def test_allreduce_apart_keeps_the_input(world: GpuWorld) -> None:
    def body(member: GpuMember) -> None:
        before = values(member.rank, 5000, "float32")
        source, target = member.array(before), member.array(np.zeros(5000, np.float32))
        member.finish(member.start(ALLREDUCE, "allreduce.apart", [source], [target], reduce_op=SUM))
        np.testing.assert_array_equal(
            target.numpy(), reduced([values(r, 5000, "float32") for r in range(member.size)], SUM)
        )
        np.testing.assert_array_equal(source.numpy(), before)

    world.run(body)


@pytest.mark.parametrize("op", [SUM, AVERAGE, MIN, MAX, PRODUCT])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_factors(world: GpuWorld, dtype: str, op: int) -> None:
    """post * REDUCE(pre * x); powers of two, so that nothing is rounded but an average."""

    def body(member: GpuMember) -> None:
        for pre, post in ((0.5, 4.0), (2.0, 1.0), (1.0, 0.25), (2.0, 0.5)):
            parts = [values(rank, 100, dtype) * np.dtype(dtype).type(pre) for rank in range(member.size)]
            expected = reduced(parts, op).astype(np.float64) * post
            mine = values(member.rank, 100, dtype)
            name = f"allreduce.factors.{dtype}.{op}.{pre}.{post}"
            got = member.allreduce(mine, name, op, prescale=pre, postscale=post)
            np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2e-3 if op == AVERAGE else 0)

    world.run(body)


def test_integer_average_truncates_toward_zero(world: GpuWorld) -> None:
    def body(member: GpuMember) -> None:
        got = member.allreduce(np.array([1, -1] if member.rank == 0 else [0, 0], np.int64), op=AVERAGE)
        np.testing.assert_array_equal(got, [1, -1] if member.size == 1 else [0, 0])
        for dtype in (np.int8, np.int64):  # no sum of these fits the type
            largest = np.iinfo(dtype).max
            got = member.allreduce(np.array([largest, -largest], dtype), f"average.{np.dtype(dtype)}", AVERAGE)
            np.testing.assert_array_equal(got, [largest, -largest])

    world.run(body)


@pytest.mark.parametrize("dtype", MOVED)
def test_allgather_with_uneven_rows(world: GpuWorld, dtype: str) -> None:
    def body(member: GpuMember) -> None:
        for rows, step in ((0, 0), (0, 1), (1, 0), (50, 1), (3000, 2)):
            parts = [values(r, (rows + step * r) * 3, dtype).reshape(-1, 3) for r in range(member.size)]
            np.testing.assert_array_equal(member.allgather(parts[member.rank]), np.concatenate(parts))

    world.run(body)


def test_allgather_where_only_one_rank_has_rows(world: GpuWorld) -> None:
    def body(member: GpuMember) -> None:
        assert member.allgather(np.ones((5 if member.rank == 0 else 0, 2), np.float32)).shape == (5, 2)

    world.run(body)


@pytest.mark.parametrize("dtype", MOVED)
def test_broadcast_from_every_root(world: GpuWorld, dtype: str) -> None:
    def body(member: GpuMember) -> None:
        for root in range(member.size):
            for count in SIZES:
                array = values(member.rank, count, dtype)
                member.broadcast(array, root)
                np.testing.assert_array_equal(array, values(root, count, dtype))

    world.run(body)


@pytest.mark.parametrize("dtype", ["int16", "bool", "float64"])
def test_alltoall(world: GpuWorld, dtype: str) -> None:
    size = world.size

    def body(member: GpuMember) -> None:
        parts = [values(rank, size * 100, dtype) for rank in range(size)]
        got, splits = member.alltoall(parts[member.rank])
        mine = slice(100 * member.rank, 100 * (member.rank + 1))
        np.testing.assert_array_equal(got, np.concatenate([part[mine] for part in parts]))
        assert splits == [100] * size
        # Rank r sends r + to rows to each `to`; one row more than the sum is dropped.
        sent = [member.rank + to for to in range(size)]
        got, splits = member.alltoall(np.full((sum(sent) + 1, 2), member.rank).astype(dtype), splits=sent)
        assert splits == [rank + member.rank for rank in range(size)]
        np.testing.assert_array_equal(got[:, 0], np.repeat(np.arange(size), splits).astype(dtype))

    world.run(body)


@pytest.mark.parametrize("op", [SUM, AVERAGE])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_reducescatter_with_uneven_rows(world: GpuWorld, dtype: str, op: int) -> None:
    def body(member: GpuMember) -> None:
        for rows in (0, 1, 6, 7, 400):
            parts = [values(r, rows * 5, dtype).reshape(rows, 5) for r in range(member.size)]
            whole = np.sum(parts, axis=0, dtype=np.float64) / (member.size if op == AVERAGE else 1)
            sizes = [rows // member.size + (r < rows % member.size) for r in range(member.size)]
            begin = sum(sizes[: member.rank])
            got = member.reducescatter(parts[member.rank], op)
            assert got.dtype == dtype
            np.testing.assert_allclose(got, whole[begin : begin + sizes[member.rank]], rtol=2e-3)

    world.run(body)


def test_reducescatter_with_factors(world: GpuWorld) -> None:
    def body(member: GpuMember) -> None:
        mine = np.full((member.size * 2 + 1, 3), member.rank + 1, np.float32)
        got = member.reducescatter(mine, SUM, "reducescatter.factors", prescale=0.5, postscale=4.0)
        np.testing.assert_array_equal(got, 2.0 * sum(range(1, member.size + 1)))

    world.run(body)


def test_a_group_of_several_dtypes_completes_together(world: GpuWorld, libraries: StandIns) -> None:
    def body(member: GpuMember) -> None:
        arrays = [np.ones(3, np.float32), np.ones(40_000, np.int64), np.ones(2, np.float32), np.ones(5, np.float16)]
        for kind in (ALLREDUCE, REDUCESCATTER):
            into = list(arrays) if kind == ALLREDUCE else [None] * 4
            for array in member.wait(member.submit(kind, f"grouped.{kind}", arrays, into, reduce_op=SUM)):
                np.testing.assert_array_equal(array, np.full_like(array, member.size))
            arrays = [np.ones(array.shape, array.dtype) for array in arrays]

    world.run(body)


def test_a_batch_is_one_group_call(world: GpuWorld, libraries: StandIns) -> None:
    """Of NCCL; without it there is none."""

    def warm_up(member: GpuMember) -> None:
        member.barrier()

    def body(member: GpuMember) -> None:
        arrays = [np.full(10 + i, i + member.rank, np.float32) for i in range(161)]
        handle = member.submit(ALLREDUCE, "grouped.161", arrays, list(arrays), reduce_op=SUM)
        for i, got in enumerate(member.wait(handle)):
            np.testing.assert_array_equal(got, sum(i + rank for rank in range(member.size)))

    world.run(warm_up)
    before = libraries.count("groups")
    world.run(body)
    assert libraries.count("groups") == before + (world.size if world.uses_nccl else 0)


def test_submission_order_does_not_matter(world: GpuWorld) -> None:
    def body(member: GpuMember) -> None:
        for step in range(3):
            order = np.random.default_rng(step * 10 + member.rank).permutation(60)
            arrays = [np.full(10 + i * 37, i + member.rank, np.float32) for i in range(60)]
            handles = {int(i): member.allreduce_async(arrays[i], f"allreduce.t{i}") for i in order}
            for i in reversed(range(60)):
                np.testing.assert_array_equal(member.wait(handles[i]), sum(i + r for r in range(member.size)))

    world.run(body)


def test_tensors_of_both_kinds_side_by_side(world: GpuWorld) -> None:
    """Of the same dtype and size and ready together: they are not fused."""

    def body(member: GpuMember) -> None:
        for step in range(5):
            host = [np.full(50, member.rank + step, np.float32) for _ in range(4)]
            device = [np.full(50, member.rank + step, np.float32) for _ in range(4)]
            handles = [member.allreduce_async(array, f"allreduce.gpu{i}") for i, array in enumerate(device)]
            others = []
            for i, array in enumerate(host):
                tensor = (array.ctypes.data, array.ctypes.data, 7, array.shape)
                others.append(member.engine.submit(ALLREDUCE_SUM, f"allreduce.cpu{i}", [tensor], array))
            expected = sum(rank + step for rank in range(member.size))
            for handle, array in zip(others, host, strict=True):
                handle.result()
                np.testing.assert_array_equal(array, expected)
            for handle in handles:
                np.testing.assert_array_equal(member.wait(handle), expected)

    world.run(body)


def test_the_engines_streams_come_first(libraries: StandIns) -> None:
    streams, urgent = libraries.count("streams"), libraries.count("urgent_streams")
    with GpuWorld(libraries, 2) as world:
        world.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.x"))
        made = libraries.count("streams") - streams  # the framework of this test has the default one only
        assert made > 0
        assert libraries.count("urgent_streams") - urgent == made


def test_a_batch_waits_once_for_each_stream_of_the_framework(libraries: StandIns) -> None:
    """Not once for each of its gradients."""
    with GpuWorld(libraries, 2, gpu_pack_threshold_bytes=0) as world:

        def body(member: GpuMember) -> None:
            handles = [member.allreduce_async(np.ones(9, np.float32), f"allreduce.{i}") for i in range(100)]
            for handle in handles:
                np.testing.assert_array_equal(member.wait(handle), 2.0)

        for _ in range(2):  # the first time ids are learnt, which makes batches of all sizes
            waits, batches = libraries.count("waits"), [engine.counters()["batches"] for engine in world.engines]
            world.run(body)
        ran = sum(engine.counters()["batches"] - before for engine, before in zip(world.engines, batches, strict=True))
        handed_over = 2 * 100  # each result once, at most
        assert libraries.count("waits") - waits <= ran + handed_over


def test_process_sets_have_communicators_of_their_own(libraries: StandIns) -> None:
    before = libraries.count("communicators")
    with GpuWorld(libraries, 3) as world:
        pair = world.add_set(1, 0, 2)

        def body(member: GpuMember) -> None:
            if member.rank != 1:
                got = member.allreduce(np.full(9, member.rank, np.float32), "allreduce.pair", process_set=pair)
                np.testing.assert_array_equal(got, 2.0)
                got = member.broadcast(np.full(9, member.rank, np.float32), 2, "broadcast.pair", process_set=pair)
                np.testing.assert_array_equal(got, 2.0)
            np.testing.assert_array_equal(member.allreduce(np.ones(9, np.float32), "allreduce.all"), 3.0)

        world.run(body)
        assert libraries.count("communicators") == before + 2 + 3
        world.remove_set(pair)
        assert libraries.count("communicators") == before + 3
