"""state.step(): a failure undoes no step that a rank has taken, and the ranks agree on which steps were taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import step_training
from error_codes import ends_with
from worlds import World

from horovod.base.errors import TrainingCode
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

LOST = HorovodInternalError("a rank was lost")


def _training() -> tuple[Any, Any, Any]:
    """A model with buffers and random numbers, its optimizer and scheduler, equal on all ranks."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(5)
    layers = (torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    model = torch.nn.Sequential(*layers).double()
    plain = torch.optim.Adam(model.parameters(), lr=0.25)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    torch.manual_seed(6)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def _backward(model: Any, step: int) -> None:
    import torch

    rows = torch.arange(15, dtype=torch.float64).reshape(5, 3) % (step + 2)
    model(rows).square().sum().backward()


def _everything(state: Any, with_random: bool = True) -> str:
    import torch

    model = {name: value.tolist() for name, value in state.model.state_dict().items()}
    optimizer = state.optimizer.state_dict()
    moments = {key: {name: value.tolist() for name, value in one.items()} for key, one in optimizer["state"].items()}
    random = torch.get_rng_state().tolist() if with_random else None
    return repr((model, moments, optimizer["param_groups"], state.late.state_dict(), state.batch, random))


def _state() -> Any:
    import horovod.torch as hvd

    model, optimizer, scheduler = _training()
    return hvd.elastic.TorchState(model, optimizer, late=scheduler, batch=0)


def _one(state: Any) -> None:
    state.optimizer.zero_grad()
    _backward(state.model, state.batch)
    state.batch += 1
    state.step(state.late.step)


@contextlib.contextmanager
def _vote_is_lost(before: bool) -> Iterator[None]:
    """The vote fails here: before it takes place on any rank, or after it is over on the others."""
    from horovod.torch.elastic import state as module

    vote = module.allreduce_

    def lost(*arguments: Any, **options: Any) -> Any:
        if not before:
            vote(*arguments, **options)
        raise LOST

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "allreduce_", lost)
        with pytest.raises(HorovodInternalError):
            yield


def _equals_plain_steps() -> None:
    state = _state()
    for _ in range(3):
        _one(state)
    by_steps = _everything(state)
    model, optimizer, scheduler = _training()
    for step in range(3):
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.step()
        scheduler.step()
    assert str({name: value.tolist() for name, value in model.state_dict().items()}) in by_steps


def test_a_step_is_that_of_the_optimizer(pair: World) -> None:
    pair.run(_equals_plain_steps)


def _nobody_has_taken_it(steps_before: int) -> None:
    """The failed step is repeated from where it began: buffers, rates and plain values too, and after another step of
    this kind random numbers.
    """
    with_random = steps_before > 0
    state = _state()
    state.sync()
    for _ in range(steps_before):
        _one(state)
    at_boundary = _everything(state, with_random)
    with _vote_is_lost(before=True):
        _one(state)
    state.restore()
    state.restore()  # another world may fail before it stands
    state.sync()
    assert _everything(state, with_random) == at_boundary
    if not with_random:
        return
    _one(state)
    repeated = _everything(state)
    other = _state()
    for _ in range(steps_before + 1):
        _one(other)
    assert repeated == _everything(other)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_that_no_rank_has_taken_is_repeated(pair: World, steps_before: int) -> None:
    pair.run(_nobody_has_taken_it, steps_before)


def _rank_0_has_taken_it(steps_before: int) -> str:
    import horovod.torch as hvd

    state = _state()
    state.sync()
    # As a callback for a new world does.
    state.register_reset_callbacks([lambda: state.optimizer.param_groups[0].update(weight_decay=0.125)])
    for _ in range(steps_before):
        _one(state)
    if hvd.rank() == 0:
        _one(state)
    else:
        with _vote_is_lost(before=False):
            _one(state)
    state.restore()
    state.on_reset()
    state.sync()
    assert state.batch == steps_before + 1
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.125
    _one(state)
    assert state._commits == steps_before + 2
    return _everything(state)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_that_some_ranks_have_taken_is_taken_by_all(pair: World, steps_before: int) -> None:
    first, second = pair.run(_rank_0_has_taken_it, steps_before)
    assert first == second


def _within_a_step() -> None:
    state = _state()
    _one(state)
    at_boundary = _everything(state)
    state.optimizer.zero_grad()
    _backward(state.model, 1)
    state.batch += 1
    state.restore()
    assert _everything(state) == at_boundary
    state.batch = 7
    state.commit()  # which copies the weights, and counts from now on
    _backward(state.model, 1)
    state.optimizer.step()
    state.restore()
    assert state.batch == 7
    assert _everything(state)[:200] == at_boundary[:200]


