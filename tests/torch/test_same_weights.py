"""Ranks that train different weights are told so in the first step, and ranks that do not are told nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from error_codes import ends_with
from optimizer_model import distributed_sgd, linear, rows
from worlds import Keeper, World

from horovod.base.errors import TrainingCode

CODE = f"[{TrainingCode.DIFFERENT_WEIGHTS.value}]"


@pytest.fixture(scope="module")
def strict() -> Iterator[Keeper]:
    with Keeper(2, "shm", {"HOROVOD_DIFFERENT_WEIGHTS": "error"}) as keeper:
        yield keeper


@pytest.fixture(scope="module")
def again() -> Iterator[Keeper]:
    with Keeper(2, "shm", {"HOROVOD_COMPARE_WEIGHTS_STEPS": "3"}) as keeper:
        yield keeper


def _step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(rows()).sum().backward()
    optimizer.step()


def _two_steps(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        _step(model, optimizer)


def _told(model: Any, optimizer: Any, steps: int = 1) -> list[str]:
    """The warnings of these steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            _step(model, optimizer)
    return [f"{one.filename}: {one.message}" for one in caught if CODE in str(one.message)]


def _options(case: str) -> dict[str, Any]:
    import horovod.torch as hvd

    return {
        "averages": {},
        "sums": {"op": hvd.Sum},
        "adasum": {"op": hvd.Adasum},
        "predivided": {"gradient_predivide_factor": 3.0},
        "groups": {"groups": 1},
        "two passes": {"backward_passes_per_step": 2},
        "fp16": {"compression": hvd.Compression.fp16},
    }[case]


CASES = ["averages", "sums", "adasum", "predivided", "groups", "two passes", "fp16"]


def _forgotten_broadcast(case: str) -> tuple[list[str], list[str]]:
    import horovod.torch as hvd

    told = []
    for seed in (hvd.rank(), 0):
        model = linear(seed)
        told.append(_told(model, distributed_sgd(model, **_options(case)), steps=4))
    return told[0], told[1]


@pytest.mark.parametrize("case", CASES)
def test_a_forgotten_broadcast_is_told_once_on_rank_0(pair: World, case: str) -> None:
    (on_0, quiet_0), (on_1, quiet_1) = pair.run(_forgotten_broadcast, case)
    assert len(on_0) == 1
    assert on_0[0].startswith(__file__), "the warning must point to the script"
    for part in ("step 1", "parameter 'weight'", "rank 1", "'bias'", "hvd.broadcast_parameters("):
        assert part in on_0[0]
    assert "broadcast_optimizer_state" not in on_0[0]
    assert (on_1, quiet_0, quiet_1) == ([], [], [])


def test_ranks_that_differ_are_named(world: World) -> None:
    def differs_on_rank_1() -> list[str]:
        import horovod.torch as hvd

        model = linear(int(hvd.rank() == 1))
        return _told(model, distributed_sgd(model))

    on_0, *others = world.run(differs_on_rank_1)
    assert len(on_0) == 1
    assert "on rank 1 differs" in on_0[0]
    assert not any(others)


def _an_error(case: str) -> tuple[str, bool, list[str]]:
    import horovod.torch as hvd

    model = linear(hvd.rank())
    before = copy.deepcopy(model.state_dict())
    optimizer = distributed_sgd(model, **_options(case))
    with pytest.raises(ValueError, match=ends_with(TrainingCode.DIFFERENT_WEIGHTS, "weight")) as caught:
        _two_steps(model, optimizer)  # the second one because of two passes
    same = all(bool((before[name] == value).all()) for name, value in model.state_dict().items())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.load_state_dict(optimizer.state_dict())
    return str(caught.value), same, _told(model, optimizer, 3)


@pytest.mark.parametrize("case", ["averages", "sums", "adasum", "two passes"])
def test_a_setting_makes_it_an_error_on_all_ranks_before_the_step(strict: Keeper, case: str) -> None:
    outcomes = strict.get().run(_an_error, case)
    assert len({sentence for sentence, _, _ in outcomes}) == 1
    assert all(unchanged and not later for _, unchanged, later in outcomes)


def _something_of_one_rank(what: str) -> list[str]:
    """Told by the steps after rank 0 alone has changed something, of which the first ones are equal on all ranks."""
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=what == "scale")
    if what == "scale" and hvd.rank() == 0:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
    if what == "scale":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                optimizer.zero_grad()
                scaler.scale(model(rows()).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        return [str(one.message) for one in caught if CODE in str(one.message)]
    assert _told(model, optimizer, 2) == []
    if hvd.rank() == 0:
        loaded = optimizer.state_dict()
        if what == "state":
            loaded["state"] = {key: {"momentum_buffer": torch.ones(2)} for key in (1,)}
        if what == "learning rate":
            loaded["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(loaded)
    return _told(model, optimizer, 4)


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("state", ["'momentum_buffer' of parameter", "broadcast_optimizer_state"]),
        ("learning rate", ["'lr' of parameter group 0 (0.5 on rank 0, 0.1 on rank 1)", "broadcast_optimizer_state"]),
        ("scale", ["'scale' of the GradScaler (8 on rank 0, 4 on rank 1)", "scaler.load_state_dict("]),
    ],
)
def test_a_checkpoint_loaded_on_one_rank_only(pair: World, what: str, parts: list[str]) -> None:
    on_0, on_1 = pair.run(_something_of_one_rank, what)
    assert len(on_0) == 1
    for part in parts:
        assert part in on_0[0]
    assert on_1 == []


