"""Which backward passes count, and which parameters take part: accumulation, checkpoints, unfreezing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from error_codes import ends_with
from optimizer_model import distributed_sgd, expected_gradient, linear, rows
from worlds import Keeper, World

from horovod.base.errors import TrainingCode
from horovod.coordinator.core.agreement.deadlock import DeadlockTimes

# The API promises the words.
TOO_MANY = ends_with(TrainingCode.TOO_MANY_PASSES, "Gradients were computed more than backward_passes_per_step times")


# -- accumulation ------------------------------------------------------------------------------------------------------
def _clear_by_hand(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEARED: dict[str, Callable[[Any, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": _clear_by_hand,
}


def _dropped_remainder(how: str, adasum: bool) -> None:
    """An epoch of five passes with two in a step; the fifth is dropped."""
    import torch

    import horovod.torch as hvd

    model = linear()
    options = {"op": hvd.Adasum} if adasum else {}
    optimizer = distributed_sgd(model, backward_passes_per_step=2, **options)
    for _ in range(3):
        for batch in range(5):
            if batch % 2 == 0:
                CLEARED[how](model, optimizer)
            model(rows()).sum().backward()
            if batch % 2 == 1:
                if not adasum:
                    torch.testing.assert_close(model.weight.grad, 2 * expected_gradient())
                optimizer.step()
            elif not adasum:
                torch.testing.assert_close(model.weight.grad, rows().sum(0).expand(2, 3))


@pytest.mark.parametrize("how", CLEARED)
def test_a_dropped_remainder(pair: World, how: str) -> None:
    pair.run(_dropped_remainder, how, False)


def test_a_dropped_remainder_with_adasum_beside_the_backward_pass() -> None:
    with Keeper(2, "shm", {"HOROVOD_ADASUM_OVERLAP": "1"}) as keeper:
        for how in CLEARED:
            keeper.get().run(_dropped_remainder, how, True)


def _dcgan() -> None:
    """Two passes into the critic for its own step, and one for the generator's."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    critic, generator = linear(1), torch.nn.Linear(3, 3).double()
    of_critic = distributed_sgd(critic, backward_passes_per_step=2)
    of_generator = hvd.DistributedOptimizer(
        torch.optim.SGD(generator.parameters(), 0.1), [(f"g.{name}", p) for name, p in generator.named_parameters()]
    )
    for _ in range(3):
        critic.zero_grad()
        critic(rows()).sum().backward()
        critic(rows()).sum().backward()
        torch.testing.assert_close(critic.weight.grad, 2 * expected_gradient())
        of_critic.step()
        generator.zero_grad()
        critic(generator(rows())).sum().backward()
        of_generator.step()


def test_two_passes_into_a_critic(pair: World) -> None:
    pair.run(_dcgan)


def _still_too_many() -> None:
    """Passes that nothing has cleared still count."""
    model = linear()
    optimizer = distributed_sgd(model, backward_passes_per_step=2)
    for _ in range(2):
        model(rows()).sum().backward()
    with pytest.raises(AssertionError, match=TOO_MANY):
        model(rows()).sum().backward()
    optimizer.zero_grad()


def test_passes_without_a_step(pair: World) -> None:
    pair.run(_still_too_many)


