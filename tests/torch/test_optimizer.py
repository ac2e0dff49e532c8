"""DistributedOptimizer: construction errors, guards, and the idioms that scripts use, on two real ranks."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
from worlds import World


def _linear(seed: int = 0) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2).double()


def _wrapped(model: Any, **options: Any) -> Any:
    import torch

    import horovod.torch as hvd

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def _rows() -> Any:
    """This rank's input; the mean over the ranks is what training should see."""
    import torch

    import horovod.torch as hvd

    return torch.full((4, 3), 1.0 + hvd.rank(), dtype=torch.float64)


def _expected_gradient() -> Any:
    """Of model(rows).sum() with respect to the weight, averaged over ranks 0 and 1."""
    import torch

    return torch.full((2, 3), 4 * 1.5, dtype=torch.float64)


# -- construction ------------------------------------------------------------------------------------------------------
def _construction() -> None:
    import torch

    import horovod.torch as hvd

    model = _linear()
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(match: str, kind: type[Exception] = ValueError, optimizer: Any = sgd, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            hvd.DistributedOptimizer(optimizer, **options)

    refused("gradient_predivide_factor not supported", gradient_predivide_factor=2.0, op=hvd.Sum)
    refused("backward_passes_per_step must be > 0", backward_passes_per_step=0)
    refused("sequence of tuples", named_parameters=list(model.parameters()))
    refused("Found duplicates: weight", named_parameters=[("weight", named[0][1]), ("weight", named[1][1])])
    refused(str(id(named[1][1])), named_parameters=named[:1])
    for groups in (0, -1, "2", 1.5):
        refused("groups should be a non-negative integer or a list of list", groups=groups)
    refused("one element is a str", groups=[["weight"]])
    refused("only appear once in groups", groups=[[named[0][1]], [named[0][1]]])
    refused("Adasum", NotImplementedError, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(sgd, named_parameters=named, num_groups=1)

    class Custom(torch.optim.SGD):
        """Its constructor can't be called with parameters alone."""

        def __init__(self, parameters: Any, *, must_be_given: int) -> None:
            super().__init__(parameters, lr=0.1)
            self.must_be_given = must_be_given

    original = Custom(model.parameters(), must_be_given=3)
    wrapped = hvd.DistributedOptimizer(original, named_parameters=named)
    assert isinstance(wrapped, Custom)
    assert type(wrapped).__name__ == "Custom"
    assert wrapped.must_be_given == 3
    assert wrapped.param_groups is original.param_groups
    assert wrapped.state is original.state
    with pytest.warns(UserWarning, match="distributed already"):
        assert hvd.DistributedOptimizer(wrapped) is wrapped


def test_construction(pair: World) -> None:
    pair.run(_construction)


# -- guards ------------------------------------------------------------------------------------------------------------
def _guards() -> None:
    model = _linear()
    optimizer = _wrapped(model)
    model(_rows()).sum().backward()
    with pytest.raises(AssertionError, match="race condition"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        model(_rows()).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad(set_to_none=False)
    assert not model.weight.grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert model.weight.grad is None

    model(_rows()).sum().backward()
    optimizer.synchronize()
    before = model.weight.grad.clone()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    assert bool((model.weight.grad == before).all()), "must not be reduced twice"
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.set_backward_passes_per_step(0)


def test_guards(pair: World) -> None:
    pair.run(_guards)


def _failed_backward() -> None:
    """After an exception in the middle of a backward pass, load_state_dict makes the optimizer usable again."""
    import torch

    model = _linear()
    optimizer = _wrapped(model)
    saved = optimizer.state_dict()

    def fail(_: Any) -> None:
        raise OSError("no more")

    features = model(_rows())
    features.register_hook(fail)
    with pytest.raises(OSError, match="no more"):
        features.sum().backward()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    model(_rows()).sum().backward()
    optimizer.synchronize()
    torch.testing.assert_close(model.weight.grad, _expected_gradient())


def test_failed_backward(pair: World) -> None:
    pair.run(_failed_backward)


# -- idioms ------------------------------------------------------------------------------------------------------------
def _clipping() -> None:
    import torch

    model = _linear()
    optimizer = _wrapped(model)
    model(_rows()).sum().backward()
    optimizer.synchronize()
    torch.testing.assert_close(model.weight.grad, _expected_gradient())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    assert float((model.weight.detach() - before).norm()) < 0.1 * 0.1 + 1e-9


def test_clipping(pair: World) -> None:
    pair.run(_clipping)


def _grad_scaler() -> None:
    import torch

    model = _linear()
    optimizer = _wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for poisoned in (False, True):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        loss = model(_rows()).sum()
        if poisoned:
            import horovod.torch as hvd

            loss = loss * (float("inf") if hvd.rank() == 1 else 1.0)  # one rank overflows, all must skip the step
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        if not poisoned:
            torch.testing.assert_close(model.weight.grad, _expected_gradient())
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert bool((model.weight == before).all()) == poisoned
    assert scaler.get_scale() == 512.0


def test_grad_scaler(pair: World) -> None:
    pair.run(_grad_scaler)


def _closure() -> None:
    import torch

    model = _linear()
    optimizer = _wrapped(model)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(_rows()).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss is not None
    torch.testing.assert_close(model.weight.grad, _expected_gradient())
    assert optimizer.step(closure) < loss


def test_closure(pair: World) -> None:
    pair.run(_closure)


def _schedulers() -> None:
    import torch

    import horovod.torch as hvd

    model = _linear()
    original = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(original, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(original, named_parameters=model.named_parameters())
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            model(_rows()).sum().backward()
            optimizer.step()
            before.step()
            after.step()
    torch.testing.assert_close(model.weight.grad, _expected_gradient())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 16)


def test_schedulers_made_before_and_after(pair: World) -> None:
    pair.run(_schedulers)


def _accumulation() -> None:
    import torch

    model = _linear()
    optimizer = _wrapped(model, backward_passes_per_step=2)
    for _ in range(2):
        model(_rows()).sum().backward()
    optimizer.synchronize()
    torch.testing.assert_close(model.weight.grad, 2 * _expected_gradient())  # the sum over the passes
    optimizer.zero_grad()
    model(_rows()).sum().backward()  # a step before all passes are made reduces what there is
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, _expected_gradient())
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    model(_rows()).sum().backward()
    with pytest.raises(AssertionError):
        model(_rows()).sum().backward()
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

        x = _rows()
        used = ["always", "frozen"] + (["rank0"] if hvd.rank() == 0 else [])
        return sum(self.model[name](x).sum() for name in used)


def _unused(groups: int | None) -> None:
    import torch

    branches = _Branches()
    model = branches.model
    optimizer = _wrapped(model, groups=groups)
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


def _shared() -> None:
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    first = torch.nn.Linear(3, 3, bias=False).double()
    second = torch.nn.Linear(3, 3, bias=False).double()
    second.weight = first.weight  # tied
    model = torch.nn.Sequential(first, second)
    optimizer = _wrapped(model)
    model(_rows()).sum().backward()
    (own,) = torch.autograd.grad(model(_rows()).sum(), [first.weight])
    optimizer.step()
    torch.testing.assert_close(first.weight.grad, hvd.allreduce(own))


def test_shared_parameters(pair: World) -> None:
    pair.run(_shared)


def _channels_last() -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Conv2d(2, 2, 3).double().to(memory_format=torch.channels_last)
    optimizer = _wrapped(model)
    model(_rows()[0, 0].expand(1, 2, 5, 5).contiguous(memory_format=torch.channels_last)).sum().backward()
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
    with pytest.raises(ValueError, match=r"parameter '0.weight' is sparse, but groups reduce dense gradients only"):
        loss.backward()
    optimizer.load_state_dict(optimizer.state_dict())  # forgets the half-made step


def test_sparse_gradient_in_a_group(pair: World) -> None:
    pair.run(_sparse_in_a_group)


def _added_group_and_default_names() -> None:
    import torch

    import horovod.torch as hvd

    first, second = _linear(1), _linear(2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1))
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.2})
    (first(_rows()).sum() + second(_rows()).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(first.weight.grad, _expected_gradient())
    torch.testing.assert_close(second.weight.grad, _expected_gradient())


def test_added_group_and_default_names(pair: World) -> None:
    pair.run(_added_group_and_default_names)


def _state_dict() -> None:
    import torch

    model = _linear()
    optimizer = _wrapped(model)
    model(_rows()).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    plain.load_state_dict(saved)  # one process continues what many began
    assert plain.param_groups[0]["lr"] == 0.1
    other = _wrapped(_linear())
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.state_dict()["state"][0]["momentum_buffer"], saved["state"][0]["momentum_buffer"])


