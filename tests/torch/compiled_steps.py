"""Training steps that torch.compile has, whole or in part, and the same steps without it, for tests on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import World

BATCHES = [6, 6, 3, 7]  # rows; what was compiled for the first two is compiled again for any number


def train(
    compiled: str, backend: str, kind: str, traced_backward: bool, marked: bool, clip: bool, **options: Any
) -> Any:
    """This rank's weights in the end.

    compiled: "no", "whole" (the step with zero_grad, forward, backward and step), "forward and backward" or
    "optimizer". kind: the class of torch.optim. traced_backward: by compiled autograd. marked: the batch's size is.
    """
    import torch
    from torch import nn

    import horovod.torch as hvd

    torch._dynamo.reset()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = hvd.DistributedOptimizer(
        getattr(torch.optim, kind)(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **options
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrap: Any = (lambda function: function) if compiled == "no" else torch.compile(backend=backend)
    take_step = wrap(optimizer.step) if compiled == "optimizer" else optimizer.step

    def compute(x: Any) -> Any:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    if compiled == "forward and backward":
        compute = wrap(compute)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = compute(x)
        if clip:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with optimizer.skip_synchronize():
                take_step()
        else:
            take_step()
        return loss

    if compiled == "whole":
        step = wrap(step)
    generator = torch.Generator().manual_seed(hvd.rank())
    torch._dynamo.config.compiled_autograd = traced_backward and compiled != "no"
    try:
        for rows in BATCHES:
            x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
            if marked:
                torch._dynamo.mark_dynamic(x, 0)
            step(x)
    finally:
        torch._dynamo.config.compiled_autograd = False
        torch._dynamo.reset()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def check(
    world: World,
    compiled: str,
    backend: str,
    kind: str = "SGD",
    traced_backward: bool = False,
    marked: bool = False,
    clip: bool = False,
    **options: Any,
) -> None:
    """Compiled steps train as plain ones do. options: of hvd.DistributedOptimizer."""
    arguments = (backend, kind, traced_backward, marked, clip)
    expected = world.run(train, "no", *arguments, **options)
    found = world.run(train, compiled, *arguments, **options)
    assert found[0] == found[1]
    for weights, wanted in zip(found[0], expected[0], strict=True):
        assert weights == pytest.approx(wanted, rel=1e-9, abs=1e-11)
