"""Every collective of the engine against NumPy, over every transport: several engines as threads of this process."""

from __future__ import annotations

import numpy as np
import pytest
import tiers
from error_codes import ends_with
from oracle import assert_allreduced, reduced, values
from reductions import combine_ranks
from world import (
    ALLGATHER,
    ALLREDUCE,
    AVERAGE,
    DTYPES,
    EVERY_TRANSPORT,
    MAX,
    MIN,
    PRODUCT,
    SPARSE,
    SUM,
    EngineWorld,
    Member,
)

from horovod import _core
from horovod.base.errors import OperationCode

NUMPY_DTYPES = [name for name in DTYPES if name != "bfloat16"]
SIZES = (0, 1, 7, 1000, 70_001)
WORLDS = [(size, transport) for size in (2, 3, 4) for transport in EVERY_TRANSPORT] + [(7, one) for one in SPARSE]
# Every transport and every size, each with all operations.
SHORT_WORLDS = [
    (2, "in_process"),
    (2, "shm"),
    (4, "tcp"),
    (3, "hosts"),
    (3, "gloo"),
    (7, "sparse"),
    (4, "sparse_hosts"),
]
LONG_WORLDS = [world for world in WORLDS if world not in SHORT_WORLDS]
pytestmark = pytest.mark.longer


def name_of(world: tuple[int, str]) -> str:
    return f"{world[0]}-{world[1]}"


@pytest.fixture(
    scope="module",
    params=tiers.pick(SHORT_WORLDS, LONG_WORLDS),
    ids=name_of,
)
def world(request: pytest.FixtureRequest):
    size, transport = request.param
    with EngineWorld(size, transport, connections=2, staging_buffer_bytes=65536) as made:
        yield made


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_allreduce(world: EngineWorld, dtype: str) -> None:
    def body(member: Member) -> None:
        for op in (AVERAGE, SUM, MIN, MAX, PRODUCT) if dtype != "bool" else (SUM, MIN, MAX, PRODUCT):
            for count in SIZES:
                array = values(member.rank, count, dtype)
                got = member.allreduce(array, op=op)
                assert_allreduced(got, [values(rank, count, dtype) for rank in range(member.size)], op)

    world.run(body)


def test_truth_values_have_no_average(world: EngineWorld) -> None:
    with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "bool")):
        world.members[0].allreduce(np.ones(2, bool), op=AVERAGE)


def test_allreduce_out_of_place_keeps_the_input(world: EngineWorld) -> None:
    def body(member: Member) -> None:
        for count in (3, 200_000):
            array = values(member.rank, count, "float32")
            output = np.empty_like(array)
            before = array.copy()
            member.wait(member.submit(ALLREDUCE, f"allreduce.apart{count}", [array], [output], reduce_op=SUM))
            np.testing.assert_array_equal(array, before)
            np.testing.assert_array_equal(
                output, reduced([values(r, count, "float32") for r in range(member.size)], SUM)
            )

    world.run(body)


def test_prescale_truncates_integers_on_each_rank_before_the_sum(world: EngineWorld) -> None:
    def body(member: Member) -> np.ndarray:
        return member.allreduce(np.array([3, 5], np.int32), op=SUM, prescale=0.5)

    for got in world.run(body):
        np.testing.assert_array_equal(got, np.array([1, 2]) * world.size)


@pytest.mark.parametrize("count", [5, 100_000])
def test_scale_factors(world: EngineWorld, count: int) -> None:
    def body(member: Member) -> np.ndarray:
        return member.allreduce(np.full(count, member.rank + 1.0), op=SUM, prescale=0.5, postscale=4.0)

    expected = 2.0 * sum(range(1, world.size + 1))
    for got in world.run(body):
        np.testing.assert_allclose(got, expected)


def test_integer_average_truncates_toward_zero(world: EngineWorld) -> None:
    def body(member: Member) -> np.ndarray:
        return member.allreduce(np.array([1, -1] if member.rank == 0 else [0, 0], np.int64), op=AVERAGE)

    for got in world.run(body):
        np.testing.assert_array_equal(got, [0, 0])


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float32", "float64"])
def test_allgather_with_uneven_rows(world: EngineWorld, dtype: str) -> None:
    def body(member: Member) -> None:
        for rows in (0, 1, 50, 9000):
            parts = [values(r, (rows + r) * 3, dtype).reshape(-1, 3) for r in range(member.size)]
            np.testing.assert_array_equal(member.allgather(parts[member.rank]), np.concatenate(parts))

    world.run(body)


