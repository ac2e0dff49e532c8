"""Averages that are dropped before a step, and steps past the distributed optimizer, on two real ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from error_codes import ends_with
from optimizer_model import distributed_sgd, linear, rows
from worlds import Keeper, World

from horovod.base.errors import TrainingCode

DROPPED = ends_with(TrainingCode.DROPPED_AVERAGES)
NOT_REDUCED = ends_with(TrainingCode.NOT_REDUCED)


def _same(model: Any) -> None:
    import torch

    import horovod.torch as hvd

    assert torch.equal(model.weight, hvd.broadcast(model.weight.detach(), 0))


def _dropped_by_all(to_none: bool, how: str) -> None:
    model = linear()
    optimizer = distributed_sgd(model)
    optimizer.zero_grad()
    for _ in range(2):
        before = model.weight.detach().clone()
        model(rows()).sum().backward()
        optimizer.zero_grad(set_to_none=to_none)
        skipping = optimizer.skip_synchronize() if how == "skip" else contextlib.nullcontext()
        with pytest.raises(AssertionError, match=DROPPED), skipping:
            optimizer.synchronize() if how == "synchronize" else optimizer.step()
        assert bool((model.weight == before).all())
        optimizer.zero_grad()
        model(rows()).sum().backward()
        optimizer.step()
        _same(model)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("how", ["step", "synchronize", "skip"])
def test_zero_grad_between_backward_and_step(pair: World, to_none: bool, how: str) -> None:
    pair.run(_dropped_by_all, to_none, how)


def _dropped_by_one() -> None:
    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    model(rows()).sum().backward()
    optimizer.step()
    model.zero_grad()
    model(rows()).sum().backward()
    if hvd.rank() == 1:
        optimizer.zero_grad()

    def goes_on() -> None:
        optimizer.step()
        model(rows()).sum().backward()
        optimizer.step()

    with pytest.raises(AssertionError, match=DROPPED):
        goes_on()


def test_one_rank_that_drops_is_an_error_on_all(pair: World) -> None:
    pair.run(_dropped_by_one)


def _skips() -> None:
    """A guard skips on all ranks; then one rank has an empty batch."""
    import horovod.torch as hvd

    for passes in (1, 2):
        model = linear()
        optimizer = distributed_sgd(model, backward_passes_per_step=passes)
        for step in range(6):
            optimizer.zero_grad()
            if not (step == 3 and hvd.rank() == 1):
                for _ in range(passes):
                    model(rows()).sum().backward()
            if step == 2:
                optimizer.zero_grad()
                optimizer.zero_grad(set_to_none=False)
                continue
            optimizer.step()
        _same(model)


def test_skipped_steps_are_fine(pair: World) -> None:
    pair.run(_skips)


def _unused(model: Any) -> Any:
    """The optimizer has a parameter that no loss uses, so backward() does not wait for the averages."""
    import torch

    import horovod.torch as hvd

    extra = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    named = [*model.named_parameters(), ("extra", extra)]
    return hvd.DistributedOptimizer(torch.optim.SGD([one for _, one in named], lr=0.1), named)


def _dropped_after_synchronize() -> None:
    model = linear()
    optimizer = _unused(model)
    model(rows()).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    with pytest.raises(AssertionError, match=DROPPED), optimizer.skip_synchronize():
        optimizer.step()
    # Gradients that the script sets itself are there to take a step with.
    model(rows()).sum().backward()
    optimizer.synchronize()
    kept = model.weight.grad.clone()
    optimizer.zero_grad()
    model.weight.grad = kept
    with optimizer.skip_synchronize():
        optimizer.step()
    _same(model)


def test_zero_grad_after_synchronize(pair: World) -> None:
    pair.run(_dropped_after_synchronize)


def _scaled(has_original: bool, unused: bool) -> None:
    """Infinite gradients on one rank make the averages infinite on all, and GradScaler skips the step."""
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = _unused(model) if unused else distributed_sgd(model)
    stepped = optimizer._hvd_original if has_original else optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for step in range(5):
        optimizer.zero_grad()
        factor = float("inf") if step in (1, 2) and hvd.rank() == 1 else 1.0
        scaler.scale(factor * model(rows()).sum()).backward()
        if step != 2 or unused:
            optimizer.synchronize()
            scaler.unscale_(stepped)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(stepped)
        else:
            scaler.step(stepped)
        scaler.update()
    assert scaler.get_scale() == 4.0 * 2**3 / 2**2
    _same(model)


@pytest.mark.parametrize("has_original", [False, True])
@pytest.mark.parametrize("unused", [False, True])
def test_steps_that_a_grad_scaler_skips(pair: World, has_original: bool, unused: bool) -> None:
    pair.run(_scaled, has_original, unused)


def _adversaries() -> None:
    """The generator's backward pass makes gradients of the discriminator too, which the script drops."""
    generator, discriminator = linear(), linear()
    optimizers = [distributed_sgd(generator), distributed_sgd(discriminator)]
    for _ in range(3):
        optimizers[0].zero_grad()
        discriminator(generator(rows())[:, [0, 1, 0]]).sum().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        discriminator(generator(rows()).detach()[:, [0, 1, 0]]).sum().backward()
        optimizers[1].step()
        discriminator(rows()).square().sum().backward()  # to look at gradients, not to train
        optimizers[1].zero_grad()
    _same(generator)
    _same(discriminator)


def test_gradients_that_only_another_optimizer_is_to_use(pair: World) -> None:
    pair.run(_adversaries)


