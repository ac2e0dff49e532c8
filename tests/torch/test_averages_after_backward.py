"""After backward() the gradients are the averages, without synchronize(); where not, changing one is an error.

On two real ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from error_codes import ends_with
from optimizer_model import distributed_sgd, expected_gradient, linear, rows
from worlds import World

from horovod.base.errors import OperationCode, TrainingCode

MAX_NORM = 0.1


def _averages_are_there(optimizer: Any) -> None:
    """zero_grad() would raise AssertionError if a gradient were still being reduced."""
    optimizer.zero_grad()


# -- training ----------------------------------------------------------------------------------------------------------
def _batches(rank: int, steps: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(rank)
    return torch.randn(steps, 5, 3, generator=generator, dtype=torch.float64)


def _train_clipped(steps: int) -> tuple[list[float], float]:
    """The weights, and how far they are from those of one process that has both ranks' batches."""
    import torch

    import horovod.torch as hvd

    def model() -> Any:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1)).double()

    def train(model: Any, optimizer: Any, batches: Any) -> list[float]:
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        return [float(one) for parameter in model.parameters() for one in parameter.detach().flatten()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = model()
        found = train(mine, distributed_sgd(mine), _batches(hvd.rank(), steps))
    alone = model()
    joined = torch.cat([_batches(rank, steps) for rank in range(hvd.size())], dim=1)
    wanted = train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), joined)
    return found, max(abs(one - other) for one, other in zip(found, wanted, strict=True))


def test_clipping_without_synchronize_trains_as_one_process(pair: World) -> None:
    (on_0, distance), (on_1, _) = pair.run(_train_clipped, 200)
    assert on_0 == on_1
    assert distance < 1e-9


# -- idioms: each must find the averages after its last backward() ----------------------------------------------------
def _plain() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model)
    model(rows()).sum().backward()
    torch.testing.assert_close(model.weight.grad, expected_gradient())
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, expected_gradient())  # not reduced again
    _averages_are_there(optimizer)


def _grad_scaler() -> None:
    """One rank overflows in the second step: both must skip it, and go on."""
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for poisoned in (False, True, False):
        before = model.weight.detach().clone()
        model.zero_grad()  # not the optimizer's, which would tell it of the new step
        loss = model(rows()).sum()
        if poisoned and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if not poisoned:
            torch.testing.assert_close(model.weight.grad, expected_gradient())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == poisoned
    assert scaler.get_scale() == 512.0


def _accumulation() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model, backward_passes_per_step=2)
    for _ in range(2):
        model(rows()).sum().backward()
        torch.testing.assert_close(model.weight.grad, rows().sum(0).expand(2, 3))  # this rank's own
        model(rows()).sum().backward()
        torch.testing.assert_close(model.weight.grad, 2 * expected_gradient())
        _averages_are_there(optimizer)


def _several_backwards() -> None:
    import torch

    first, second = linear(1), linear(2)
    optimizer = distributed_sgd(torch.nn.ModuleList([first, second]))
    for _ in range(2):
        first(rows()).sum().backward()
        second(rows()).sum().backward()
        for model in (first, second):
            torch.testing.assert_close(model.weight.grad, expected_gradient())
        optimizer.step()
        _averages_are_there(optimizer)


def _several_optimizers() -> None:
    """As in a GAN: the second backward() also makes gradients of the first optimizer, which takes no step with them."""
    import torch

    import horovod.torch as hvd

    first, second = linear(1), linear(2)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            [(f"{index}.{name}", p) for name, p in model.named_parameters()],
        )
        for index, model in enumerate((first, second))
    ]
    for _ in range(2):
        first(rows()).sum().backward()
        torch.testing.assert_close(first.weight.grad, expected_gradient())
        optimizers[0].step()
        optimizers[0].zero_grad()
        (first(rows()).sum() + second(rows()).sum()).backward()
        torch.testing.assert_close(second.weight.grad, expected_gradient())
        optimizers[1].step()
        for optimizer in optimizers:
            _averages_are_there(optimizer)


def _closure() -> None:
    import torch

    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    import horovod.torch as hvd

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    seen = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(rows()).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen.append(torch.equal(model.weight.grad, hvd.broadcast(model.weight.grad, 0)))
        return hvd.allreduce(loss.detach())

    optimizer.step(closure)
    assert len(seen) > 1
    assert all(seen)


def _checkpointed() -> None:
    """The last gradients are made in a backward pass inside of the backward pass."""
    import torch
    from torch.utils.checkpoint import checkpoint

    for trained_after in (False, True):
        model = torch.nn.Sequential(linear(1), torch.nn.Linear(2, 2).double())
        first = torch.nn.Linear(3, 3).double().requires_grad_(trained_after)
        optimizer = distributed_sgd(torch.nn.ModuleList([model, first]))
        for _ in range(2):
            optimizer.zero_grad()
            features = first(rows()).requires_grad_()
            checkpoint(model, features, use_reentrant=True).square().sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            import horovod.torch as hvd

            assert len(set(hvd.allgather(norm.reshape(1)).tolist())) == 1
            _averages_are_there(optimizer)