def test_rows_that_fit_into_a_cell_on_some_ranks_only(world: EngineWorld) -> None:
    """Small rows travel with the arrival if those of all ranks do; the name, and with it the id, stays the same."""

    def body(member: Member) -> None:
        for rows in (3, 2000, 2008, 2020, 2032, 2040, 5000, 7):
            parts = [values(r, rows if r == member.size - 1 else 3, "uint8") for r in range(member.size)]
            got = member.allgather(parts[member.rank], "allgather.cell")
            np.testing.assert_array_equal(got, np.concatenate(parts))
            splits = [0] * (member.size - 1) + [parts[member.rank].size]
            got, received = member.alltoall(parts[member.rank], splits, "alltoall.cell")
            last = member.rank == member.size - 1
            np.testing.assert_array_equal(got, np.concatenate(parts) if last else [])
            assert received == ([part.size for part in parts] if last else [0] * member.size)

    world.run(body)


def test_allgathers_in_flight_together(world: EngineWorld) -> None:
    """Of rows that fit into a cell and of ones that don't, so that some of one batch are told to be too long."""

    def body(member: Member) -> None:
        for _ in range(5):
            parts = [
                [values(r, rows + 7 * r, "float32") for r in range(member.size)] for rows in (600, 0, 9000, 2, 530)
            ]
            handles = [
                member.submit(ALLGATHER, f"allgather.{index}", [part[member.rank]], [None])
                for index, part in enumerate(parts)
            ]
            for part, handle in zip(parts, handles, strict=True):
                np.testing.assert_array_equal(member.wait(handle), np.concatenate(part))

    world.run(body)