def _double_backward() -> None:
    """Autograd makes a new tensor for each sum then; that begins nothing."""
    import torch

    model = linear()
    optimizer = distributed_sgd(model, backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            model(rows()).sum().backward(create_graph=True)
        torch.testing.assert_close(model.weight.grad.detach(), 2 * expected_gradient())
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_double_backward(pair: World) -> None:
    pair.run(_double_backward)


# -- backward passes inside of a backward pass -------------------------------------------------------------------------
class Shared:
    """A layer that is used twice under checkpoints, and one that is not."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self.layers = torch.nn.ModuleDict({n: torch.nn.Linear(3, 3).double() for n in ("first", "shared", "last")})

    def loss(self, uses: int, outside: bool) -> Any:
        from torch.utils.checkpoint import checkpoint

        value = self.layers["first"](rows())
        for _ in range(uses):
            value = checkpoint(self.layers["shared"], value, use_reentrant=True)
        if outside:
            value = self.layers["shared"](value)
        return self.layers["last"](value).square().mean()


def _checkpointed(passes: int, outside: bool, groups: int | None) -> None:
    import torch

    import horovod.torch as hvd

    model, alone = Shared(), Shared()
    optimizer = distributed_sgd(model.layers, backward_passes_per_step=passes, groups=groups)
    for _ in range(3):
        optimizer.zero_grad()
        alone.layers.zero_grad()
        for _ in range(passes):
            model.loss(2, outside).backward()
            alone.loss(2, outside).backward()
        for parameter, own in zip(model.layers.parameters(), alone.layers.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, hvd.allreduce(own.grad))
        optimizer.step()
        alone.layers.load_state_dict(model.layers.state_dict())


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_parameter_that_checkpoints_use_twice(pair: World, passes: int, outside: bool, groups: int | None) -> None:
    pair.run(_checkpointed, passes, outside, groups)


def _once_then_twice() -> None:
    """What was made once in each pass so far is reduced at once, and then made again."""
    model = Shared()
    optimizer = distributed_sgd(model.layers)
    model.loss(1, False).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(
        AssertionError, match=ends_with(TrainingCode.MADE_SEVERAL_TIMES, "'shared.", "use_reentrant=False")
    ):
        model.loss(2, False).backward()
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_parameter_that_was_used_once_before(pair: World) -> None:
    pair.run(_once_then_twice)


# -- unfreezing --------------------------------------------------------------------------------------------------------
def _unfrozen(at_first: str, clipped: bool, passes: int) -> None:
    """Trains as one process whose parameters are unfrozen in the same step."""
    import torch

    import horovod.torch as hvd

    def model() -> Any:
        torch.manual_seed(5)
        return torch.nn.ModuleDict({name: torch.nn.Linear(3, 1).double() for name in ("first", "second")})

    def frozen(model: Any, step: int) -> None:
        for name, layer in model.items():
            layer.requires_grad_(step >= 2 or not (at_first == "all" or name == at_first))

    def loss(model: Any, rank: int) -> Any:
        x = torch.full((2, 3), 1.0 + rank, dtype=torch.float64)
        return (model["first"](x) + model["second"](x).square()).mean()

    mine, alone = model(), model()
    frozen(mine, 0)
    frozen(alone, 0)
    optimizer = distributed_sgd(mine, backward_passes_per_step=passes)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        frozen(mine, step)
        frozen(alone, step)
        optimizer.zero_grad()
        reference.zero_grad()
        if not any(parameter.requires_grad for parameter in mine.parameters()):
            continue
        for _ in range(passes):
            loss(mine, hvd.rank()).backward()
            for rank in range(hvd.size()):
                (loss(alone, rank) / hvd.size()).backward()
        for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad)
        if clipped:
            torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
        reference.step()
    for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)
        assert one.requires_grad


@pytest.mark.parametrize("at_first", ["all", "first", "second"])
@pytest.mark.parametrize(("clipped", "passes"), [(False, 1), (True, 1), (True, 2)])
def test_unfrozen_parameters(world: World, at_first: str, clipped: bool, passes: int) -> None:
    world.run(_unfrozen, at_first, clipped, passes)


def _stays_frozen() -> None:
    """Hooks on frozen parameters leave them as they are, and one without floating-point numbers is no parameter."""
    import torch

    model = torch.nn.Module()
    model.packed = torch.nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    model.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    model.trained = torch.nn.Parameter(torch.ones(4))
    optimizer = distributed_sgd(model)
    for _ in range(2):
        (model.trained * model.frozen).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [p.requires_grad for p in model.parameters()] == [False, False, True]
    assert model.frozen.grad is None
    assert set(optimizer._requires_update) == {model.trained}


def test_parameters_that_stay_frozen(pair: World) -> None:
    pair.run(_stays_frozen)


def _unfrozen_on_one_rank() -> None:
    import torch

    import horovod.torch as hvd

    model = torch.nn.ModuleList([linear(1), linear(2)])
    model[0].requires_grad_(False)
    optimizer = distributed_sgd(model)
    model[0].requires_grad_(hvd.rank() == 0)

    def train() -> None:
        for _ in range(3):
            (model[0](rows()).sum() + model[1](rows()).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(hvd.HorovodInternalError, match=r"allreduce\.0\.(bias|weight)"):
        train()


def test_a_parameter_that_only_one_rank_unfreezes() -> None:
    with Keeper(2, "shm", deadlock=DeadlockTimes(still_s=0.5, look_s=0.1)) as keeper:
        keeper.get().run(_unfrozen_on_one_rank)