def _double_backward() -> None:
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    x = rows().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
    loss = slope.square().sum() + model(x).sum()
    (own, _) = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    torch.testing.assert_close(model.weight.grad, hvd.allreduce(own))
    optimizer.step()
    _averages_are_there(optimizer)


def _sparse() -> None:
    import torch

    import horovod.torch as hvd

    model = torch.nn.Embedding(5, 2, sparse=True).double()
    optimizer = distributed_sgd(model)
    model(torch.tensor([0, 2 + hvd.rank()])).sum().backward()
    assert model.weight.grad.to_dense()[:, 0].tolist() == [1.0, 0.0, 0.5, 0.5, 0.0]
    model.weight.grad.mul_(2)
    optimizer.step()
    assert model.weight.grad.to_dense()[:, 0].tolist() == [2.0, 0.0, 1.0, 1.0, 0.0]
    _averages_are_there(optimizer)


def _compressed() -> None:
    import torch

    import horovod.torch as hvd
    from horovod.torch.compression import GradientCompressor

    class TwoRounds(GradientCompressor):
        """The second reduction starts when the first is over."""

        def reduce(self, name: str, gradient: Any) -> Any:
            first = gradient / 2
            yield first
            gradient.sub_(gradient / 2)
            yield gradient
            return gradient + first

    for compression in (hvd.Compression.fp16, TwoRounds()):
        model = linear()
        optimizer = distributed_sgd(model, compression=compression)
        for _ in range(2):
            model(rows()).sum().backward()
            torch.testing.assert_close(model.weight.grad, expected_gradient())
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            _averages_are_there(optimizer)


def _grouped() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model, groups=1, op=0, gradient_predivide_factor=2.0)
    model(rows()).sum().backward()
    torch.testing.assert_close(model.weight.grad, expected_gradient())
    _averages_are_there(optimizer)


def _unfrozen() -> None:
    """What is unfrozen in the middle of training has its average in the same step."""
    import torch

    model = torch.nn.ModuleList([linear(1), linear(2)])
    model[0].requires_grad_(False)
    optimizer = distributed_sgd(model)
    for _ in range(2):
        (model[0](rows()).sum() + model[1](rows()).sum()).backward()
        torch.testing.assert_close(model[1].weight.grad, expected_gradient())
        if model[0].weight.requires_grad:
            torch.testing.assert_close(model[0].weight.grad, expected_gradient())
        _averages_are_there(optimizer)
        model[0].requires_grad_(True)


def _other_defaults() -> None:
    """Ranks may have different default dtypes."""
    import torch

    import horovod.torch as hvd

    torch.set_default_dtype((torch.float32, torch.float64)[hvd.rank()])
    try:
        _plain()
    finally:
        torch.set_default_dtype(torch.float32)


def _failed_backward_then_another() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model)

    def fail(_: Any) -> None:
        raise OSError("no more")

    features = model(rows())
    features.register_hook(fail)
    with pytest.raises(OSError, match="no more"):
        features.sum().backward()
    model(rows()).sum().backward()
    torch.testing.assert_close(model.weight.grad, expected_gradient())
    _averages_are_there(optimizer)


IDIOMS = [
    _plain,
    _grad_scaler,
    _accumulation,
    _several_backwards,
    _several_optimizers,
    _closure,
    _checkpointed,
    _double_backward,
    _sparse,
    _compressed,
    _grouped,
    _unfrozen,
    _other_defaults,
    _failed_backward_then_another,
]


@pytest.mark.parametrize("idiom", IDIOMS)
def test_idiom(pair: World, idiom: Callable[[], None]) -> None:
    pair.run(idiom)


# -- where backward() can't wait ---------------------------------------------------------------------------------------
class Branches:
    """All ranks use the first part, and those in `with_second` the second one."""

    def __init__(self, with_second: tuple[int, ...]) -> None:
        import torch

        import horovod.torch as hvd

        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 1).double() for name in ("all", "second")})
        self.used = ("all", "second") if hvd.rank() in with_second else ("all",)
        self.optimizer = distributed_sgd(self.model)

    def backward(self) -> Any:
        loss = sum(self.model[name](rows()).sum() for name in self.used)
        loss.backward()
        return loss.detach()


def _other_operations_before_the_step() -> None:
    """Rank 0 has made all gradients and would wait for rank 1, which waits for rank 0 in one of these."""
    import torch

    import horovod.torch as hvd

    branches = Branches(with_second=(0,))
    one = torch.ones(1)
    for between in (
        lambda: hvd.allreduce(one, name="loss"),
        lambda: hvd.allreduce_(one.clone()),
        lambda: hvd.synchronize(hvd.allreduce_async(one)),
        lambda: hvd.grouped_allreduce([one, one]),
        lambda: hvd.grouped_allreduce_([one.clone(), one.clone()]),
        lambda: hvd.grouped_allgather([one, one]),
        lambda: hvd.grouped_reducescatter([torch.ones(2)]),
        lambda: hvd.allgather_object(3),
        hvd.barrier,
    ):
        branches.optimizer.zero_grad()
        branches.backward()
        between()
        branches.optimizer.step()
        gradient = branches.model["second"].weight.grad
        torch.testing.assert_close(gradient, torch.full((1, 3), 2.0, dtype=torch.float64))


