"""hvd.DistributedOptimizer(op=hvd.Adasum): own steps, combined changes."""

from __future__ import annotations

from typing import Any

import pytest
from error_codes import ends_with
from event_words import DISTRIBUTED_ALREADY
from worlds import World

from horovod.base.errors import TrainingCode


def _combines_own_steps(kind: str, compression: str, **options: Any) -> list[list[float]]:
    """Against the definition: a plain optimizer steps from the common parameters, and the changes are reduced."""
    import torch

    import horovod.torch as hvd

    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()

    ours, plain = model(), model()
    make = getattr(torch.optim, kind)
    optimizer = hvd.DistributedOptimizer(
        make(ours.parameters(), **options),
        named_parameters=ours.named_parameters(),
        op=hvd.Adasum,
        compression=getattr(hvd.Compression, compression),
    )
    assert isinstance(optimizer, make)
    reference = make(plain.parameters(), **options)
    torch.manual_seed(100 + hvd.rank())
    tolerance = 1e-12 if compression == "none" else 1e-3
    for _ in range(3):
        batch = torch.randn(6, 5, dtype=torch.float64)
        for network, stepper in ((ours, optimizer), (plain, reference)):
            stepper.zero_grad()
            for part in batch.chunk(2):  # two backward passes
                network(part).square().sum().backward()
        optimizer.synchronize()
        optimizer.step()
        before = [parameter.detach().clone() for parameter in plain.parameters()]
        reference.step()
        for index, (parameter, start) in enumerate(zip(plain.parameters(), before, strict=True)):
            change = hvd.allreduce(parameter.detach() - start, op=hvd.Adasum, name=f"expected.{index}")
            parameter.data.copy_(start + change)
        for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=tolerance)
    return [parameter.flatten().tolist() for parameter in ours.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {"lr": 0.05, "momentum": 0.9}), ("Adam", {"lr": 0.01})],
    ids=["SGD", "Adam"],
)
def test_combines_own_steps(world: World, kind: str, options: dict[str, Any]) -> None:
    results = world.run(_combines_own_steps, kind, "none", **options)
    assert all(result == results[0] for result in results)


def test_with_compression(pair: World) -> None:
    results = pair.run(_combines_own_steps, "SGD", "fp16", lr=0.05)
    assert results[0] == results[1]


def _what_has_no_meaning() -> None:
    import torch

    import horovod.torch as hvd

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum, groups=2, sparse_as_dense=True, backward_passes_per_step=2
    )
    for _ in range(2):
        weight.sum().backward()
    optimizer.step()
    assert torch.allclose(weight, torch.zeros(3), atol=1e-6)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "gradient_predivide_factor")):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum, gradient_predivide_factor=2.0)


def test_groups_and_sparse_as_dense_have_no_meaning(pair: World) -> None:
    pair.run(_what_has_no_meaning)


def _same_gradients_are_one_step() -> None:
    import torch

    import horovod.torch as hvd

    weight = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, frozen], lr=0.5), op=hvd.Adasum)
    optimizer.add_param_group({"params": [later := torch.nn.Parameter(torch.ones(2))], "lr": 1.0})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 2 * weight.sum() + later.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 8
    assert torch.allclose(weight, torch.zeros(3), atol=1e-6)  # not size() times the step
    assert torch.allclose(later, torch.zeros(2), atol=1e-6)
    assert frozen.tolist() == [1, 1, 1]
    with (
        pytest.raises(AssertionError, match=ends_with(TrainingCode.UNSUPPORTED_OPTIMIZER, "Adasum")),
        optimizer.skip_synchronize(),
    ):
        pass
    with pytest.warns(UserWarning, match=DISTRIBUTED_ALREADY):
        assert hvd.DistributedOptimizer(optimizer) is optimizer


def test_same_gradients_are_one_step(world: World) -> None:
    world.run(_same_gradients_are_one_step)