def _by_intent() -> list[str]:
    import torch

    import horovod.torch as hvd

    told = []
    # A frozen layer, and one that only rank 1 has.
    model = torch.nn.ModuleDict({"shared": linear(), "own": linear(hvd.rank())})
    model["own"].requires_grad_(False)
    parameters = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one for _, one in parameters], 0.1), parameters)
    told += _told(model["shared"], optimizer, 2)
    # Each rank is alone in a process set, or outside of it.
    for rank in range(hvd.size()):
        alone = hvd.add_process_set([rank])
        model = linear(hvd.rank())
        told += _told(model, distributed_sgd(model, process_set=alone), 2)
        hvd.remove_process_set(alone)
    # The same checkpoint on all ranks, broadcast state, and a learning rate that a scheduler changes.
    model = linear()
    optimizer = distributed_sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        told += _told(model, optimizer)
        scheduler.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if hvd.rank() == 1:
            optimizer.state.clear()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return told


def test_differences_by_intent_are_not_told() -> None:
    with World(2, "shm", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as world:
        assert world.run(_by_intent) == [[], []]


def _late_and_alone() -> list[str]:
    """Rank 1 makes no gradients, so rank 0's backward pass does not wait; and only rank 0 has loaded something."""
    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            if step == 3 and hvd.rank() == 0:
                loaded = optimizer.state_dict()
                loaded["param_groups"][0]["lr"] = 0.5
                optimizer.load_state_dict(loaded)
            optimizer.zero_grad()
            if (hvd.rank() + step) % 2:
                model(rows()).sum().backward()
            optimizer.step()
    return [str(one.message) for one in caught if CODE in str(one.message)]


def test_ranks_without_gradients_compare_too(pair: World) -> None:
    on_0, on_1 = pair.run(_late_and_alone)
    assert len(on_0) == 1
    assert "'lr' of parameter group 0" in on_0[0]
    assert on_1 == []


def _joined() -> list[str]:
    import horovod.torch as hvd

    model = linear(hvd.rank())
    optimizer = distributed_sgd(model)
    told = _told(model, optimizer, 3) if hvd.rank() == 0 else []
    hvd.join()
    assert told == []
    return _told(model, optimizer, 3)


def test_they_are_compared_when_a_rank_that_has_joined_is_back(pair: World) -> None:
    on_0, on_1 = pair.run(_joined)
    assert len(on_0) == 1
    assert on_1 == []


def _changed_in_the_middle() -> list[int]:
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    told = []
    for step in range(8):
        if step == 3 and hvd.rank() == 1:
            with torch.no_grad():
                model.bias += 1.0
        told.append(len(_told(model, optimizer)))
    return told


def test_a_setting_compares_again_every_so_many_steps(again: Keeper) -> None:
    on_0, on_1 = again.get().run(_changed_in_the_middle)
    assert sum(on_0[:3]) == 0
    assert sum(on_0[3:]) > 0
    assert sum(on_1) == 0


def _in_another_world() -> tuple[list[str], list[str]]:
    import torch

    import horovod.torch as hvd

    model = linear()
    optimizer = distributed_sgd(model)
    before = _told(model, optimizer, 2)
    hvd.shutdown()
    with torch.no_grad():
        model.weight += 1.0 if hvd.is_initialized() else 0.0
    hvd.init()
    if hvd.rank() == 1:
        with torch.no_grad():
            model.weight += 1.0
    return before, _told(model, optimizer, 3)


def test_the_first_step_of_another_world_compares_again() -> None:
    with World(2, "shm") as world:
        (before, after), on_1 = world.run(_in_another_world)
    assert before == []
    assert len(after) == 1
    assert on_1 == ([], [])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "complex64", "int8", "bool", "int64"])
def test_a_digest_sees_each_number(dtype: str) -> None:
    import torch

    from horovod.torch.same_weights import _digest

    kind = getattr(torch, dtype)
    for length in (1, 7, 5000, 1 << 15, (1 << 16) + 3):
        tensor = torch.zeros(length, dtype=kind)
        seen = {_digest([("a", "", tensor)]), _digest([("b", "", tensor)]), _digest([("a", "x", tensor)])}
        assert len(seen) == 3
        for place in {0, length // 2, length - 1}:
            tensor[place] = 1
            changed = _digest([("a", "", tensor)])
            assert changed not in seen
            seen.add(changed)  # and each change after the others


def test_a_digest_is_of_numbers_and_not_of_memory() -> None:
    """Strides, place in memory and conjugate bits do not count, but for the numbers that they make."""
    import torch

    from horovod.torch.same_weights import _digest

    tensor = torch.randn(300, 200)
    others = [tensor.t().contiguous().t(), torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(300, 200)]
    assert {_digest([("a", "", one)]) for one in others} == {_digest([("a", "", tensor)])}
    values = torch.randn(70_001, dtype=torch.complex64)
    values[0] = 1j  # an odd count of signs in a row
    values[1] = 1.0
    assert _digest([("a", "", values.conj())]) == _digest([("a", "", values.conj().resolve_conj())])
    assert _digest([("a", "", values.conj())]) != _digest([("a", "", values)])
