"""HOROVOD_ADASUM_OVERLAP: steps in the backward pass are those of step(), or an error says why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from error_codes import ends_with
from worlds import Keeper, World

from horovod.base.errors import TrainingCode

OVERLAP = {"HOROVOD_ADASUM_OVERLAP": "1"}


@pytest.fixture(scope="module")
def overlapping_keeper() -> Iterator[Keeper]:
    with Keeper(2, "shm", OVERLAP) as keeper:
        yield keeper


@pytest.fixture
def overlapping(overlapping_keeper: Keeper) -> World:
    return overlapping_keeper.get()


def _network() -> Any:
    """Its last layer is used twice, and one parameter never."""
    import torch

    torch.manual_seed(3)
    shared = torch.nn.Linear(4, 4)
    network = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), shared, torch.nn.Tanh(), shared).double()
    network.register_parameter("unused", torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
    return network


def _as_in_step(kind: str, options: dict[str, Any], passes: int, closure: bool) -> list[list[float]]:
    import torch

    import horovod.torch as hvd

    ours, plain = _network(), _network()
    make = getattr(torch.optim, kind)
    optimizer = hvd.DistributedOptimizer(
        make(ours.parameters(), **options),
        named_parameters=ours.named_parameters(),
        op=hvd.Adasum,
        backward_passes_per_step=passes,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    reference = make(plain.parameters(), **options)
    theirs = torch.optim.lr_scheduler.ExponentialLR(reference, 0.5)
    torch.manual_seed(100 + hvd.rank())
    for _ in range(3):
        parts = torch.randn(6, 5, dtype=torch.float64).chunk(passes)

        def compute(network: Any = ours, stepper: Any = optimizer, parts: Any = parts) -> Any:
            stepper.zero_grad()
            for part in parts:
                loss = network(part).square().sum()
                loss.backward()
            return loss

        if closure:
            loss = optimizer.step(compute)
        else:
            loss = compute()
            assert len(optimizer._handles) == 4
            optimizer.step()
        assert not optimizer._handles
        assert torch.equal(loss, compute(plain, reference))
        before = [parameter.detach().clone() for parameter in plain.parameters()]
        reference.step()
        for index, (parameter, start) in enumerate(zip(plain.parameters(), before, strict=True)):
            change = hvd.allreduce(parameter.detach() - start, op=hvd.Adasum, name=f"expected.{index}")
            parameter.data.copy_(start + change)
        scheduler.step()
        theirs.step()
        for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, expected)
    found, expected = optimizer.state_dict(), reference.state_dict()
    assert found["param_groups"][0]["lr"] == expected["param_groups"][0]["lr"]
    for key, state in expected["state"].items():
        assert all(torch.equal(torch.as_tensor(found["state"][key][name]), state[name]) for name in state)
    return [parameter.flatten().tolist() for parameter in ours.parameters()]


STEPS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("passes", "closure"), [(1, False), (2, False), (1, True)])
def test_steps_are_those_of_step(overlapping: World, kind: str, passes: int, closure: bool) -> None:
    results = overlapping.run(_as_in_step, kind, STEPS[kind], passes, closure)
    assert results[0] == results[1]


def test_with_four_ranks() -> None:
    with World(4, "shm", OVERLAP) as world:
        for kind, options in STEPS.items():
            results = world.run(_as_in_step, kind, options, 1, False)
            assert all(result == results[0] for result in results)


def _every_class_steps_one_by_one() -> None:
    """What adasum_overlap.py claims of the classes that it accepts."""
    import torch

    import horovod.torch as hvd
    from horovod.torch.adasum_overlap import _ONE_BY_ONE

    for make in _ONE_BY_ONE:
        pair = []
        for alone in (False, True):
            torch.manual_seed(5)
            parameters = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(2)]
            options = {"betas": (0.8, 0.9)} if make is torch.optim.Adam else {}
            optimizer = make(parameters, lr=0.01, **options)
            if alone:
                named = [(f"{make.__name__}.{index}", parameter) for index, parameter in enumerate(parameters)]
                optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, op=hvd.Adasum)
            for number in range(3):
                optimizer.zero_grad()
                (parameters[0] * (number + 1)).square().sum().backward()
                parameters[1].sin().sum().backward()
                optimizer.step()
            pair.append(parameters)
        for found, expected in zip(*pair, strict=True):
            # The same step on all ranks is one step, but for rounding.
            assert torch.allclose(found, expected, rtol=0, atol=1e-5), make


def test_every_class_steps_one_by_one(overlapping: World) -> None:
    overlapping.run(_every_class_steps_one_by_one)


def _combines_before_backward_ends() -> None:
    import time

    import torch

    import horovod.torch as hvd

    network = _network()
    found = []

    def last_hook(_: torch.Tensor) -> None:  # of the first layer's weight
        handles = optimizer._handles
        found.append(set(handles))
        deadline = time.monotonic() + 30
        while not all(hvd.poll(handle) for handle in handles.values()):  # the other rank is in its backward pass, too
            assert time.monotonic() < deadline

    network[0].weight.register_post_accumulate_grad_hook(last_hook)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1), named_parameters=network.named_parameters(), op=hvd.Adasum
    )
    before = [parameter.detach().clone() for parameter in network.parameters()]
    network(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert len(found) == 1
    assert found[0] >= {network[2].weight, network[2].bias}
    assert all(torch.equal(parameter, start) for parameter, start in zip(network.parameters(), before, strict=True))
    optimizer.step()
    assert not torch.equal(network[2].weight, before[2])


def test_changes_are_combined_before_backward_ends(overlapping: World) -> None:
    overlapping.run(_combines_before_backward_ends)


def _interfere(how: str, network: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
    """A step of a script that does not leave alone what the step was made from."""
    import torch

    scaler.scale(loss).backward()
    if how == "clip":
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.01)
    elif how == "replace":
        network[0].bias.grad = torch.zeros_like(network[0].bias)
    elif how == "model.zero_grad":
        network.zero_grad()
    elif how == "rate":
        optimizer.param_groups[0]["lr"] = 0.2
    elif how == "weight":
        with torch.no_grad():
            network[0].weight.clamp_(-0.1, 0.1)
    elif how == "scaler.unscale_":
        scaler.unscale_(optimizer)
    elif how == "second pass":
        network(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    elif how == "zero_grad":
        optimizer.zero_grad()
    scaler.step(optimizer)


def _interfered(how: str) -> tuple[str, list[list[float]]]:
    """The error's text, and that the ranks agree on parameters all the same."""
    import torch

    import horovod.torch as hvd

    network = _network()
    # Some of these errors leave operations behind, which have their names until the other rank is through as well.
    named = [(f"{how}.{name}", parameter) for name, parameter in network.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1), named_parameters=named, op=hvd.Adasum
    )
    if how == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how.startswith("scaler"))
    loss = network(torch.full((2, 5), 1.0 + hvd.rank(), dtype=torch.float64)).sum()
    with pytest.raises(AssertionError) as error:
        _interfere(how, network, optimizer, scaler, loss)
    return str(error.value), [parameter.flatten().tolist() for parameter in network.parameters()]