def test_back_to_the_last_step_or_commit(pair: World) -> None:
    pair.run(_within_a_step)


def _newcomer() -> str:
    import horovod.torch as hvd
    from horovod.common import elastic

    state = _state()
    state.sync()
    if hvd.rank() == 0:
        state._voted = lambda news: news
        state.optimizer._hvd_reducer.enabled = False
        state.optimizer.synchronize = lambda: None
        state.optimizer.param_groups[0]["lr"] = 0.125
        state.batch = 3
        state._steps.prepare(state.optimizer, lambda: None)
        state._steps.take()
        state._at_boundary()
        state.batch = 9
        state.restore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "_is_newcomer", lambda: hvd.rank() == 1)
        state.sync()
    return repr((state.batch, state.optimizer.param_groups[0]["lr"]))


def test_a_newcomer_gets_what_the_last_step_has_made(pair: World) -> None:
    assert pair.run(_newcomer) == ["(3, 0.125)"] * 2


def _news() -> int:
    import horovod.torch as hvd
    from horovod.common.elastic import HostUpdateResult

    state = _state()
    if hvd.rank() == 0:
        state.on_hosts_updated(1.0, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        _one(state)
    assert interrupt.value.skip_sync
    _one(state)
    return int(state.batch)


def test_news_of_hosts_comes_after_the_step(pair: World) -> None:
    assert pair.run(_news) == [2, 2]


def _scaled() -> list[float]:
    """A step with infinite gradients is skipped on all ranks and counts; the scale is part of the boundary."""
    import torch

    import horovod.torch as hvd

    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    state = hvd.elastic.TorchState(model, optimizer, scaler=scaler, batch=0)

    def one(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), factor)).sum()).backward()
        state.step(scaler=scaler)

    one(0.25)
    one(float("inf"))
    assert scaler.get_scale() == 8.0
    scaler.update(1024.0)
    state.restore()
    assert scaler.get_scale() == 8.0
    assert state._commits == 2
    weights: list[float] = model.weight.flatten().tolist()
    return weights


def test_a_scaler_takes_the_step(pair: World) -> None:
    assert pair.run(_scaled) == [[0.75, 0.75]] * 2


def _fails_after_the_update() -> None:
    def fails() -> None:
        raise LOST

    state = _state()
    _backward(state.model, 0)
    # It must not be taken for a step that can be repeated: the weights have changed.
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "collective")):
        state.step(fails)
    assert state._steps.standing == 0


def test_a_collective_that_fails_in_what_follows_a_step(pair: World) -> None:
    pair.run(_fails_after_the_update)


def _refused() -> None:
    import torch

    import horovod.torch as hvd

    code = TrainingCode.UNSUPPORTED_OPTIMIZER
    model = torch.nn.Linear(1, 1)

    def adam() -> Any:
        return torch.optim.Adam(model.parameters())

    none = hvd.elastic.TorchState(model)
    with pytest.raises(ValueError, match=ends_with(code, "0")):
        none.step()
    plain = hvd.elastic.TorchState(model, adam())
    with pytest.raises(ValueError, match=ends_with(code, "hvd.DistributedOptimizer")):
        plain.step()
    with pytest.raises(ValueError, match=ends_with(code, "optimizer=")):
        plain.step(optimizer=adam())
    named = list(model.named_parameters())
    adasum = hvd.elastic.TorchState(model, hvd.DistributedOptimizer(adam(), named, op=hvd.Adasum))
    with pytest.raises(ValueError, match=ends_with(code, "Adasum")):
        adasum.step()
    state = _state()
    if hvd.rank() == 1:
        state.commit = state._count_commit
        state.commit()
    with pytest.raises(ValueError, match=ends_with(TrainingCode.DIFFERENT_STATES, "1", "2")):
        _one(state)


def test_what_a_step_can_not_be(pair: World) -> None:
    pair.run(_refused)


# -- ranks that are killed ---------------------------------------------------------------------------------------------
@pytest.mark.longer
@pytest.mark.parametrize(("size", "kills"), [(2, 3), (4, 6)])
def test_kills_at_any_moment_lose_no_step_and_no_sample(tmp_path: Any, size: int, kills: int) -> None:
    assert step_training.chaos(tmp_path, size=size, kills=kills, seed=size) >= kills