def test_state_dict(pair: World) -> None:
    pair.run(_state_dict)


def _dropped() -> None:
    """An optimizer that is gone reduces nothing, and a second one over the same model works."""
    import torch

    model = _linear()
    first = _wrapped(model)
    reference = weakref.ref(first)
    del first
    gc.collect()
    assert reference() is None
    model(_rows()).sum().backward()
    torch.testing.assert_close(model.weight.grad, _rows().sum(0).expand(2, 3))
    second = _wrapped(model)
    model.zero_grad()
    model(_rows()).sum().backward()
    second.step()
    torch.testing.assert_close(model.weight.grad, _expected_gradient())


def test_dropped_optimizer(pair: World) -> None:
    pair.run(_dropped)


def _overlap() -> tuple[int, int]:
    """How many reductions were handed to the engine before the first layer's gradient existed, and in all."""
    import torch

    from horovod.worker.runtime.context import current

    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(4)]  # 1 MiB each: handed over at once
    model = torch.nn.Sequential(*layers)
    optimizer = _wrapped(model)
    before = current().engine.counters()["submitted"]
    submitted = []
    layers[0].weight.register_hook(lambda _: submitted.append(current().engine.counters()["submitted"] - before))
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    return submitted[0], current().engine.counters()["submitted"] - before


def test_reductions_start_during_the_backward_pass(pair: World) -> None:
    assert pair.run(_overlap) == [(3, 4), (3, 4)]


def _between_backward_and_step() -> None:
    """Ranks may use other collectives between backward and step, in different order with regard to synchronize."""
    import torch

    import horovod.torch as hvd

    model = _linear()
    optimizer = _wrapped(model)
    model(_rows()).sum().backward()
    if hvd.rank() == 0:
        optimizer.synchronize()
        hvd.allreduce(torch.ones(1), name="loss")
    else:
        hvd.allreduce(torch.ones(1), name="loss")
        optimizer.synchronize()
    torch.testing.assert_close(model.weight.grad, _expected_gradient())


def test_other_collectives_between_backward_and_step(pair: World) -> None:
    pair.run(_between_backward_and_step)
