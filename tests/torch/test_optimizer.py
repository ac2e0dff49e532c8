"""DistributedOptimizer: construction errors, guards, and the idioms that scripts use, on two real ranks."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
from error_codes import ends_with
from event_words import DISTRIBUTED_ALREADY
from optimizer_model import distributed_sgd, expected_gradient, linear, rows
from worlds import World

from horovod.base.errors import ErrorCode, OperationCode, TrainingCode


# -- construction ------------------------------------------------------------------------------------------------------
def _construction() -> None:
    import torch

    import horovod.torch as hvd

    model = linear()
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(code: ErrorCode, *facts: object, kind: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(kind, match=ends_with(code, *facts)):
            hvd.DistributedOptimizer(sgd, **options)

    refused(
        TrainingCode.CONTRADICTORY_ARGUMENTS, "gradient_predivide_factor", "op", gradient_predivide_factor=2, op=hvd.Sum
    )
    refused(TrainingCode.INVALID_ARGUMENT, "backward_passes_per_step must be > 0", backward_passes_per_step=0)
    refused(TrainingCode.INVALID_NAMES, "(name, parameter)", named_parameters=list(model.parameters()))
    twice = [("weight", named[0][1]), ("weight", named[1][1])]
    refused(TrainingCode.INVALID_NAMES, "duplicates: weight", named_parameters=twice)
    refused(TrainingCode.INVALID_NAMES, "parameter 1 of group 0", named_parameters=named[:1])
    for groups in (0, -1, "2", 1.5):  # the API promises the words
        words = "groups should be a non-negative integer or a list of list of torch.Tensor."
        refused(TrainingCode.INVALID_GROUPS, words, groups=groups)
    refused(TrainingCode.INVALID_GROUPS, "str", groups=[["weight"]])
    refused(TrainingCode.INVALID_GROUPS, "once", groups=[[named[0][1]], [named[0][1]]])
    of_a_set = {"op": hvd.Adasum, "process_set": hvd.ProcessSet([0])}
    refused(OperationCode.UNDEFINED_REDUCTION, "Adasum", kind=NotImplementedError, **of_a_set)
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
    with pytest.warns(UserWarning, match=DISTRIBUTED_ALREADY):
        assert hvd.DistributedOptimizer(wrapped) is wrapped


def test_construction(pair: World) -> None:
    pair.run(_construction)


def _what_libraries_look_at() -> None:
    import copy

    import torch

    import horovod.torch as hvd

    for op in (hvd.Sum, hvd.Adasum):
        model = linear()
        optimizer = distributed_sgd(model, op=op, backward_passes_per_step=2, sparse_as_dense=True)
        assert "horovod" in str(type(optimizer))
        assert type(optimizer).__name__ == "SGD"
        assert isinstance(optimizer, torch.optim.SGD)
        assert (optimizer.op, optimizer.process_set) == (op, hvd.global_process_set)
        assert (optimizer.backward_passes_per_step, optimizer.gradient_predivide_factor) == (2, 1.0)
        assert optimizer.sparse_as_dense is True
        assert optimizer._parameter_names == {model.weight: "weight", model.bias: "bias"}
        assert optimizer._requires_update == {model.weight, model.bias}
        assert isinstance(copy.deepcopy(optimizer), torch.optim.SGD)
        assert optimizer._handles == {}
        optimizer.set_backward_passes_per_step(1)
        assert optimizer.backward_passes_per_step == 1
        torch.nn.functional.linear(rows(), model.weight).sum().backward()
        assert set(optimizer._handles) == ({model.weight} if op == hvd.Sum else set())
        optimizer.step()
        assert optimizer._handles == {}

    class Custom(torch.optim.SGD):
        op = "of the class"

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.process_set = "of the user"

    assert hvd.DistributedOptimizer(Custom(linear().parameters())).process_set == "of the user"


def test_what_libraries_look_at(pair: World) -> None:
    pair.run(_what_libraries_look_at)


# -- guards ------------------------------------------------------------------------------------------------------------
def _guards() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model)
    model.bias.requires_grad_(False)
    torch.nn.functional.linear(rows(), model.weight).sum().backward()
    model.bias.requires_grad_(True)
    optimizer.zero_grad()  # nothing is being reduced any more
    torch.nn.functional.linear(rows(), model.weight).sum().backward()  # the other parameter has no gradient
    with pytest.raises(AssertionError, match=ends_with(TrainingCode.GRADIENTS_IN_FLIGHT, "zero_grad()")):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match=ends_with(TrainingCode.TOO_MANY_PASSES)):
        model(rows()).sum().backward()
    with pytest.raises(AssertionError, match=ends_with(TrainingCode.CHANGED_GRADIENTS, "changed", "ranks 0 and 1")):
        optimizer.synchronize()
    optimizer.zero_grad()
    model(rows()).sum().backward()
    with pytest.raises(AssertionError, match=ends_with(TrainingCode.TOO_MANY_PASSES)):
        model(rows()).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad(set_to_none=False)
    assert not model.weight.grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert model.weight.grad is None

    model(rows()).sum().backward()
    optimizer.synchronize()
    before = model.weight.grad.clone()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    assert bool((model.weight.grad == before).all()), "must not be reduced twice"
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "backward_passes_per_step")):
        optimizer.set_backward_passes_per_step(0)


def test_guards(pair: World) -> None:
    pair.run(_guards)


def _failed_backward() -> None:
    """After an exception in the middle of a backward pass, load_state_dict makes the optimizer usable again."""
    import torch

    model = linear()
    optimizer = distributed_sgd(model)
    saved = optimizer.state_dict()

    def fail(_: Any) -> None:
        raise OSError("no more")

    features = model(rows())
    features.register_hook(fail)
    with pytest.raises(OSError, match="no more"):
        features.sum().backward()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    model(rows()).sum().backward()
    optimizer.synchronize()
    torch.testing.assert_close(model.weight.grad, expected_gradient())


def test_failed_backward(pair: World) -> None:
    pair.run(_failed_backward)


# -- idioms ------------------------------------------------------------------------------------------------------------
def _clipping() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model)
    model(rows()).sum().backward()
    optimizer.synchronize()
    torch.testing.assert_close(model.weight.grad, expected_gradient())
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

    model = linear()
    optimizer = distributed_sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for poisoned in (False, True):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        loss = model(rows()).sum()
        if poisoned:
            import horovod.torch as hvd

            loss = loss * (float("inf") if hvd.rank() == 1 else 1.0)  # one rank overflows, all must skip the step
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        if not poisoned:
            torch.testing.assert_close(model.weight.grad, expected_gradient())
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert bool((model.weight == before).all()) == poisoned
    assert scaler.get_scale() == 512.0


def test_grad_scaler(pair: World) -> None:
    pair.run(_grad_scaler)


def _closure() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(rows()).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss is not None
    torch.testing.assert_close(model.weight.grad, expected_gradient())
    assert optimizer.step(closure) < loss


def test_closure(pair: World) -> None:
    pair.run(_closure)


def _schedulers() -> None:
    import torch

    import horovod.torch as hvd

    model = linear()
    original = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(original, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(original, named_parameters=model.named_parameters())
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            model(rows()).sum().backward()
            optimizer.step()
            before.step()
            after.step()
    torch.testing.assert_close(model.weight.grad, expected_gradient())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 16)


def test_schedulers_made_before_and_after(pair: World) -> None:
    pair.run(_schedulers)


def _added_group_and_default_names() -> None:
    import torch

    import horovod.torch as hvd

    first, second = linear(1), linear(2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1))
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.2})
    (first(rows()).sum() + second(rows()).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(first.weight.grad, expected_gradient())
    torch.testing.assert_close(second.weight.grad, expected_gradient())

    def exchanged(group: dict[str, Any]) -> None:
        group["params"][0] = torch.nn.Parameter(torch.ones(3))

    def added(group: dict[str, Any]) -> None:
        group["params"].append(torch.nn.Parameter(torch.ones(3)))

    for op in (hvd.Average, hvd.Adasum):
        for change in (exchanged, added):
            plain = torch.optim.SGD(linear(1).parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(plain, op=op)
            change(plain.param_groups[0])
            with pytest.raises(ValueError, match=ends_with(TrainingCode.UNKNOWN_PARAMETER, "group 0", "[3]")):
                optimizer.step()


def test_added_group_and_default_names(pair: World) -> None:
    pair.run(_added_group_and_default_names)


def _state_dict() -> None:
    import torch

    model = linear()
    optimizer = distributed_sgd(model)
    model(rows()).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    plain.load_state_dict(saved)  # one process continues what many began
    assert plain.param_groups[0]["lr"] == 0.1
    other = distributed_sgd(linear())
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.state_dict()["state"][0]["momentum_buffer"], saved["state"][0]["momentum_buffer"])


def test_state_dict(pair: World) -> None:
    pair.run(_state_dict)


def _dropped() -> None:
    """An optimizer that is gone reduces nothing, and a second one over the same model works."""
    import torch

    model = linear()
    first = distributed_sgd(model)
    reference = weakref.ref(first)
    del first
    gc.collect()
    assert reference() is None
    model(rows()).sum().backward()
    torch.testing.assert_close(model.weight.grad, rows().sum(0).expand(2, 3))
    second = distributed_sgd(model)
    model.zero_grad()
    model(rows()).sum().backward()
    second.step()
    torch.testing.assert_close(model.weight.grad, expected_gradient())


def test_dropped_optimizer(pair: World) -> None:
    pair.run(_dropped)
