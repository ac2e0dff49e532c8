"""What scripts pass in place of an optimizer, a model's state or names: errors that say what to pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from error_codes import ends_with

import horovod.torch as hvd
from horovod.base.errors import TrainingCode


@pytest.fixture(autouse=True)
def _alone() -> Any:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        (torch.nn.Linear(2, 1), ["Linear", "model"]),
        (torch.optim.SGD, ["class SGD", "SGD(model.parameters()"]),
        (None, ["None"]),
        ([], ["list"]),
        (torch.nn.Linear, ["class", "Linear"]),
    ],
)
@pytest.mark.parametrize("function", ["DistributedOptimizer", "broadcast_optimizer_state"])
def test_no_optimizer(wrong: Any, facts: list[str], function: str) -> None:
    arguments = [wrong] if function == "DistributedOptimizer" else [wrong, 0]
    with pytest.raises(TypeError, match=ends_with(TrainingCode.INVALID_ARGUMENT, function, *facts)):
        getattr(hvd, function)(*arguments)


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 1), torch.nn.Sequential(torch.nn.Linear(2, 1))])
def test_a_model_in_place_of_its_state(model: Any) -> None:
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, type(model).__name__, "state_dict")):
        hvd.broadcast_parameters(model, 0)


def test_parameters_without_names() -> None:
    model = torch.nn.Linear(3, 2)
    other = torch.nn.Linear(5, 4)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}], lr=0.1)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_NAMES, "parameter 0 of group 1", "[4, 5]")):
        hvd.DistributedOptimizer(optimizer, model.named_parameters())


def test_names_that_were_used_up() -> None:
    model = torch.nn.Linear(3, 2)
    names = model.named_parameters()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), names)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_NAMES, "group 0", "[2, 3]", "used up")):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), names)
