"""broadcast_parameters, broadcast_optimizer_state, broadcast_object and allgather_object."""

from __future__ import annotations

import re
from typing import Any

import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode, TrainingCode

SIZES = (0, 1, 900, 1016, 1017, 5000, 300_000)


class Thing:
    def __init__(self, value: object) -> None:
        self.value = value


def _objects() -> None:
    import horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    for length in SIZES:
        mine = Thing("x" * length) if rank == 1 else [rank]  # of another type elsewhere
        result: Any = hvd.broadcast_object(mine, root_rank=1)
        assert result.value == "x" * length
        if rank == 1:
            assert result is mine
    assert hvd.broadcast_object(None if rank else {"a": 1}, name="named") == {"a": 1}

    for length in SIZES:
        everything: list[Any] = hvd.allgather_object([rank] * length if rank else None)
        assert everything == [None, *([r] * length for r in range(1, size))]
    assert hvd.allgather_object(lambda: rank, name="named")[1]() == 1


def test_objects(world: World) -> None:
    world.run(_objects)


class Stubborn:
    def __reduce__(self) -> Any:
        raise TypeError("not me")


def _not_picklable() -> None:
    import horovod.torch as hvd

    mine = Stubborn() if hvd.rank() == 1 else "fine"
    for call in (lambda: hvd.broadcast_object(mine, root_rank=1), lambda: hvd.allgather_object(mine)):
        if hvd.rank() == 1:
            with pytest.raises(TypeError, match="not me"):
                call()
        else:
            told = ends_with(OperationCode.UNPICKLABLE, "rank 1", "Stubborn", "TypeError: not me")
            with pytest.raises(ValueError, match=told):
                call()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_an_object_that_can_not_be_pickled_is_told_to_all(world: World) -> None:
    world.run(_not_picklable)


def _model() -> Any:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    return model.to(memory_format=torch.channels_last)


def _parameters() -> None:
    import torch

    import horovod.torch as hvd

    root = hvd.size() - 1
    torch.manual_seed(root)
    expected = _model().state_dict()
    expected["1.num_batches_tracked"].fill_(root)

    for pack in (
        lambda m: m.state_dict(),
        lambda m: [*m.named_parameters(), *m.named_buffers()],
        lambda m: [*m.parameters(), *m.buffers()],
        lambda m: (pair for pair in [*m.named_parameters(), *m.named_buffers()]),
    ):
        torch.manual_seed(hvd.rank())
        model = _model()
        model[1].num_batches_tracked.fill_(hvd.rank())
        hvd.broadcast_parameters(pack(model), root_rank=root)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    for wrong in (42, "weights", torch.ones(1)):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "invalid params of type")):
            hvd.broadcast_parameters(wrong, root_rank=0)
    with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_A_TENSOR, "'extra'", "dict")):
        hvd.broadcast_parameters({"extra": {}}, root_rank=0)


def test_parameters(world: World) -> None:
    world.run(_parameters)


# Every optimizer of torch.optim by name, with options that give it as much state as possible.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "ASGD": {"lr": 0.1},
    "Adadelta": {"lr": 0.1},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.1},
    "Muon": {"lr": 0.1},
    "SparseAdam": {"lr": 0.1},
}


def _make(name: str, rank: int, steps: int, wrap: bool) -> tuple[Any, Any]:
    import torch
    from torch import nn

    import horovod.torch as hvd

    torch.manual_seed(rank)
    sparse = name == "SparseAdam"
    model: Any = nn.Embedding(6, 4, sparse=sparse) if sparse else nn.Linear(6, 4, bias=name != "Muon")
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([1, 3]) if sparse else torch.rand(5, 6)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, optimizer


def _flat(value: Any) -> Any:
    """A state_dict in a form that == compares."""
    import torch

    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.double().tolist())
    if isinstance(value, dict):
        return {key: _flat(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_flat(item) for item in value]
    return value


def _optimizer_state(name: str, steps: list[int], wrap: bool) -> None:
    import horovod.torch as hvd

    rank, root = hvd.rank(), 1
    model, optimizer = _make(name, rank, steps[rank % len(steps)], wrap)
    weights = _flat(model.state_dict())
    expected = _flat(_make(name, root, steps[root % len(steps)], False)[1].state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert _flat(optimizer.state_dict()) == expected
    assert _flat(model.state_dict()) == weights, "weights must not be touched"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("steps", [[0, 0], [3, 3], [0, 3], [3, 0]], ids=["fresh", "stepped", "root", "others"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state(pair: World, name: str, steps: list[int]) -> None:
    pair.run(_optimizer_state, name, steps, False)
    pair.run(_optimizer_state, name, steps, True)


def test_optimizer_state_among_many(world: World) -> None:
    world.run(_optimizer_state, "Adam", [2, 5, 0], False)


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    import torch

    known = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert known - {"Optimizer", "LBFGS"} <= set(OPTIMIZERS)


def _special_optimizers() -> None:
    import torch

    import horovod.torch as hvd

    rank = hvd.rank()
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.UNSUPPORTED_OPTIMIZER, "torch.optim.LBFGS")):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([weight]), root_rank=0)

    # A learning rate that is a tensor, nested state, and state that is not a parameter's.
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1 + rank), capturable=False, foreach=False)
    learning_rate = optimizer.param_groups[0]["lr"]
    optimizer.state[weight]["nested"] = {"list": [torch.full((2,), float(rank)), f"rank {rank}"]}
    optimizer.state["global"] = {"counter": rank}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] is learning_rate
    assert learning_rate.item() == pytest.approx(0.1)
    assert _flat(optimizer.state[weight]["nested"]) == _flat({"list": [torch.zeros(2), "rank 0"]})
    assert optimizer.state["global"] == {"counter": 0}


def test_special_optimizers(pair: World) -> None:
    pair.run(_special_optimizers)


def _different_groups(how: str) -> None:
    import torch

    import horovod.torch as hvd

    if how == "number":
        weights = [torch.ones(1, requires_grad=True) for _ in range(1 + hvd.rank())]
    else:
        lengths = {"first": 2, "second": 2 + (how == "shape")}
        named = [(name, torch.ones(length, requires_grad=True)) for name, length in lengths.items()]
        if hvd.rank() == 1:
            named.reverse()
        weights = [weight for _, weight in named]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    if how == "name":
        optimizer = hvd.DistributedOptimizer(optimizer, named)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@pytest.mark.parametrize(
    ("how", "facts"), [("number", ("[2]", "[1]")), ("shape", ("[3]", "[2]")), ("name", ("'second'", "'first'"))]
)
def test_different_parameter_groups(pair: World, how: str, facts: tuple[str, str]) -> None:
    outcomes = pair.outcomes(_different_groups, how)
    assert outcomes[0].error is None
    assert isinstance(outcomes[1].error, ValueError)
    assert re.search(ends_with(TrainingCode.DIFFERENT_MODELS, *facts), str(outcomes[1].error))


def _agreed_sizes() -> list[int]:
    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    counts = []
    for length in (4000, 4010, 4020):
        hvd.broadcast_object("x" * length, name="repeated")
        hvd.allgather_object("x" * length, name="repeated")
        counts.append(current().counters()["operations_announced"])
    return counts


def test_objects_of_about_the_same_size_are_agreed_on_once(pair: World) -> None:
    first, second, third = pair.run(_agreed_sizes)[0]
    assert first == second == third