@pytest.mark.parametrize(
    "hosts", [[0, 0, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0, 1], [0, 1, 1, 2, 0], [2, 2, 1, 1, 0, 0]], ids=str
)
def test_reductions_over_hosts(hosts: list[int]) -> None:
    """Even and uneven hosts, in order and out of it."""

    def body(member: Member) -> None:
        for count in (3, 9_000, 70_001, 400_000, 2_500_003):  # slices of the last have blocks of several sizes
            parts = [values(rank, count, "float32") for rank in range(member.size)]
            mine = parts[member.rank].copy()
            np.testing.assert_array_equal(member.allreduce(mine), np.sum(parts, axis=0))
            mine = parts[member.rank].copy()
            np.testing.assert_array_equal(member.allreduce(mine, op=MIN), np.min(parts, axis=0))
            expected = np.sum(parts, axis=0)
            first = sum(count // member.size + (r < count % member.size) for r in range(member.rank))
            got = member.reducescatter(parts[member.rank])
            np.testing.assert_array_equal(got, expected[first : first + got.size])

    with EngineWorld(len(hosts), "hosts", hosts=hosts, connections=2) as world:
        world.run(body)


def test_results_larger_than_the_caches(world: EngineWorld) -> None:
    def body(member: Member) -> None:
        rows = (33 << 20) // member.size + 13 * member.rank
        parts = [values(r, (33 << 20) // member.size + 13 * r, "uint8") for r in range(member.size)]
        np.testing.assert_array_equal(member.allgather(parts[member.rank]), np.concatenate(parts))
        keep = rows // member.size
        got, _ = member.alltoall(parts[member.rank], [keep] * (member.size - 1) + [rows - keep * (member.size - 1)])
        first = [part[member.rank * (part.size // member.size) :] for part in parts]
        last = member.rank == member.size - 1
        expected = np.concatenate(
            [part if last else part[: whole.size // member.size] for part, whole in zip(first, parts, strict=True)]
        )
        np.testing.assert_array_equal(got, expected)
        array = parts[0].copy() if member.rank == 0 else np.zeros_like(parts[0])
        np.testing.assert_array_equal(member.broadcast(array, 0), parts[0])

    world.run(body)


def test_reducescatter_around_the_size_of_a_cell(world: EngineWorld) -> None:
    def body(member: Member) -> None:
        for rows in (1, 511, 512, 513, 1025):
            total = np.arange(rows, dtype=np.float32) * sum(range(1, member.size + 1))
            mine = np.arange(rows, dtype=np.float32) * (member.rank + 1)
            got = member.reducescatter(mine, SUM, f"reducescatter.{rows}")
            first = sum(rows // member.size + (r < rows % member.size) for r in range(member.rank))
            np.testing.assert_array_equal(got, total[first : first + got.size])

    world.run(body)


def test_allgather_where_only_one_rank_has_rows(world: EngineWorld) -> None:
    def body(member: Member) -> None:
        mine = np.ones((5 if member.rank == 1 else 0, 2), np.float32)
        assert member.allgather(mine).shape == (5, 2)

    world.run(body)


class _Exchanged:
    """What numpy.from_dlpack asks for."""

    def __init__(self, output: _core.Output) -> None:
        self._output = output

    def __dlpack__(self, **_: object) -> object:
        return self._output.dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_a_result_handed_over_as_dlpack(world: EngineWorld, dtype: str) -> None:
    def body(member: Member) -> None:
        for rows in (0, 1, 100):
            mine = values(member.rank, rows * 6, dtype).reshape(rows, 2, 3)
            handle = member.submit(ALLGATHER, f"dlpack.{rows}.{dtype}", [mine], [None], wait_follows=True)
            [output] = handle.result()
            got = np.from_dlpack(_Exchanged(output))
            want = np.concatenate([values(rank, rows * 6, dtype).reshape(rows, 2, 3) for rank in range(member.size)])
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_array_equal(got, want)
            assert output.nbytes == 0
            output.dlpack()  # of nothing; and nobody takes the capsule

    world.run(body)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float64"])
def test_broadcast_from_every_root(world: EngineWorld, dtype: str) -> None:
    def body(member: Member) -> None:
        for root in range(member.size):
            for count in SIZES:
                array = values(member.rank, count, dtype)
                member.broadcast(array, root)
                np.testing.assert_array_equal(array, values(root, count, dtype))

    world.run(body)


def test_alltoall(world: EngineWorld) -> None:
    size = world.size

    def body(member: Member) -> None:
        even = np.arange(size * 1000) + 10_000 * member.rank
        got, splits = member.alltoall(even)
        np.testing.assert_array_equal(
            got, np.concatenate([np.arange(1000) + 1000 * member.rank + 10_000 * r for r in range(size)])
        )
        assert splits == [1000] * size
        # Rank r sends r + to rows to each `to`; one row more than the sum is dropped.
        mine = [member.rank + to for to in range(size)]
        rows = np.full((sum(mine) + 1, 2), member.rank, np.float32)
        got, splits = member.alltoall(rows, splits=mine)
        assert splits == [r + member.rank for r in range(size)]
        np.testing.assert_array_equal(got[:, 0], np.repeat(np.arange(size), splits))

    world.run(body)


@pytest.mark.parametrize("op", [SUM, AVERAGE])
def test_reducescatter_with_uneven_rows(world: EngineWorld, op: int) -> None:
    def body(member: Member) -> None:
        for rows in (1, 7, 4000):
            parts = [values(r, rows * 5, "float64").reshape(rows, 5) for r in range(member.size)]
            whole = np.sum(parts, axis=0) / (member.size if op == AVERAGE else 1)
            sizes = [rows // member.size + (r < rows % member.size) for r in range(member.size)]
            begin = sum(sizes[: member.rank])
            got = member.reducescatter(parts[member.rank], op)
            np.testing.assert_allclose(got, whole[begin : begin + sizes[member.rank]])

    world.run(body)


def test_a_group_of_several_dtypes_completes_together(world: EngineWorld) -> None:
    def body(member: Member) -> None:
        arrays = [np.ones(3, np.float32), np.ones(40_000, np.int64), np.ones(2, np.float32), np.ones(5, np.float16)]
        handle = member.submit(ALLREDUCE, "grouped_allreduce.mixed", arrays, list(arrays), reduce_op=SUM)
        for array in member.wait(handle):
            np.testing.assert_array_equal(array, np.full_like(array, member.size))

    world.run(body)


def test_scalars_and_barrier(world: EngineWorld) -> None:
    def body(member: Member) -> None:
        assert member.allreduce(np.array(2.5)) == 2.5 * member.size
        member.barrier()
        member.barrier()

    world.run(body)


def test_submission_order_does_not_matter(world: EngineWorld) -> None:
    def body(member: Member) -> None:
        for step in range(5):
            order = np.random.default_rng(step * 10 + member.rank).permutation(60)
            arrays = [np.full(10 + i * 37, i + member.rank, np.float32) for i in range(60)]
            handles = {int(i): member.allreduce_async(arrays[i], f"allreduce.t{i}") for i in order}
            for i in reversed(range(60)):
                np.testing.assert_array_equal(member.wait(handles[i]), sum(i + r for r in range(member.size)))

    world.run(body)


# Gloo's ring adds in an order that depends on the place in the buffer, see test_engine_gloo.py.
@pytest.mark.parametrize("world", [one for one in WORLDS if one[1] != "gloo"], ids=name_of, indirect=True)
def test_bits_do_not_depend_on_fusion_order_or_transport(world: EngineWorld) -> None:
    """The reference is the sum in the order of the ranks, of ranks and hosts, or of a sparse mesh (reductions.py)."""
    counts = [1, 3, 1000, 4099, 33_000]

    def data(rank: int) -> list[np.ndarray]:
        random = np.random.default_rng(rank)
        return [random.standard_normal(count).astype(np.float32) * 10.0 ** random.integers(-3, 4) for count in counts]

    def body(member: Member) -> None:
        everybody = zip(*(data(rank) for rank in range(member.size)), strict=True)
        sparse = world.transport in SPARSE
        expected = [combine_ranks(str(parts[0].dtype), list(parts), world.hosts, sparse) for parts in everybody]
        for attempt in range(3):
            arrays = data(member.rank)
            order = np.random.default_rng(attempt + 7 * member.rank).permutation(len(counts))
            handles = {int(i): member.allreduce_async(arrays[i], f"allreduce.bits{i}") for i in order}
            for i, handle in handles.items():
                assert member.wait(handle).tobytes() == expected[i].tobytes(), f"tensor {i} of attempt {attempt}"

    world.run(body)
