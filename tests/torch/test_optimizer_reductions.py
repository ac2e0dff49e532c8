"""DistributedOptimizer: which gradients are reduced, and when, on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from error_codes import ends_with
from optimizer_model import counted_questions, distributed_sgd, expected_gradient, linear, rows
from worlds import World

from horovod.base.errors import TrainingCode


def _accumulation() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model, backward_passes_per_step=2)
    for _ in range(2):
        model(rows()).sum().backward()
    optimizer.synchronize()
    torch.testing.assert_close(model.weight.grad, 2 * expected_gradient())  # the sum over the passes
    optimizer.zero_grad()
    model(rows()).sum().backward()  # a step before all passes are made reduces what there is
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, expected_gradient())
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    model(rows()).sum().backward()
    with pytest.raises(AssertionError):
        model(rows()).sum().backward()
    optimizer.synchronize()


def test_accumulation(pair: World) -> None:
    pair.run(_accumulation)


class _Branches:
    """A model with a branch that only rank 0 uses, one that nobody uses, and a frozen one."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        parts = ["always", "rank0", "nobody", "frozen"]
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 1).double() for name in parts})
        self.model["frozen"].requires_grad_(False)

    def loss(self) -> Any:
        import horovod.torch as hvd

        x = rows()
        used = ["always", "frozen"] + (["rank0"] if hvd.rank() == 0 else [])
        return sum(self.model[name](x).sum() for name in used)


def _unused(groups: int | None) -> None:
    import torch

    branches = _Branches()
    model = branches.model
    optimizer = distributed_sgd(model, groups=groups)
    for _ in range(2):
        optimizer.zero_grad()
        branches.loss().backward()
        optimizer.step()
        torch.testing.assert_close(model["always"].weight.grad, torch.full((1, 3), 6.0, dtype=torch.float64))
        torch.testing.assert_close(model["rank0"].weight.grad, torch.full((1, 3), 2.0, dtype=torch.float64))
        assert not model["nobody"].weight.grad.any()
        assert model["frozen"].weight.grad is None
    # Unfrozen in the middle of training; another part is frozen instead.
    model["frozen"].requires_grad_(True)
    model["rank0"].requires_grad_(False)
    frozen_weight = model["rank0"].weight.clone()
    for _ in range(2):
        optimizer.zero_grad()
        branches.loss().backward()
        optimizer.step()
        torch.testing.assert_close(model["frozen"].weight.grad, torch.full((1, 3), 6.0, dtype=torch.float64))
        if groups is None:
            assert torch.equal(model["rank0"].weight, frozen_weight)


@pytest.mark.parametrize("groups", [None, 2])
def test_unused_and_frozen_parameters(pair: World, groups: int | None) -> None:
    pair.run(_unused, groups)


