"""TorchState: models, optimizers and so on in lists, dicts and objects stay the objects that the script trains."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
from error_codes import ends_with
from worlds import World, warnings_of_horovod

from horovod.base.errors import TrainingCode

Pair = namedtuple("Pair", ["model", "optimizer"])


class Trainer:
    """An object of a script, which trains what it holds."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.forward = model.forward  # a bound method refers to the model as well
        self.steps = 0
        self.itself = self


@dataclass(frozen=True)
class Part:
    model: Any
    number: int


def _made(seed: int) -> tuple[Any, Any]:
    import torch

    import horovod.torch as hvd

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def _step(model: Any, optimizer: Any) -> None:
    """A batch of this rank's own."""
    import torch

    import horovod.torch as hvd

    optimizer.zero_grad()
    model(torch.arange(15.0, dtype=torch.float64).reshape(5, 3) * (hvd.rank() + 1)).square().mean().backward()
    optimizer.step()


def _values(model: Any, optimizer: Any) -> str:
    states = optimizer.state_dict()["state"]
    moments = {index: {key: one.tolist() for key, one in state.items()} for index, state in states.items()}
    return repr(({name: value.tolist() for name, value in model.state_dict().items()}, moments))


HOLDERS = {
    "list": lambda model, optimizer: [1, model, optimizer],
    "nested": lambda model, optimizer: {"a": [{"model": model}, ()], "b": (optimizer, [2])},
    "ordered": lambda model, optimizer: OrderedDict(model=model, optimizer=optimizer),
    "named tuple": Pair,
    "object": Trainer,
    "frozen": lambda model, optimizer: [Part(model, 3), optimizer],
    "twice": lambda model, optimizer: [model, {"again": model, "optimizer": optimizer}],
}


