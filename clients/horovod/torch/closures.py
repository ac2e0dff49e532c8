"""Losses that a closure returns to an optimizer which decides by them.

LBFGS looks at the loss to end its line search and its iterations. With losses of their own data the ranks would decide
differently, although their gradients are the same: their weights would part, and one would call the closure, and with
it the reductions, more often than another. So it gets the loss of which the reduced gradients are the slope.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod.common.basics import Average, Sum
from horovod.torch.ops import allreduce
from horovod.torch.wrapping import Arguments


def decides_by_loss(optimizer: torch.optim.Optimizer) -> bool:
    """Of torch.optim only LBFGS does; other optimizers take the loss to return it."""
    return isinstance(optimizer, torch.optim.LBFGS)


def loss_of_all(loss: Any, arguments: Arguments, first: str) -> Any:
    """The average (or sum) of the ranks' losses, a number or a tensor as `loss` is. The same, where all are equal.

    first: the name of one of the parameters, by which the ranks match it.
    """
    if not isinstance(loss, (int, float, torch.Tensor)) or (isinstance(loss, torch.Tensor) and loss.numel() != 1):
        return loss  # the optimizer refuses it
    value = loss.detach() if isinstance(loss, torch.Tensor) else loss
    own = torch.tensor([float(value)], dtype=torch.float64)
    op = Average if arguments.op == Average else Sum
    together = float(allreduce(own, name=f"{first}.loss", op=op, process_set=arguments.process_set))
    return torch.full_like(loss, together, requires_grad=False) if isinstance(loss, torch.Tensor) else together
