"""Adasum against its definition: a binary tree over the ranks, coefficients of each tensor by itself."""

from __future__ import annotations

import numpy as np
import pytest
from world import ADASUM, ALLREDUCE, TRANSPORTS, EngineWorld, Member

COUNTS = (1, 2, 5, 1000, 200_003)


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    ab, aa, bb = float(a @ b), float(a @ a), float(b @ b)
    return (1 - ab / (2 * aa) if aa else 1.0) * a + (1 - ab / (2 * bb) if bb else 1.0) * b


def oracle(vectors: list[np.ndarray]) -> np.ndarray:
    power = 1 << (len(vectors).bit_length() - 1)
    for rank in range(power, len(vectors)):
        vectors[rank - power] = pair(vectors[rank - power], vectors[rank])
    level = vectors[:power]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def gradient(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank * 77 + count).standard_normal(count)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_against_the_definition(size: int, transport: str) -> None:
    def body(member: Member) -> list[bytes]:
        bits = []
        for count in COUNTS:
            for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5), ("float16", 2e-2)):
                expected = oracle([gradient(rank, count).astype(dtype).astype("float64") for rank in range(size)])
                got = member.allreduce(gradient(member.rank, count).astype(dtype), f"allreduce.{count}{dtype}", ADASUM)
                np.testing.assert_allclose(got.astype("float64"), expected, rtol=tolerance, atol=tolerance)
                bits.append(got.tobytes())
        return bits

    with EngineWorld(size, transport, slot_bytes=65536) as world:
        first, *others = world.run(body)
        assert all(bits == first for bits in others)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_of_a_group_have_their_own_coefficients(transport: str) -> None:
    def body(member: Member) -> None:
        arrays = [gradient(member.rank, count) for count in (3, 4000)]
        handle = member.submit(ALLREDUCE, "grouped_allreduce.a", arrays, list(arrays), reduce_op=ADASUM)
        for got, count in zip(member.wait(handle), (3, 4000), strict=True):
            expected = oracle([gradient(rank, count) for rank in range(member.size)])
            np.testing.assert_allclose(got, expected, rtol=1e-12)

    with EngineWorld(3, transport) as world:
        world.run(body)


def test_equal_gradients_average_and_orthogonal_ones_add_up() -> None:
    def body(member: Member) -> None:
        np.testing.assert_allclose(member.allreduce(np.ones(6), op=ADASUM), 1.0)
        axis = np.zeros(4)
        axis[member.rank] = 2.0
        np.testing.assert_allclose(member.allreduce(axis, op=ADASUM), 2.0)
        zeros = np.zeros(3) if member.rank == 0 else np.full(3, 5.0)
        np.testing.assert_allclose(member.allreduce(zeros, op=ADASUM), 5.0)

    with EngineWorld(4, "in_process") as world:
        world.run(body)


def test_integers_are_refused() -> None:
    with EngineWorld(2, "in_process") as world, pytest.raises(ValueError, match="int32"):
        world.members[0].allreduce(np.ones(2, np.int32), op=ADASUM)
