"""Optimizers whose parameters have equal names, as those of two models of one class: exact values, in every order."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
from error_codes import ends_with
from worlds import Keeper, World

from horovod.base.errors import TrainingCode, code_of
from horovod.common import optimizer_numbers
from horovod.common.optimizer_numbers import Made, check_order, guess_late, numbered, of_root, restart
from horovod.common.process_sets import global_process_set


# -- numbers, in one process -------------------------------------------------------------------------------------------
class _World:
    pass


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[_World]:
    """The last one is current."""
    them = [_World()]

    def current() -> _World:
        if not them:
            raise ValueError
        return them[-1]

    monkeypatch.setattr(optimizer_numbers, "current", current)
    return them


def _made(*names: str, is_copy: bool = False, late: bool = False) -> Made:
    return Made(names or ("weight",), global_process_set, is_copy, late=late)


def _step(*several: Made) -> list[str]:
    """Begins a step of each, in this order; the names of their first parameters."""
    for one in several:
        one.begin()
    for one in several:
        one.end()
    return [one.first() for one in several]


def test_numbers_are_in_the_order_of_creation(worlds: list[_World]) -> None:
    first, other, second = _made("a", "b"), _made("c"), _made("b", "z")
    assert _step(second, other, first) == ["b#2", "c", "a"]
    assert (first.label("b"), second.label("z")) == ("b", "z")
    assert _step(first, second, _made("b")) == ["a", "b#2", "b#3"]


def test_no_number_comes_back(worlds: list[_World]) -> None:
    old = _made()
    for trial in range(20):
        assert _step(_made(), old) == [f"weight#{trial + 2}", "weight"]


@pytest.mark.parametrize("old_is_first", [False, True])
def test_one_made_later_in_either_order(worlds: list[_World], old_is_first: bool) -> None:
    old = _made()
    assert _step(old) == ["weight"]
    new = _made()
    for _ in range(2):
        names = _step(*((old, new) if old_is_first else (new, old)))
        assert names == (["weight", "weight#2"] if old_is_first else ["weight#2", "weight"])


@pytest.mark.parametrize("copy_is_first", [False, True])
def test_a_copy_made_before_another(worlds: list[_World], copy_is_first: bool) -> None:
    copied = _made(is_copy=True)
    new = _made()
    names = _step(*((copied, new) if copy_is_first else (new, copied)))
    assert names == (["weight#2", "weight"] if copy_is_first else ["weight", "weight#2"])


def test_copies_that_are_only_kept_have_no_number(worlds: list[_World]) -> None:
    one, kept = _made(), _made(is_copy=True)
    assert _step(one) == ["weight"]
    new = _made()
    assert _step(one, new, kept) == ["weight", "weight#2", "weight#3"]
    copies = [_made(is_copy=True) for _ in range(2)]
    assert _step(*reversed(copies), one) == ["weight#5", "weight#4", "weight"]


def test_a_copy_in_a_cycle_of_references_is_gone(worlds: list[_World]) -> None:
    gc.disable()
    try:
        cycle: list[Any] = [_made(is_copy=True)]
        cycle.append(cycle)
        del cycle
        assert _step(_made(is_copy=True)) == ["weight"]
    finally:
        gc.enable()


def test_more_parameters(worlds: list[_World]) -> None:
    first, second = _made("a"), _made("b")
    for one in (first, second):
        one.add(["noname.1.0", "0"])
    assert _step(second, first) == ["b", "a"]
    assert [one.label("noname.1.0") for one in (first, second)] == ["noname.1.0", "noname.1.0#2"]


def test_a_new_world_begins_with_those_of_its_state(worlds: list[_World]) -> None:
    """Survivors have made another one before, which is idle; newcomers have not."""
    idle, one, other = _made(), _made(), _made()
    assert _step(idle, one, other) == ["weight", "weight#2", "weight#3"]
    worlds.append(_World())
    restart([one, other])
    assert _step(other, one) == ["weight#2", "weight"]
    assert _step(_made(), idle) == ["weight#3", "weight#4"]


def test_a_new_world_without_a_state(worlds: list[_World]) -> None:
    gone, first, second = _made(), _made(), _made()
    assert _step(first) == ["weight#2"]
    del gone
    worlds.append(_World())
    assert _step(second, first) == ["weight#2", "weight"]


def test_one_that_is_made_in_each_world_is_the_first(worlds: list[_World]) -> None:
    old = _made()
    worlds.append(_World())
    restart()
    assert _step(_made()) == ["weight"]
    assert _step(old) == ["weight#2"]


def test_what_root_has_sent_has_the_number_of_root(worlds: list[_World]) -> None:
    """Root keeps its own; another rank gets a copy, and may use the one that it has made before all the same."""
    _made()
    on_root, own = _made(), _made()  # root has made a second one, and the other rank a third one
    with of_root():
        sent, kept = (Made(["weight"], global_process_set, True, on_root.numbers()) for _ in range(2))
    assert (_step(sent), sent.place) == (["weight#2"], on_root.place)
    copied = _made(is_copy=True)
    assert _step(copied, own, sent) == ["weight#4", "weight#3", "weight#2"], "as on root"
    assert _step(kept, on_root) == ["weight#5", "weight#6"]


def test_what_root_has_sent_beside_what_is_used(worlds: list[_World]) -> None:
    """As a plain value of an elastic state that refers to the optimizer."""
    own = _made()
    with of_root():
        sent = Made(["weight"], global_process_set, True, own.numbers())
    assert _step(own, _made(is_copy=True), sent) == ["weight", "weight#2", "weight#3"]


def test_guesses_of_a_rank_that_waits(worlds: list[_World]) -> None:
    """It answers by the names that the others use, and these stay true when it begins steps itself."""
    one, copies = _made(), [_made(is_copy=True) for _ in range(2)]
    guess_late()
    assert [copied.first() for copied in copies] == ["weight#2", "weight#3"]
    assert _step(*reversed(copies), one) == ["weight#3", "weight#2", "weight"]


def test_guesses_are_not_for_good(worlds: list[_World]) -> None:
    """Another rank, which does not wait, never sees the copy that is gone."""
    gone, copied = (_made(is_copy=True) for _ in range(2))
    guess_late()
    assert copied.first() == "weight#2"
    del gone
    assert _step(_made(), copied) == ["weight", "weight#2"]


def test_no_guess_in_the_middle_of_a_step(worlds: list[_World]) -> None:
    first, second = _made(), _made()
    second.begin()
    restart()
    guess_late()
    assert (first.first(), second.first()) == ("weight", "weight#2")
    second.end()
    assert _step(second, first) == ["weight#2", "weight"]


def test_while_init_waits_for_process_sets(worlds: list[_World]) -> None:
    world = worlds.pop()  # there is none before hvd.init() returns, though ranks wait for each other in it
    one = _made()
    guess_late()
    worlds.append(world)
    assert _step(_made(), one) == ["weight", "weight#2"]


def test_one_that_is_numbered_in_its_first_step(worlds: list[_World]) -> None:
    """A rank makes the first one, and the last one, only to look at."""
    looked_at = _made(late=True)
    one, other = _made(late=True), _made(late=True)
    with other.step(alone=True):
        assert other.first() == "weight"
    with one.step(alone=True):
        assert one.first() == "weight#2"
    guess_late()
    with looked_at.step():
        assert looked_at.first() == "weight#3"


def test_the_order_of_creation_is_compared() -> None:
    check_order({0: ("a.py:1", ["a.py:1", "a.py:2"]), 1: ("a.py:1", ["a.py:1", "a.py:2"])})
    check_order({0: ("a.py:1", ["a.py:1"]), 1: ("a.py:9", ["a.py:9"])})
    check_order({0: ("a.py:9", ["a.py:1", "a.py:9"]), 1: ("a.py:1", ["a.py:1"])})  # rank 0 has loaded another one
    with pytest.raises(ValueError, match=ends_with(TrainingCode.DIFFERENT_ORDER, "a.py:1", "rank 5", "a.py:2")):
        check_order({0: ("a.py:1", ["a.py:1", "a.py:2"]), 5: ("a.py:2", ["a.py:2", "a.py:1"])})


def test_those_of_one_line_are_told_apart(worlds: list[_World]) -> None:
    first, second = (_made(late=True) for _ in range(2))
    assert first.line()[0] == first.site
    assert second.line() == (f"{first.site} (number 2 of this line)", [first.place, second.place])
    worlds.append(_World())
    _step(second)
    assert second.line() == (first.site, [first.site])


def test_names() -> None:
    assert [numbered("weight", number) for number in range(3)] == ["weight", "weight#2", "weight#3"]


# -- broadcasts, on two ranks ------------------------------------------------------------------------------------------
def _broadcast_in_another_order(what: str, other_line: bool) -> list[float]:
    import torch

    import horovod.torch as hvd

    models = [_model(1.0), _model(1.0)]
    for value, model in enumerate(models):
        model.weight.data.fill_(10 * value + hvd.rank())
    optimizers = [torch.optim.SGD(model.parameters(), 1.0) for model in models]

    def send(place: int) -> None:
        if what == "parameters":
            hvd.broadcast_parameters(models[place].state_dict(), 0)
        else:
            hvd.broadcast_optimizer_state(optimizers[place], 0)

    def first() -> None:
        send(0)

    def second() -> None:
        send(1)

    def of_rank_0() -> None:
        send(0)

    if other_line:
        (of_rank_0 if hvd.rank() == 0 else first)()
        second()
        first()
    else:
        for one in (first, second) if hvd.rank() == 0 else (second, first):
            one()
    return [model.weight.item() for model in models]


@pytest.mark.parametrize("what", ["parameters", "optimizer_state"])
def test_ranks_broadcast_two_models_in_another_order(what: str, pair: World) -> None:
    for outcome in pair.outcomes(_broadcast_in_another_order, what, False):
        assert isinstance(outcome.error, ValueError), outcome.text
        message = str(outcome.error)
        assert code_of(message) is TrainingCode.DIFFERENT_ORDER, message
        assert message.count("test_equal_names.py:") >= 2, message


def test_ranks_broadcast_at_different_lines(pair: World) -> None:
    assert pair.run(_broadcast_in_another_order, "parameters", True) == [[0.0, 10.0]] * 2


# -- gradients, on two ranks -------------------------------------------------------------------------------------------
def _model(scale: float, sparse: bool = False) -> Any:
    import torch

    model: Any = torch.nn.Embedding(1, 1, sparse=True) if sparse else torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model.scale = scale
    model.input = torch.zeros(1, dtype=torch.int64) if sparse else torch.ones(1, 1)
    return model


def _backward(model: Any) -> None:
    import horovod.torch as hvd

    (model(model.input) * model.scale * (1 + hvd.rank())).sum().backward()


def _distributed(model: Any, name: str = "weight", **options: Any) -> Any:
    import torch

    import horovod.torch as hvd

    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), [(name, model.weight)], **options)


def _pair_of(case: str) -> list[tuple[Any, Any]]:
    import horovod.torch as hvd

    options: dict[str, Any] = {
        "groups": {"groups": 1},
        "compressed": {"compression": hvd.Compression.fp16},
        "passes": {"backward_passes_per_step": 2},
    }.get(case, {})
    models = [_model(scale, case == "sparse") for scale in (1.0, 100.0)]
    if case in ("deepcopy", "pickle"):
        pair = models[0], _distributed(models[0])
        other = copy.deepcopy(pair) if case == "deepcopy" else pickle.loads(pickle.dumps(pair))
        other[0].scale = 100.0
        return [pair, other]
    return [(model, _distributed(model, **options)) for model in models]


def _trained(case: str) -> list[float]:
    """Each rank runs the backward passes in another order."""
    import horovod.torch as hvd

    pairs = _pair_of(case)
    if case == "later":  # the second one is made when the first has taken a step
        model, optimizer = pairs[0]
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
        second = _model(100.0)
        pairs[1] = second, _distributed(second)
        model.weight.data.fill_(1.0)
    for _ in range(3):
        order = pairs if hvd.rank() == 0 else pairs[::-1]
        for model, _ in order:
            for _ in range(2 if case == "passes" else 1):
                _backward(model)
        for model, optimizer in pairs:
            optimizer.step()
            gradient = model.weight.grad.to_dense().item() / (2 if case == "passes" else 1)
            assert gradient == 1.5 * model.scale, (gradient, model.scale)
            optimizer.zero_grad()
    return [model.weight.item() for model, _ in pairs]


@pytest.mark.parametrize("case", ["plain", "groups", "compressed", "passes", "sparse", "deepcopy", "pickle", "later"])
def test_ranks_run_backward_passes_in_another_order(case: str, pair: World) -> None:
    passes = 2 if case == "passes" else 1
    assert pair.run(_trained, case) == [[1 - 3 * 1.5 * passes, 1 - 3 * 150.0 * passes]] * 2


def _one_rank_is_late(case: str) -> list[float]:
    """Rank 1 waits for something else that rank 0 does only after the backward passes, which wait for rank 1."""
    import torch

    import horovod.torch as hvd

    pairs = _pair_of(case)
    if hvd.rank() == 1:
        hvd.allreduce(torch.ones(1), name="in_between")
    for model, _ in pairs[::-1]:
        _backward(model)
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1), name="in_between")
    for _, optimizer in pairs:
        optimizer.step()
    return [model.weight.grad.item() for model, _ in pairs]


@pytest.mark.parametrize("case", ["plain", "deepcopy"])
def test_a_rank_that_is_late_answers_by_the_right_names(case: str, pair: World) -> None:
    assert pair.run(_one_rank_is_late, case) == [[1.5, 150.0]] * 2


def _one_is_kept() -> list[str]:
    """Rank 0 keeps the best of several trials, and a copy of each; another one waits in a cycle on rank 1."""
    import horovod.torch as hvd

    kept = []
    names = []
    for _ in range(4):
        model = _model(1.0)
        optimizer = _distributed(model)
        for _ in range(2):
            _backward(model)
            optimizer.step()
            assert model.weight.grad.item() == 1.5
            optimizer.zero_grad()
        names.append(optimizer._hvd_reducer.first_name())
        if hvd.rank() == 0:
            kept += [optimizer, copy.deepcopy((model, optimizer))]
        else:
            optimizer.itself = optimizer
    return names


def test_one_rank_keeps_old_optimizers(pair: World) -> None:
    names, of_the_other = pair.run(_one_is_kept)
    assert names == of_the_other
    assert len(set(names)) == 4


def _made_in_another_order() -> None:
    import horovod.torch as hvd

    models = [_model(scale) for scale in (1.0, 100.0)]  # of equal weights, so that these tell nothing

    def first() -> Any:
        return _distributed(models[0])

    def second() -> Any:
        return _distributed(models[1])

    # If they used them in one order, they would wait for different names.
    makers = [first, second] if hvd.rank() == 0 else [second, first]
    for maker, optimizer in [(maker, maker()) for maker in makers]:
        _backward(models[0 if maker is first else 1])
        optimizer.step()


def test_ranks_make_optimizers_in_another_order(pair: World) -> None:
    for outcome in pair.outcomes(_made_in_another_order):
        assert isinstance(outcome.error, ValueError), outcome.text
        message = str(outcome.error)
        assert code_of(message) is TrainingCode.DIFFERENT_ORDER, message
        assert message.count("test_equal_names.py:") >= 2, message
        assert "rank 0" in message
        assert "rank 1" in message


def _made_at_different_lines() -> list[float]:
    import horovod.torch as hvd

    models = [_model(scale) for scale in (1.0, 100.0)]
    if hvd.rank() == 0:
        one, two = _distributed(models[0]), _distributed(models[1])
    else:
        one = _distributed(models[0])
        two = _distributed(models[1])
    for model in models if hvd.rank() == 0 else models[::-1]:
        _backward(model)
    one.step()
    two.step()
    return [model.weight.grad.item() for model in models]


def test_made_at_different_lines(pair: World) -> None:
    assert pair.run(_made_at_different_lines) == [[1.5, 150.0]] * 2


def _in_a_process_set() -> list[float]:
    """Only rank 1 makes the first one, in a set of its own."""
    import horovod.torch as hvd

    alone = hvd.add_process_set([1])
    pairs = []
    if hvd.rank() == 1:
        model = _model(10.0)
        pairs = [(model, _distributed(model, process_set=alone))]
    pairs += [(model, _distributed(model)) for model in (_model(1.0), _model(100.0))]
    for model, _ in pairs if hvd.rank() == 0 else pairs[::-1]:
        _backward(model)
    for _, optimizer in pairs:
        optimizer.step()
    gradients = [model.weight.grad.item() for model, _ in pairs]
    hvd.remove_process_set(alone)
    return gradients


def test_process_sets() -> None:
    with Keeper(2, "shm", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as keeper:
        assert keeper.get().run(_in_a_process_set) == [[1.5, 150.0], [20.0, 1.5, 150.0]]


def _adasum() -> list[str]:
    import horovod.torch as hvd

    models = [_model(scale) for scale in (1.0, 100.0)]
    optimizers = [_distributed(model, op=hvd.Adasum) for model in models]
    for model in models:
        _backward(model)
    for optimizer in optimizers:
        optimizer.step()
    # Parallel steps are averaged, of all ranks with the same weight.
    assert [model.weight.item() for model in models] == [-0.5, -149.0]
    return [optimizer._hvd_made.first() for optimizer in optimizers]


def test_adasum(pair: World) -> None:
    names, of_the_other = pair.run(_adasum)
    assert names == of_the_other
    assert len(set(names)) == 2
