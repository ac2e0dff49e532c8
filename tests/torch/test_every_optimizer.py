"""Every optimizer of torch.optim, wrapped, takes the steps that one process takes on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
from test_objects_and_parameters import OPTIMIZERS
from worlds import World

STEPS = 4
ROWS = 6  # of one rank
OPTIONS: dict[str, dict[str, Any]] = {**OPTIMIZERS, "LBFGS": {"lr": 0.1, "max_iter": 3}}


def _train(name: str, alone: bool) -> list[float]:
    """The weights after some steps on this rank's rows, or alone on those of two ranks."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(1)
    sparse = name == "SparseAdam"
    model: Any = torch.nn.Embedding(6, 4, sparse=sparse) if sparse else torch.nn.Linear(6, 4, bias=name != "Muon")
    model = model.double()
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIONS[name])
    if not alone:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        assert isinstance(optimizer, getattr(torch.optim, name))
    mine = slice(None) if alone else slice(hvd.rank() * ROWS, (hvd.rank() + 1) * ROWS)
    for _ in range(STEPS):
        everything = torch.randint(6, (2 * ROWS,)) if sparse else torch.randn(2 * ROWS, 6, dtype=torch.float64)
        rows = everything[mine]

        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(rows) - 1).square().mean()  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    found: list[float] = model.weight.flatten().tolist()
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_one_process(pair: World, name: str) -> None:
    expected = pair.run(_train, name, True)[0]
    first, second = pair.run(_train, name, False)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-9, abs=1e-9)
