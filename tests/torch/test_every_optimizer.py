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


def _line_search(averages: bool, clips: bool, alone: bool) -> tuple[list[float], int]:
    """Rosenbrock-like losses that differ much between ranks, so that own losses would end line searches differently."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(2)
    weight = torch.nn.Parameter(torch.tensor([-1.5, 2.0], dtype=torch.float64))
    optimizer = torch.optim.LBFGS([weight], max_iter=20, line_search_fn="strong_wolfe")
    if not alone:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("weight", weight)])
    calls = 0

    def loss_of(rank: int) -> Any:
        x, y = weight
        return (1 + rank - x).square() + 100 * (rank + 0.1) * (y - x.square()).square()

    def closure() -> Any:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (loss_of(0) + loss_of(1)) / 2 if alone else loss_of(hvd.rank())
        loss.backward()
        if clips:
            optimizer.synchronize()
        return hvd.allreduce(loss.detach(), name="own.average") if averages else loss

    for _ in range(3):
        if clips:
            with optimizer.skip_synchronize():
                loss = optimizer.step(closure)
        else:
            loss = optimizer.step(closure)
    assert isinstance(loss, torch.Tensor)
    return weight.detach().tolist(), calls


@pytest.mark.parametrize(("averages", "clips"), [(False, False), (True, False), (False, True)])
def test_a_line_search_is_that_of_one_process(pair: World, averages: bool, clips: bool) -> None:
    """LBFGS decides by the loss: all ranks see the same one, whether the closure averages it or not."""
    expected, calls = pair.run(_line_search, False, False, True)[0]
    first, second = pair.run(_line_search, averages, clips, False)
    assert first == second
    assert first[1] == calls
    assert first[0] == pytest.approx(expected, rel=1e-6)


def _loss_of_its_own() -> float:
    import torch

    import horovod.torch as hvd

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), named_parameters=[("weight", weight)])

    def closure() -> Any:
        loss = (weight * (1.0 + hvd.rank())).sum()
        loss.backward()
        return loss

    return float(optimizer.step(closure))


def test_optimizers_that_do_not_decide_return_the_ranks_own_loss(pair: World) -> None:
    assert pair.run(_loss_of_its_own) == [1.0, 2.0]