def _with_extras() -> None:
    """Schedulers, averages of weights, closures, accumulation and frozen parameters."""
    import torch

    import horovod.torch as hvd

    for kind in ("plain", "foreach", "fused", "lbfgs", "closure", "frozen"):
        model = linear()
        model.bias.requires_grad_(kind != "frozen")
        if kind == "lbfgs":
            inner: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
        else:
            options = {kind: True} if kind in ("foreach", "fused") else {}
            inner = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        early = torch.optim.lr_scheduler.StepLR(inner, 2)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=2)
        late = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
        averaged = torch.optim.swa_utils.AveragedModel(model)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(rows()).square().sum()
                loss.backward()
            return loss

        for step in range(4):
            if kind in ("lbfgs", "closure"):
                optimizer.step(closure)
            else:
                closure()
                (inner if step == 2 else optimizer).step()
            optimizer.zero_grad()
            early.step()
            late.step()
            averaged.update_parameters(model)
        torch.optim.swa_utils.update_bn([rows()], averaged)
        _same(model)
        _same(averaged.module)


def test_loops_with_everything_are_fine(pair: World) -> None:
    pair.run(_with_extras)


def _closures_past() -> None:
    """A closure inside skip_synchronize() that has not synchronized would step with gradients of this rank."""
    import horovod.torch as hvd

    model = linear()
    optimizer = _unused(model)

    def closure(synchronizes: bool) -> Any:
        optimizer.zero_grad()
        loss = model(rows()).sum()
        loss.backward()
        if synchronizes:
            optimizer.synchronize()
        return loss

    with optimizer.skip_synchronize():
        optimizer.step(lambda: closure(True))
        before = model.weight.detach().clone()
        with pytest.raises(AssertionError, match=ends_with(TrainingCode.GRADIENTS_IN_FLIGHT)):
            optimizer.step(lambda: closure(False))
    assert bool((model.weight == before).all())
    optimizer.load_state_dict(optimizer.state_dict())
    # The gradients are still on their way, under names that the next test's optimizer has as well.
    hvd.barrier()


def test_a_closure_that_did_not_synchronize(pair: World) -> None:
    pair.run(_closures_past)


def _uneven() -> None:
    """Rank 0 drops its last averages, which rank 1 steps with, or does not have since it has joined."""
    import horovod.torch as hvd

    for between in (hvd.join, lambda: (hvd.shutdown(), hvd.init())):
        model = linear()
        optimizer = distributed_sgd(model)
        for step in range(3):
            if step == 2 and between is hvd.join and hvd.rank() == 1:
                break
            optimizer.zero_grad()
            model(rows()).sum().backward()
            if step < 2 or hvd.rank() == 1:
                optimizer.step()
        optimizer.zero_grad()
        between()
        hvd.broadcast_parameters(model.state_dict(), 0)
        for _ in range(2):
            optimizer.zero_grad()
            model(rows()).sum().backward()
            optimizer.step()


def test_after_join_and_in_another_world_nothing_is_held_against_a_rank(pair: World) -> None:
    pair.run(_uneven)


def _hooks() -> list[int]:
    model = linear()
    optimizer = distributed_sgd(model)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    counts = []
    for _ in range(2):
        model(rows()).sum().backward()
        optimizer.step()
        counts.append(len(calls))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
    return counts


def test_hooks_around_a_step_run_once_after_state_was_loaded(pair: World) -> None:
    assert pair.run(_hooks) == [[2, 4]] * 2


def _past(adasum: bool) -> None:
    import torch

    import horovod.torch as hvd

    model = linear()
    original = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"op": hvd.Adasum} if adasum else {"backward_passes_per_step": 2}
    optimizer = hvd.DistributedOptimizer(original, model.named_parameters(), **options)
    optimizer.load_state_dict(optimizer.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    ways = [original.step, lambda: torch.optim.SGD.step(optimizer), lambda: original.step(lambda: 0.0)]
    for way in ways:
        optimizer.zero_grad()
        model(rows()).sum().backward()
        before = model.weight.detach().clone()
        with pytest.raises(AssertionError, match=NOT_REDUCED):
            way()
        assert torch.equal(model.weight, before)
        if not adasum:
            model(rows()).sum().backward()
            way()  # with averages it is right
            way()  # also twice: they are the same on all ranks
            _same(model)
            optimizer.zero_grad()
            way()  # there is nothing to do a step with, nor was anything dropped
            for _ in range(2):
                model(rows()).sum().backward()
            optimizer.zero_grad()
            with pytest.raises(AssertionError, match=DROPPED):
                way()
            optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    scaler.scale(model(rows()).sum()).backward()
    with pytest.raises(AssertionError, match=NOT_REDUCED):
        scaler.step(original)


@pytest.mark.parametrize("adasum", [False, True])
def test_steps_past_the_distributed_optimizer(pair: World, adasum: bool) -> None:
    pair.run(_past, adasum)


@pytest.mark.parametrize(
    ("setting", "told"), [("HOROVOD_ADASUM_OVERLAP=1", True), ("HOROVOD_DIFFERENT_WEIGHTS=ignore", False)]
)
def test_settings(setting: str, told: bool) -> None:
    with Keeper(2, "shm", dict([setting.split("=")])) as keeper:
        assert keeper.get().run(_past_with_a_setting, told) == [told, told]


def _past_with_a_setting(adasum: bool) -> bool:
    import torch

    import horovod.torch as hvd

    model = linear()
    original = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"op": hvd.Adasum} if adasum else {"backward_passes_per_step": 2}
    optimizer = hvd.DistributedOptimizer(original, model.named_parameters(), **options)
    model(rows()).sum().backward()
    before = model.weight.detach().clone()
    with contextlib.suppress(AssertionError):
        original.step()
    if not torch.equal(model.weight, before):
        return False
    with pytest.raises(AssertionError, match=NOT_REDUCED):
        original.step()
    optimizer.step()
    _same(model)
    return True
