"""Averages of integers are those of whole numbers of any size, truncated toward zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matrix_worlds import matrix
from op_cases import Calls
from worlds import Keeper, World

import horovod.torch as hvd

__all__ = ["matrix"]

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def _inputs(dtype: str, size: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Whole numbers of the whole range; at the beginning all ranks have the limits, or all but one."""
    limits = np.iinfo(dtype)
    given = []
    for rank in range(size):
        random = np.random.default_rng([rank, *shape])
        x = random.integers(limits.min, limits.max, size=shape, dtype=dtype, endpoint=True)
        flat = x.reshape(-1)
        edges = [limits.max, limits.min, limits.max if rank else limits.min, limits.min + (rank == 0), 100, rank == 0]
        flat[: len(edges)] = np.array(edges, dtype=object)[: len(flat)].astype(dtype)
        given.append(x)
    return given


def _truncated(total: Any, size: int) -> Any:
    return total // size if total >= 0 else -(-total // size)


def _average(given: list[np.ndarray]) -> np.ndarray:
    total = sum(x.astype(object) for x in given)
    return np.array([_truncated(n, len(given)) for n in total.reshape(-1)], object).reshape(total.shape)


def _assert_exact(ops: Any, shape: tuple[int, ...]) -> None:
    rank, size = ops.rank(), ops.size()
    for dtype in DTYPES:
        given = _inputs(dtype, size, shape)
        expected = _average(given).astype(dtype)
        own = torch.from_numpy(given[rank])
        mine = np.array_split(expected, size)[rank]
        odd = torch.ones(3)  # another dtype in the group
        in_place = [own.clone() for _ in range(3)]
        ops.allreduce_(in_place[0], name=dtype)
        ops.synchronize(ops.allreduce_async_(in_place[1], name=dtype))
        ops.grouped_allreduce_([odd, in_place[2], own.clone()], name=dtype)
        for what, found, wanted in (
            ("allreduce", ops.allreduce(own, name=dtype), expected),
            ("async", ops.synchronize(ops.allreduce_async(own, name=dtype)), expected),
            ("grouped", ops.grouped_allreduce([own, odd, own], name=dtype)[2], expected),
            *(("in place", found, expected) for found in in_place),
            ("reducescatter", ops.reducescatter(own, name=dtype), mine),
            ("grouped reducescatter", ops.grouped_reducescatter([own, odd, own], name=dtype)[2], mine),
        ):
            assert found.numpy().dtype == wanted.dtype
            np.testing.assert_array_equal(found.numpy(), wanted, err_msg=f"{what} of {dtype} {shape}")


def _everywhere() -> None:
    _assert_exact(Calls(hvd.global_process_set), (5, 3))
    _assert_exact(Calls(hvd.global_process_set), (40_009,))


def test_are_exact(world: World) -> None:
    world.run(_everywhere)


@pytest.mark.parametrize("matrix", ["3-gloo", "4-sparse"], indirect=True)
def test_are_exact_elsewhere(matrix: Keeper) -> None:
    matrix.get().run(_everywhere)


def _windows() -> None:
    """More elements than are widened at a time."""
    for dtype in (torch.int8, torch.int64):
        largest = torch.iinfo(dtype).max
        found = hvd.allreduce(torch.full(((1 << 21) + 3,), largest - hvd.rank(), dtype=dtype))
        assert found.unique().tolist() == [largest - 1]  # of size 2: half a unit less is truncated


def test_of_many_elements(pair: World) -> None:
    pair.run(_windows)


def _factors() -> None:
    rank, size = hvd.rank(), hvd.size()
    # Each rank truncates what it brings; the sum is divided after that.
    found = hvd.allreduce(torch.tensor([3, 5], dtype=torch.int8), op=hvd.Sum, prescale_factor=0.5)
    assert found.tolist() == [size, 2 * size]
    assert hvd.allreduce(torch.tensor([3, 5, -3]), prescale_factor=0.5).tolist() == [1, 2, -1]
    assert hvd.allreduce(torch.tensor([100], dtype=torch.int8), postscale_factor=0.5).tolist() == [50]
    assert hvd.allreduce(torch.tensor([100], dtype=torch.int8), postscale_factor=3.0).tolist() == [127]
    assert hvd.allreduce(torch.tensor([2**60]), postscale_factor=0.5).tolist() == [2**59]
    assert hvd.allreduce(torch.tensor([-(2**63)]), postscale_factor=0.5).tolist() == [-(2**62)]
    # Of as many elements as are scaled at a time, and more.
    many = torch.arange(1025, dtype=torch.int16)
    assert torch.equal(hvd.allreduce(many, prescale_factor=2.0), 2 * many)
    assert hvd.allreduce(torch.tensor([int(rank == 0), -int(rank == 0)])).tolist() == [0, 0]
    assert hvd.allreduce(torch.tensor([2**53 + 1])).tolist() == [2**53 + 1]
    assert hvd.allreduce(torch.zeros(0, 3, dtype=torch.int16)).shape == (0, 3)
    # Sums wrap around as before.
    wrapped = hvd.allreduce(torch.tensor([100], dtype=torch.int8), op=hvd.Sum).tolist()
    assert wrapped == [(100 * size + 128) % 256 - 128]


def test_factors_and_rounding(world: World) -> None:
    world.run(_factors)


def _joined() -> None:
    if hvd.rank() == 0:
        found = hvd.allreduce(torch.tensor([100, 7], dtype=torch.int8), name="counts")
        assert found.tolist() == [50, 3]
        assert hvd.allreduce(torch.tensor([2**62 + 1]), name="large").tolist() == [2**61]
    hvd.join()


def test_with_ranks_that_have_joined(pair: World) -> None:
    pair.run(_joined)
