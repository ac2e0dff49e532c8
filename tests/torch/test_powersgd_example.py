"""PowerSGD of examples/torch_powersgd.py: its properties, step by step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def powersgd() -> ModuleType:
    """The example as a module, here or on a rank."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import torch_powersgd

        return torch_powersgd
    finally:
        sys.path.remove(str(EXAMPLES))


def _lockstep(compressors: list[Any], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """One step of all ranks in this process: what they yield is averaged."""
    generators = [
        compressor.reduce("w", gradient.clone()) for compressor, gradient in zip(compressors, gradients, strict=True)
    ]
    results: list[torch.Tensor] = []
    while len(results) < len(generators):
        yielded = []
        for generator in generators:
            try:
                yielded.append(next(generator))
            except StopIteration as end:
                results.append(end.value)
        mean = sum(yielded) / len(generators) if yielded else None
        for tensor in yielded:
            tensor.copy_(mean)
    return results


def test_powersgd_is_exact_where_the_rank_suffices() -> None:
    torch.manual_seed(0)
    ranks = [powersgd().PowerSGD(3) for _ in range(2)]
    for _ in range(2):
        gradients = [torch.randn(20, 1).double() @ torch.randn(1, 30).double() for _ in ranks]
        for result in _lockstep(ranks, gradients):
            torch.testing.assert_close(result, sum(gradients) / 2)


def test_powersgd_loses_nothing_over_time() -> None:
    """What has been applied plus what is remembered is what was computed (error feedback), averaged over the ranks."""
    torch.manual_seed(0)
    ranks = [powersgd().PowerSGD(2) for _ in range(3)]
    computed, applied = torch.zeros(8, 4, 3, 3).double(), torch.zeros(8, 4, 3, 3).double()
    for step in range(5):
        gradients = [torch.randn(8, 4, 3, 3).double() * (step != 2) for _ in ranks]  # the third step has no gradient
        results = _lockstep(ranks, gradients)
        assert all(torch.equal(result, results[0]) for result in results)
        computed += sum(gradients) / 3
        applied += results[0]
        assert float((results[0] - sum(gradients) / 3).norm()) > 0.1
    remembered = sum(compressor.errors["w"] for compressor in ranks) / 3
    torch.testing.assert_close(applied + remembered.view_as(applied), computed)


def test_powersgd_finds_the_direction_that_matters_when_it_starts_where_it_was() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(30, 30).double() + 30 * torch.randn(30, 1).double() @ torch.randn(1, 30).double()
    best = gradient - torch.linalg.svd(gradient).U[:, :1] @ (torch.linalg.svd(gradient).U[:, :1].T @ gradient)
    compressor = powersgd().PowerSGD(1)
    for _ in range(5):
        compressor.errors.pop("w", None)
        compressor.errors["w"] = torch.zeros(30, 30).double()
        (result,) = _lockstep([compressor], [gradient])
    assert float((gradient - result).norm()) == pytest.approx(float(best.norm()), rel=1e-6)
