"""Tensors of eight-bit floats: every operation moves them, and the host reduces them with torch's own rounding."""

from __future__ import annotations

from typing import Any

import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode

pytestmark = pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])


def same(got: Any, expected: Any) -> bool:
    """Equal values, or both are no numbers."""
    got, expected = got.float(), expected.float()
    return bool(((got == expected) | (got.isnan() & expected.isnan())).all())


def reduce_every_pair(name: str) -> None:
    import torch

    import horovod.torch as hvd

    dtype = getattr(torch, name)
    every = torch.arange(256, dtype=torch.uint8)
    pair = [every.repeat(256).view(dtype), every.repeat_interleave(256).view(dtype)]
    mine, (a, b) = pair[hvd.rank()], (one.float() for one in pair)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        """What is too large becomes the largest number, or infinity; of e4m3fn older versions of torch make NaN."""
        return (values.clamp(-448, 448) if name == "float8_e4m3fn" else values).to(dtype)

    assert same(hvd.allreduce(mine, op=hvd.Sum), rounded(a + b))
    assert same(hvd.allreduce(mine, op=hvd.Average), rounded((a + b) / 2))
    assert same(hvd.allreduce(mine, op=hvd.Product), rounded(a * b))
    assert same(hvd.allreduce(mine, op=hvd.Min), rounded(torch.minimum(a, b)))
    assert same(hvd.allreduce(mine, op=hvd.Max), rounded(torch.maximum(a, b)))
    assert same(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.3), rounded((a + b) * torch.tensor(0.3)))
    half = slice(0, 1 << 15) if hvd.rank() == 0 else slice(1 << 15, 1 << 16)
    assert same(hvd.reducescatter(mine, op=hvd.Sum), rounded((a + b)[half]))


def move(name: str) -> None:
    import torch

    import horovod.torch as hvd

    dtype = getattr(torch, name)
    parts = [torch.arange(n, n + 40, dtype=torch.uint8).view(dtype) for n in (0, 100)]
    mine = parts[hvd.rank()]

    def check(got: torch.Tensor, *expected: torch.Tensor) -> None:
        assert got.dtype == dtype
        assert got.view(torch.uint8).tolist() == torch.cat([one.view(torch.uint8) for one in expected]).tolist()

    check(hvd.allgather(mine[: 10 + hvd.rank()]), parts[0][:10], parts[1][:11])
    check(hvd.broadcast(mine, 1), parts[1])
    check(hvd.alltoall(mine), *(part[20 * hvd.rank() :][:20] for part in parts))
    received, splits = hvd.alltoall(mine, splits=torch.tensor([1, 2], dtype=torch.int32))
    assert splits.tolist() == [1 + hvd.rank()] * 2
    check(received, *(part[hvd.rank() : 1 + 2 * hvd.rank()] for part in parts))


def refuse_adasum(name: str) -> None:
    import torch

    import horovod.torch as hvd

    with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, name)):
        hvd.allreduce(torch.zeros(4).to(getattr(torch, name)), op=hvd.Adasum)


@pytest.mark.parametrize("function", [reduce_every_pair, move, refuse_adasum])
def test_two_ranks(pair: World, function: Any, dtype: str) -> None:
    pair.run(function, dtype)