def test_a_rank_that_waits_for_something_else_is_not_waited_for(pair: World) -> None:
    pair.run(_other_operations_before_the_step)


def _two_optimizers_crosswise() -> None:
    """Each rank has made all gradients of one optimizer and some of the other."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    models = [torch.nn.ModuleDict({n: torch.nn.Linear(3, 1).double() for n in "ab"}) for _ in range(2)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), [(f"{i}.{name}", p) for name, p in model.named_parameters()]
        )
        for i, model in enumerate(models)
    ]
    for _ in range(2):
        loss = torch.zeros((), dtype=torch.float64)
        for index, model in enumerate(models):
            for name in "ab" if index == hvd.rank() else "a":
                loss = loss + model[name](rows()).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_optimizers_of_which_each_lacks_another_rank(pair: World) -> None:
    pair.run(_two_optimizers_crosswise)


def _touched(how: str) -> None:
    import torch

    branches = Branches(with_second=())
    model, optimizer = branches.model, branches.optimizer
    weight = model["all"].weight
    step = optimizer.step
    branches.backward()
    with pytest.raises(AssertionError, match=ends_with(TrainingCode.GRADIENTS_IN_FLIGHT, "zero_grad()")):
        optimizer.zero_grad()
    facts = ["GradScaler"] if how == "scaled" else ["parameter 'all.weight'", "replaced" if how == "cleared" else how]
    if how == "changed":
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    elif how == "replaced":
        weight.grad = weight.grad * 0.5
    elif how == "cleared":
        model.zero_grad()
    elif how == "given other memory":
        before = weight.grad.detach()
        weight.grad.data = before * 0.5
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))

        def step() -> Any:
            return scaler.step(optimizer)

    with pytest.raises(AssertionError, match=ends_with(TrainingCode.CHANGED_GRADIENTS, *facts, "synchronize()")):
        step()
    # The next step is an ordinary one.
    optimizer.zero_grad()
    branches.backward()
    optimizer.synchronize()
    torch.testing.assert_close(weight.grad, torch.full((1, 3), 6.0, dtype=torch.float64))
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("how", ["changed", "replaced", "cleared", "given other memory", "scaled"])
def test_a_gradient_in_flight_must_not_be_touched(pair: World, how: str) -> None:
    pair.run(_touched, how)


def _untouched() -> None:
    """Gradients that are views of one memory count their changes together; looking at one is no change."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    parts = torch.nn.ParameterList(torch.ones(2, dtype=torch.float64) for _ in range(3))
    unused = torch.nn.Linear(1, 1).double()
    flat = torch.zeros(6, dtype=torch.float64)
    optimizer = distributed_sgd(torch.nn.ModuleList([parts, unused]), backward_passes_per_step=2)
    for in_one_memory in (False, True):
        for _ in range(2):
            optimizer.zero_grad()
            if in_one_memory:
                flat.zero_()
                for index, parameter in enumerate(parts):
                    parameter.grad = flat[2 * index : 2 * index + 2]
            for _ in range(2):
                (torch.cat(list(parts)).square() * (1 + hvd.rank())).sum().backward()
            torch.nn.utils.get_total_norm([parameter.grad for parameter in parts])
            before = [parameter.detach().clone() for parameter in parts]
            optimizer.synchronize()
            for parameter, start in zip(parts, before, strict=True):
                torch.testing.assert_close(parameter.grad, 2 * 1.5 * 2 * start)
            with optimizer.skip_synchronize():
                optimizer.step()


def test_no_false_alarm(pair: World) -> None:
    pair.run(_untouched)


def _disagree() -> None:
    import torch

    import horovod.torch as hvd

    weight = torch.nn.Parameter(torch.ones(2 + hvd.rank()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
    with pytest.raises(hvd.HorovodInternalError, match=ends_with(OperationCode.MISMATCHED)):
        weight.sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()


def test_errors_of_the_reduction_are_raised_by_backward(pair: World) -> None:
    pair.run(_disagree)


def _in_a_set() -> None:
    import torch

    import horovod.torch as hvd

    hvd.shutdown()
    alone = hvd.ProcessSet([1])
    hvd.init(process_sets=[alone])
    model = linear()
    optimizer = distributed_sgd(model, process_set=alone)
    for _ in range(2):
        model(rows()).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        _averages_are_there(optimizer)
    hvd.shutdown()
    hvd.init()


def test_in_a_process_set(pair: World) -> None:
    pair.run(_in_a_set)


def _uneven_batches() -> None:
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    for step in range(3):
        if step and hvd.rank() == 1:
            hvd.join()
            return
        model(rows()).sum().backward()
        wanted = expected_gradient() if step == 0 else rows().sum(0).expand(2, 3) / 2
        torch.testing.assert_close(model.weight.grad, wanted)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    hvd.join()


def test_with_join(pair: World) -> None:
    pair.run(_uneven_batches)