class Opaque:
    """Copies itself in a way of its own."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, memo: Any) -> Opaque:
        import copy

        return Opaque(copy.deepcopy(self.model))


def _trains_together(kind: str) -> str:
    import horovod.torch as hvd

    model, optimizer = _made(seed=hvd.rank())
    held = HOLDERS[kind](model, optimizer)
    state = hvd.elastic.TorchState(held=held, batch=0)
    state.sync()

    def together(what: str) -> str:
        everyone = hvd.allgather_object(_values(model, optimizer))
        assert everyone[0] == everyone[1], f"{what}: the ranks have parted"
        return everyone[0]

    together("sync")
    _step(model, optimizer)
    state.commit()
    committed = together("commit")
    _step(model, optimizer)
    assert together("step") != committed
    state.restore()
    assert together("restore") == committed
    _step(model, optimizer)
    state.sync()
    synced = together("sync")
    _step(model, optimizer)
    state.restore()
    assert together("restore after sync") == synced != committed
    if kind != "named tuple":
        assert state.held is held
    return synced


@pytest.mark.parametrize("kind", HOLDERS)
def test_models_in_containers_train_together(pair: World, kind: str) -> None:
    first, second = pair.run(_trains_together, kind)
    assert first == second


def _copied_otherwise() -> None:
    import torch

    import horovod.torch as hvd

    with warnings_of_horovod() as said:
        hvd.elastic.TorchState(box=[Opaque(torch.nn.Linear(1, 1))], heap={torch.nn.Linear(1, 1)})
        for one, words in zip(said, (("heap", "Linear", "list"), ("box[0].model", "Linear")), strict=True):
            assert [word for word in words if word not in one] == []
        del said[:]
        model = torch.nn.Linear(1, 1)
        state = hvd.elastic.TorchState(model, heap={model}, numbers={1, 2}, kind=torch.nn.Linear)
        state.restore()
        assert state.heap == {model}
        assert said == []


def test_parts_that_a_state_can_not_keep_are_named(pair: World) -> None:
    pair.run(_copied_otherwise)


def _all_kinds_in_a_list() -> None:
    import torch
    from torch.utils.data import DataLoader

    import horovod.torch as hvd

    rank = hvd.rank()
    model, optimizer = _made(seed=rank)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 + rank)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    generator = torch.Generator().manual_seed(rank)
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    loader = DataLoader(range(10), batch_size=2, sampler=sampler)
    kept = [schedule, scaler, loader, generator, {"weight": weight}, model, optimizer]
    state = hvd.elastic.TorchState(kept=kept, losses=[rank])
    state.sync()
    assert [id(one) for one in state.kept] == [id(one) for one in kept]
    assert (weight.tolist(), scaler.get_scale(), state.losses) == ([0.0, 0.0], 8.0, [0])
    of_rank_0 = torch.Generator().manual_seed(0)
    assert torch.rand(2, generator=generator).tolist() == torch.rand(2, generator=of_rank_0).tolist()

    state.commit()
    expected = torch.rand(2, generator=generator).tolist()
    _step(model, optimizer)
    schedule.step()
    sampler.record_batch(0, 2)
    scaler.scale(torch.ones(1))
    scaler.update(16.0)
    weight.data.fill_(5)
    state.losses.append(1)
    kept.append("more")
    assert optimizer.param_groups[0]["lr"] == 0.05
    state.restore()
    assert torch.rand(2, generator=generator).tolist() == expected
    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch) == (0.1, 0)
    assert (weight.tolist(), scaler.get_scale(), state.losses) == ([0.0, 0.0], 8.0, [0])
    assert (sampler.processed_num, len(sampler), len(kept)) == (0, 5, 7)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05, "the scheduler steers the optimizer that trains"


def test_every_kind_of_part_in_a_list(pair: World) -> None:
    pair.run(_all_kinds_in_a_list)


def _made_later() -> str:
    """What the others have made since they began: a newcomer has none of it."""
    import copy

    import torch

    import horovod.torch as hvd

    model, optimizer = _made(seed=hvd.rank())
    state = hvd.elastic.TorchState(model, optimizer, best=None, history=[], trainers={})
    state.sync()
    is_old = hvd.rank() == 0
    best = copy.deepcopy(model)
    if is_old:
        state.best = best
        state.history += [copy.deepcopy(model), 7]
        state.trainers["a"] = Trainer(model, optimizer)
        state.commits = state._commits = 3
    state.sync()
    assert state.trainers["a"].model is model
    assert state.trainers["a"].itself is state.trainers["a"]
    assert state.best is best or not is_old
    assert state.history[1] == 7
    assert state.best[0].weight.tolist() == state.history[0][0].weight.tolist() == model[0].weight.tolist()
    torch.nn.init.zeros_(state.best[0].weight)
    state.restore()
    assert state.best[0].weight.tolist() == model[0].weight.tolist()
    return _values(model, optimizer)


def test_what_a_newcomer_does_not_have_yet(pair: World) -> None:
    first, second = pair.run(_made_later)
    assert first == second


def _optimizer_made_later() -> str:
    import horovod.torch as hvd

    state = hvd.elastic.TorchState(models=[], batch=0)
    if hvd.rank() == 0:
        state.models += _made(seed=0)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.DIFFERENT_STATES, "models[1]")) as error:
        state.sync()
    return str(error.value)


def test_an_optimizer_that_a_newcomer_does_not_have(pair: World) -> None:
    first, second = pair.run(_optimizer_made_later)
    assert first == second
    assert "rank 1" in first


def _left_out(way: str) -> list[str]:
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    momentum = 0.0 if way == "without momentum" else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    if way == "distributed":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    elsewhere = {"given": {"optimizer": optimizer}, "in a list": {"more": [optimizer]}}
    state = hvd.elastic.TorchState(model, **elsewhere.get(way, {"plain": None}))
    state.sync()
    with warnings_of_horovod() as said:
        state.commit()
        assert said == [], "it has not taken a step"
        for _ in range(2):
            _step(model, optimizer)
            if way == "its state_dict":
                state.plain = optimizer.state_dict()
            state.commit()
    return said


@pytest.mark.parametrize("way", ["plain", "distributed", "given", "in a list", "its state_dict", "without momentum"])
def test_optimizers_that_a_state_leaves_out(pair: World, way: str) -> None:
    first, second = pair.run(_left_out, way)
    assert second == []
    if way not in ("plain", "distributed"):
        assert first == []
    else:
        assert len(first) == 1
        assert "SGD" in first[0]
        assert "momentum_buffer" in first[0]
