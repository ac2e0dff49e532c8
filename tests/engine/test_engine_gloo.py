"""What is particular to Gloo. That its collectives are right is in test_collectives.py and test_process_sets.py, that
operations end and fail as over every transport in test_life.py."""

from __future__ import annotations

import re

import numpy as np
import pytest
from error_codes import ends_with
from world import ALLREDUCE, AVERAGE, DTYPES, MAX, REDUCESCATTER, SUM, EngineWorld, Member

from horovod import _core
from horovod._core import OpSpec
from horovod.base.errors import EngineCode


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request: pytest.FixtureRequest):
    with EngineWorld(request.param, "gloo", connections=2, fusion_threshold_bytes=0) as made:
        yield made


def noise(rank: int, count: int) -> np.ndarray:
    random = np.random.default_rng([rank, count])
    return (random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)).astype(np.float32)


@pytest.mark.parametrize("count", [3, 1000, 300_001])
def test_every_rank_gets_the_same_bits_every_time(world: EngineWorld, count: int) -> None:
    """Gloo adds in a ring, so an element's order of summation depends on its place; but on nothing else."""

    def body(member: Member) -> list[bytes]:
        return [member.allreduce(noise(member.rank, count)).tobytes() for _ in range(3)]

    results = world.run(body)
    assert len({bits for rank in results for bits in rank}) == 1
    exact = np.sum([noise(rank, count).astype(np.float64) for rank in range(world.size)], axis=0)
    np.testing.assert_allclose(np.frombuffer(results[0][0], np.float32), exact, rtol=1e-4, atol=1e-3)


def test_reducescatter_adds_in_rank_order(world: EngineWorld) -> None:
    rows = 1001

    def body(member: Member) -> bytes:
        return member.reducescatter(noise(member.rank, rows * 3).reshape(rows, 3)).tobytes()

    expected = noise(0, rows * 3)
    for rank in range(1, world.size):
        expected = expected + noise(rank, rows * 3)
    assert b"".join(world.run(body)) == expected.tobytes()


def bfloat16(values: list[float]) -> np.ndarray:
    """Bits of numbers that need no rounding."""
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("op", "expected"), [(SUM, 1.0), (MAX, 3.0), (AVERAGE, 0.5)])
def test_bfloat16(op: int, expected: float) -> None:
    def submit(member: Member, array: np.ndarray) -> None:
        tensor = (array.ctypes.data, array.ctypes.data, DTYPES["bfloat16"], array.shape)
        member.engine.submit(OpSpec(ALLREDUCE, op=op), "allreduce.noname", [tensor]).result()

    def body(member: Member) -> np.ndarray:
        array = bfloat16([3.0 if member.rank == 0 else -2.0] * 5)
        submit(member, array)
        return array

    with EngineWorld(2, "gloo") as pair:
        for got in pair.run(body):
            np.testing.assert_array_equal(got, bfloat16([expected] * 5))


def test_a_fused_batch_and_its_factors(world: EngineWorld) -> None:
    with EngineWorld(world.size, "gloo") as fusing:

        def body(member: Member) -> None:
            for kind in (ALLREDUCE, REDUCESCATTER):
                arrays = [np.full((8 * member.size, i), i + member.rank, np.float64) for i in range(4)]
                outputs = [np.empty_like(a) if kind == ALLREDUCE else None for a in arrays]
                factors = {"reduce_op": SUM, "prescale": 0.5, "postscale": 4.0}
                results = member.wait(member.submit(kind, f"group.of{kind}", arrays, outputs, **factors))
                for i, got in enumerate(results):
                    np.testing.assert_array_equal(got, 2.0 * sum(i + rank for rank in range(member.size)))
                    assert got.shape == ((8 * member.size if kind == ALLREDUCE else 8), i)

        fusing.run(body)
        assert fusing.engines[0].counters()["batches"] == 2


def test_an_abort_ends_a_rank_that_is_inside_of_gloo() -> None:
    """Rank 0 can't finish: rank 1 agreed to the operation and ends the epoch instead of running it."""
    with EngineWorld(2, "gloo") as pair:
        pair.run(lambda m: m.allreduce(np.ones(4, np.float32), "allreduce.known"))
        handles = [m.allreduce_async(np.ones(30_000_000, np.float32), "allreduce.large") for m in pair.members]
        pair.engines[1].abort("rank 1 on host here gave up.")
        for member, handle in zip(pair.members, handles, strict=True):
            try:
                member.wait(handle)  # or it was faster than the abort
            except RuntimeError as error:
                assert "rank 1 on host here gave up" in str(error)  # noqa: PT017
        for member in pair.members:
            with pytest.raises(RuntimeError, match="rank 1 on host here gave up"):
                member.allreduce(np.ones(4, np.float32), "allreduce.known")


def test_the_obstacle_is_a_sentence_that_helps() -> None:
    obstacle = _core.gloo_obstacle()
    assert obstacle == "" or re.search(ends_with(EngineCode.MISSING_LIBRARY, "libgloo-dev"), obstacle)
