"""What a script passes in place of an optimizer or of names, and what it should pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from horovod.common.gradients import Taken, refuse

_OPTIMIZER: Final = Taken(
    "an optimizer of torch.optim",
    "torch.optim.SGD(model.parameters(), lr=...)",
    (torch.optim.Optimizer,),
    "(model.parameters(), lr=...)",
)


def check_is_optimizer(optimizer: Any, function: str) -> None:
    """TypeError when it is none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refuse(optimizer, function, _OPTIMIZER)


def unnamed_parameters(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The sentence on parameters of the optimizer that `named` has no names for; "" where it has all."""
    known = {id(parameter) for _, parameter in named}
    unnamed = [
        f"parameter {index} of group {number}, of shape {_shape(parameter)}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]
    if not unnamed:
        return ""
    more = f" and {len(unnamed) - 3} more" if len(unnamed) > 3 else ""
    sentence = f"named_parameters has no names for {'; '.join(unnamed[:3])}{more}."
    if not named:
        return (
            f"{sentence} It is empty: model.named_parameters() is a generator, which gives its pairs once, so it was "
            "used up before if it was kept in a variable. Call model.named_parameters() anew, or keep "
            "list(model.named_parameters())."
        )
    return f"{sentence} Pass the named_parameters() of the model, or of all models, whose parameters the optimizer has."


def _shape(parameter: torch.Tensor) -> str:
    return "unknown" if torch.nn.parameter.is_lazy(parameter) else str(list(parameter.shape))
