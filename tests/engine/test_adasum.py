"""Adasum against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import tiers
from adasum_reference import adasum, gradient
from error_codes import ends_with
from world import ADASUM, ALLREDUCE, TRANSPORTS, EngineWorld, Member

from horovod.base.errors import OperationCode

COUNTS = (1, 2, 5, 1000, 200_003)


@pytest.mark.longer
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", tiers.pick([2, 3], [4, 5]))
def test_against_the_definition(size: int, transport: str) -> None:
    def body(member: Member) -> list[bytes]:
        bits = []
        for count in COUNTS:
            for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5), ("float16", 2e-2)):
                expected = adasum([gradient(rank, count).astype(dtype).astype("float64") for rank in range(size)])
                got = member.allreduce(gradient(member.rank, count).astype(dtype), f"allreduce.{count}{dtype}", ADASUM)
                np.testing.assert_allclose(got.astype("float64"), expected, rtol=tolerance, atol=tolerance)
                bits.append(got.tobytes())
        return bits

    with EngineWorld(size, transport, staging_buffer_bytes=65536) as world:
        first, *others = world.run(body)
        assert all(bits == first for bits in others)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_of_a_group_have_their_own_coefficients(transport: str) -> None:
    def body(member: Member) -> None:
        arrays = [gradient(member.rank, count) for count in (3, 4000)]
        handle = member.submit(ALLREDUCE, "grouped_allreduce.a", arrays, list(arrays), reduce_op=ADASUM)
        for got, count in zip(member.wait(handle), (3, 4000), strict=True):
            expected = adasum([gradient(rank, count) for rank in range(member.size)])
            np.testing.assert_allclose(got, expected, rtol=1e-12)

    with EngineWorld(3, transport) as world:
        world.run(body)


def test_bits_depend_on_no_transport_and_no_size_of_buffers() -> None:
    """Dot products are summed in the same order, whatever pieces the elements come in."""
    counts = (1, 12_345, 70_001)

    def similar(rank: int, count: int, dtype: str) -> np.ndarray:
        """Gradients whose coefficients are near 1/2: the last bits of dot products reach them."""
        return (gradient(rank, count) + 3).astype(dtype)

    def body(member: Member) -> list[bytes]:
        bits = []
        for dtype in ("float16", "float32", "float64"):
            apart = [similar(member.rank, count, dtype) for count in counts]
            before = [array.tobytes() for array in apart]
            outputs: list[np.ndarray | None] = [np.full_like(array, 7) for array in apart]
            handle = member.submit(ALLREDUCE, f"grouped_allreduce.{dtype}", apart, outputs, reduce_op=ADASUM)
            bits += [result.tobytes() for result in member.wait(handle)]
            assert [array.tobytes() for array in apart] == before
            alone = similar(member.rank, counts[-1], dtype)
            bits.append(member.allreduce(alone, f"allreduce.{dtype}", ADASUM, prescale=0.5, postscale=3.0).tobytes())
        return bits

    def bits_of(transport: str, **options: int) -> list[bytes]:
        with EngineWorld(3, transport, **options) as world:
            first, *others = world.run(body)
            assert all(bits == first for bits in others)
            return first

    expected = bits_of("tcp")
    assert bits_of("hosts") == expected
    for size, count in ((4096, 2), (12288, 3), (40960, 4), (1 << 20, 2)):
        assert bits_of("in_process", staging_buffer_bytes=size, staging_buffer_count=count) == expected


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
    with (
        EngineWorld(2, "in_process") as world,
        pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "int32")),
    ):
        world.members[0].allreduce(np.ones(2, np.int32), op=ADASUM)
