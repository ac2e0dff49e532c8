"""A forgotten DistributedSampler is noticed in the first steps, and nothing else is taken for one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from event_words import SAME_GRADIENTS
from optimizer_model import distributed_sgd, linear, rows
from worlds import World


def _warnings(data: str, steps: int = 5, **options: Any) -> list[str]:
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            mine = (
                rows() if data == "own" or (data == "own at last" and step == 2) else torch.ones(4, 3).double() + step
            )
            (model(mine) * (0 if data == "zeros" else 1)).sum().backward()
            optimizer.step()
    return [f"{one.filename}: {one.message}" for one in caught if hvd.rank() == 0 or "same" in str(one.message)]


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"backward_passes_per_step": 1}], ids=["plain", "groups", "1"])
def test_the_same_data_on_all_ranks_is_told_once_on_rank_0(pair: World, options: dict[str, int]) -> None:
    on_0, on_1 = pair.run(_warnings, "same", **options)
    assert len(on_0) == 1
    assert f"In the first 3 steps {SAME_GRADIENTS}" in on_0[0]
    assert "DistributedSampler" in on_0[0]
    assert on_0[0].startswith(__file__), "the warning must point to the script"
    assert on_1 == []


@pytest.mark.parametrize("data", ["own", "own at last", "zeros"])
def test_different_data_is_not(pair: World, data: str) -> None:
    assert pair.run(_warnings, data) == [[], []]


def test_two_steps_are_not_enough(pair: World) -> None:
    assert pair.run(_warnings, "same", steps=2) == [[], []]


def test_a_sum_can_not_be_compared(pair: World) -> None:
    import horovod.torch as hvd

    assert pair.run(_warnings, "same", op=hvd.Sum) == [[], []]


def _alone_after_others() -> bool:
    import torch

    from horovod.torch.misuse import SameGradients

    same, parameter = SameGradients(), torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    for _ in range(3):
        same.before(parameter, parameter.grad)
        same.after()
    return same.over


def test_a_rank_that_is_left_alone_has_nothing_to_compare() -> None:
    with World(1, "shm") as world:
        assert world.run(_alone_after_others) == [False]