def _named_in_another_order(groups: int | None, by_torch: bool) -> None:
    """The names tell which gradient is which, and rank 0's order where the groups are cut."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3).double() for _ in range(3)))
    named = list(model.named_parameters())
    if hvd.rank() == 1:
        named.reverse()
    if by_torch:
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
            return  # its optimizers take no names
        last = [pair for pair in named if pair[0].startswith("2.")]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([pair for pair in named if not pair[0].startswith("2.")], lr=0.1)
        )
        optimizer.add_param_group({"params": last})
    else:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, groups=groups)
    loss = model(rows()).square().sum()
    own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, hvd.allreduce(gradient))


@pytest.mark.parametrize("groups", [None, 1, 2, 4])
def test_ranks_may_name_parameters_in_another_order(pair: World, groups: int | None) -> None:
    pair.run(_named_in_another_order, groups, False)
    if groups is None:
        pair.run(_named_in_another_order, groups, True)


def _other_names_with_groups() -> None:
    import torch

    import horovod.torch as hvd

    weight = torch.nn.Parameter(torch.ones(2))
    differing = ends_with(TrainingCode.DIFFERENT_MODELS, "groups=1", "'of 0'", "on rank 0 and not on rank 1")
    with pytest.raises(ValueError, match=differing):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [(f"of {hvd.rank()}", weight)], groups=1)
    hvd.barrier()


def test_groups_need_the_same_names_and_all_ranks_are_told(pair: World) -> None:
    pair.run(_other_names_with_groups)


def _shared() -> None:
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    first = torch.nn.Linear(3, 3, bias=False).double()
    second = torch.nn.Linear(3, 3, bias=False).double()
    second.weight = first.weight  # tied
    model = torch.nn.Sequential(first, second)
    optimizer = distributed_sgd(model)
    model(rows()).sum().backward()
    (own,) = torch.autograd.grad(model(rows()).sum(), [first.weight])
    optimizer.step()
    torch.testing.assert_close(first.weight.grad, hvd.allreduce(own))


def test_shared_parameters(pair: World) -> None:
    pair.run(_shared)


def _channels_last() -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Conv2d(2, 2, 3).double().to(memory_format=torch.channels_last)
    optimizer = distributed_sgd(model)
    model(rows()[0, 0].expand(1, 2, 5, 5).contiguous(memory_format=torch.channels_last)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 2, 3, 3), 9 * 1.5, dtype=torch.float64))


def test_channels_last(pair: World) -> None:
    pair.run(_channels_last)


def _sparse(as_dense: bool) -> None:
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Embedding(5, 2, sparse=True).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=as_dense
    )
    for step in range(2):
        optimizer.zero_grad()
        if not (step == 1 and hvd.rank() == 0):  # in the second step rank 0 has no gradient at all
            model(torch.tensor([0, 2 + hvd.rank()])).sum().backward()
        optimizer.synchronize()
        gradient = model.weight.grad
        assert gradient.is_sparse
        expected = torch.zeros(5, 2, dtype=torch.float64)
        expected[0] = 0.5 if step else 1.0
        expected[2] = 0.0 if step else 0.5
        expected[3] = 0.5
        torch.testing.assert_close(gradient.to_dense(), expected)
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(pair: World, as_dense: bool) -> None:
    pair.run(_sparse, as_dense)


def _sparse_in_a_group() -> None:
    import torch

    import horovod.torch as hvd

    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), groups=1
    )
    loss = model(torch.tensor([1])).sum()
    with pytest.raises(ValueError, match=ends_with(TrainingCode.SPARSE_GRADIENT, "'0.weight'", "groups")):
        loss.backward()
    optimizer.load_state_dict(optimizer.state_dict())  # forgets the half-made step


def test_sparse_gradient_in_a_group(pair: World) -> None:
    pair.run(_sparse_in_a_group)


def _overlap() -> tuple[int, int]:
    """How many reductions were handed to the engine before the first layer's gradient existed, and in all."""
    import torch

    from horovod.worker.runtime.context import current

    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(4)]  # 1 MiB each: handed over at once
    model = torch.nn.Sequential(*layers)
    optimizer = distributed_sgd(model)
    model(torch.ones(2, 512)).sum().backward()  # finds out that no gradient is made several times in a pass
    optimizer.step()
    optimizer.zero_grad()
    before = current().engine.counters()["submitted"]
    submitted = []
    layers[0].weight.register_hook(lambda _: submitted.append(current().engine.counters()["submitted"] - before))
    with counted_questions() as asked:
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
    return submitted[0], current().engine.counters()["submitted"] - before - asked.total()


def test_reductions_start_during_the_backward_pass(pair: World) -> None:
    """The fifth operation finds out that all ranks have made all gradients."""
    assert pair.run(_overlap) == [(3, 5), (3, 5)]


def _between_backward_and_step() -> None:
    """Ranks may use other collectives between backward and step, in different order with regard to synchronize."""
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    model(rows()).sum().backward()
    if hvd.rank() == 0:
        optimizer.synchronize()
        hvd.allreduce(torch.ones(1), name="loss")
    else:
        hvd.allreduce(torch.ones(1), name="loss")
        optimizer.synchronize()
    torch.testing.assert_close(model.weight.grad, expected_gradient())


def test_other_collectives_between_backward_and_step(pair: World) -> None:
    pair.run(_between_backward_and_step)