INTERFERENCE = {
    "clip": ends_with(TrainingCode.ADASUM_OVERLAP, "gradient", "'clip.0.weight'", "changed"),
    "replace": ends_with(TrainingCode.ADASUM_OVERLAP, "gradient", "'replace.0.bias'", "replaced"),
    "model.zero_grad": ends_with(TrainingCode.ADASUM_OVERLAP, "gradient", "'model.zero_grad.0.weight'", "replaced"),
    "rate": ends_with(TrainingCode.ADASUM_OVERLAP, "'lr'", "group 0"),
    "weight": ends_with(TrainingCode.ADASUM_OVERLAP, "Parameter 'weight.0.weight'"),
    "scaler": ends_with(TrainingCode.ADASUM_OVERLAP, "GradScaler", "step()"),
    "scaler.unscale_": ends_with(TrainingCode.ADASUM_OVERLAP, "GradScaler", "step()"),
    "second pass": ends_with(TrainingCode.TOO_MANY_PASSES, "'second pass.", "backward_passes_per_step"),
    "zero_grad": ends_with(TrainingCode.ADASUM_OVERLAP, "optimizer.zero_grad()", "GradScaler"),
    "hook": ends_with(TrainingCode.ADASUM_OVERLAP, "register_step_pre_hook"),
}


@pytest.mark.parametrize("how", INTERFERENCE)
def test_interference_is_an_error(overlapping: World, how: str) -> None:
    results = overlapping.run(_interfered, how)
    for text, parameters in results:
        assert re.search(INTERFERENCE[how], text), text
        assert "HOROVOD_ADASUM_OVERLAP" in text
        assert parameters == results[0][1]


def _refused() -> None:
    import torch

    import horovod.torch as hvd

    class Own(torch.optim.SGD):
        pass

    parameters = [torch.nn.Parameter(torch.ones(2))]
    for make in (torch.optim.LBFGS, Own):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.UNSUPPORTED_OPTIMIZER, make.__qualname__)):
            hvd.DistributedOptimizer(make(parameters, lr=0.1), op=hvd.Adasum)


def test_optimizers_that_may_not_step_one_by_one_are_refused(overlapping: World) -> None:
    overlapping.run(_refused)


def _added_and_unfrozen() -> list[list[float]]:
    import torch

    import horovod.torch as hvd

    first, later, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, frozen], lr=0.5), op=hvd.Adasum)
    optimizer.add_param_group({"params": [later], "lr": 0.25})
    for unfreeze in (True, False):
        (first.sum() + later.sum() + frozen.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        frozen.requires_grad_(unfreeze)
        if unfreeze:
            frozen.grad = torch.ones(2)
            first.sum().backward()
            assert set(optimizer._handles) == {first}
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.tolist() for parameter in (first, later, frozen)]


def test_added_and_unfrozen_parameters(overlapping: World) -> None:
    for found in overlapping.run(_added_and_unfrozen):
        assert found == [pytest.approx([-0.5, -0.5]), pytest.approx([0.5, 0.5]), pytest.approx([0.0, 0.0], abs=1e-6)]
