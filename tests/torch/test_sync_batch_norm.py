"""hvd.SyncBatchNorm equals torch's batch normalization of the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import TrainingCode

CASES: dict[str, dict[str, Any]] = {
    "2d": {"dims": (3,)},
    "3d": {"dims": (3, 7)},
    "4d": {"dims": (3, 5, 4)},
    "no affine": {"dims": (3, 5, 4), "affine": False},
    "plain average": {"dims": (3,), "momentum": None},
    "no statistics": {"dims": (3,), "track_running_stats": False},
}


def _equals_the_joined_batch(dims: tuple[int, ...], **options: Any) -> None:
    import torch

    import horovod.torch as hvd

    reference = torch.nn.modules.batchnorm._BatchNorm
    torch.manual_seed(7)
    layer = hvd.SyncBatchNorm(dims[0], **options).double()
    plain = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}[len(dims)](dims[0], **options)
    plain = plain.double()
    assert isinstance(layer, reference)
    if layer.affine:
        for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            mine.data.normal_()
            theirs.data.copy_(mine.data)
    sizes = [2 * rank for rank in range(hvd.size() + 1)][: hvd.size()]  # rank 0 has none
    starts = [sum(sizes[:rank]) for rank in range(hvd.size())]
    mine = slice(starts[hvd.rank()], starts[hvd.rank()] + sizes[hvd.rank()])
    for _ in range(3):
        joined = (torch.randn(sum(sizes), *dims, dtype=torch.float64) * 3 + 5).requires_grad_()
        part = joined.detach()[mine].clone().requires_grad_()
        factors = torch.randn_like(joined)
        expected, found = plain(joined), layer(part)
        assert torch.allclose(found, expected[mine], atol=1e-10)
        plain.zero_grad()
        layer.zero_grad()
        (expected * factors).sum().backward()
        (found * factors[mine]).sum().backward()
        assert torch.allclose(part.grad, joined.grad[mine], atol=1e-10)
        for (name, ours), theirs in zip(layer.named_parameters(), plain.parameters(), strict=True):
            total = hvd.allreduce(ours.grad, op=hvd.Sum, name=f"gradient.{name}")
            assert torch.allclose(total, theirs.grad, atol=1e-10)
    for (name, ours), theirs in zip(layer.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10), name
    layer.eval()
    plain.eval()
    assert torch.allclose(layer(part), plain(joined)[mine], atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_joined_batch(world: World, case: str) -> None:
    world.run(_equals_the_joined_batch, **CASES[case])


def _half() -> None:
    import torch

    import horovod.torch as hvd

    layer = hvd.SyncBatchNorm(4).bfloat16()
    batch = torch.randn(8, 4).bfloat16().requires_grad_()
    output = layer(batch)
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    assert batch.grad is not None
    assert batch.grad.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.bfloat16


def test_low_precision(pair: World) -> None:
    pair.run(_half)


def _refuses() -> None:
    import torch

    import horovod.torch as hvd

    layer = hvd.SyncBatchNorm(4)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_SHAPE, "2D", "1D")):
        layer(torch.ones(4))
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_SHAPE, "4 channels", "got 3")):
        layer(torch.ones(2, 3))
    with pytest.raises(
        ValueError, match=ends_with(TrainingCode.INVALID_SHAPE, "1 value", "got 1", f"[{1 - hvd.rank()}, 4]")
    ):
        layer(torch.ones(1 if hvd.rank() == 0 else 0, 4))


def test_what_it_refuses(pair: World) -> None:
    pair.run(_refuses)


def test_alone() -> None:
    import torch

    import horovod.torch as hvd

    hvd.init()
    try:
        layer, plain = hvd.SyncBatchNorm(3), torch.nn.BatchNorm2d(3)
        for _ in range(2):
            batch = torch.randn(2, 3, 4, 4)
            assert torch.equal(layer(batch), plain(batch))
        for ours, theirs in zip(layer.buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs)
    finally:
        hvd.shutdown()
