"""A rank that makes no gradient in a step (`if loss is finite: loss.backward()`), or only some: all ranks stay alike.

Plain loops train as one process does. Where the script changes gradients between backward() and step(), which only
ranks with averages can do rightly, all ranks get the same error before one has taken the step.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiers
from error_codes import ends_with
from optimizer_model import distributed_sgd
from worlds import Keeper, World

from horovod.base.errors import TrainingCode, code_of

STEPS = 5
LACKING_STEP = 2  # counted from 0


def _model() -> Any:
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


def _batch(step: int, rank: int, turn: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(100 * step + 10 * rank + turn)
    return torch.randn(2, 4, generator=generator, dtype=torch.float64)


def _loss(model: Any, batch: Any, part: bool) -> Any:
    """part: only the last layer has a gradient."""
    if part:
        return model[2](batch[:, :3]).square().mean()
    return model(batch).square().mean()


def _weights(model: Any) -> Any:
    import torch

    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _gradients(model: Any) -> list[Any]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# -- what lies between backward() and step() ---------------------------------------------------------------------------
def _nothing(model: Any) -> None:
    pass


def _metric(model: Any) -> None:
    import torch

    import horovod.torch as hvd

    hvd.allreduce(torch.ones(1), name="loss")


def _barrier(model: Any) -> None:
    import horovod.torch as hvd

    hvd.barrier()


def _object(model: Any) -> None:
    import horovod.torch as hvd

    assert hvd.broadcast_object(hvd.rank(), 0) == 0


def _asynchronous(model: Any) -> None:
    import torch

    import horovod.torch as hvd

    hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(1), torch.ones(2)]))


def _norm(model: Any) -> None:
    import torch

    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _value(model: Any) -> None:
    import torch

    if _gradients(model):  # PyTorch refuses to clip nothing
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)


def _scaled(model: Any) -> None:
    for gradient in _gradients(model):
        gradient.mul_(0.1)


def _replaced(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def _metric_and_norm(model: Any) -> None:
    _metric(model)
    _norm(model)


def _norm_and_metric(model: Any) -> None:
    _norm(model)
    _metric(model)


PLAIN = [_nothing, _metric, _barrier, _object, _asynchronous]
CHANGES = [_norm, _value, _scaled, _replaced, _metric_and_norm, _norm_and_metric]


def _train(
    between: Callable[[Any], None],
    to_none: bool,
    passes: int,
    lacking: int,
    part: bool,
    synchronized: bool,
    members: list[int],
    options: dict[str, Any],
) -> tuple[list[str], float]:
    """The errors of all steps, after each of which all members are alike; and the distance from one process."""
    import torch

    import horovod.torch as hvd

    if hvd.rank() not in members:
        return [], 0.0
    process_set = options.get("process_set", hvd.global_process_set)
    model = _model()
    optimizer = distributed_sgd(model, backward_passes_per_step=passes, **options)
    alone = _model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    errors = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        reference.zero_grad()
        for turn in range(passes):
            for rank in members:
                lacks = step == LACKING_STEP and rank == lacking
                if lacks and not part:
                    continue
                (_loss(alone, _batch(step, rank, turn), lacks) / len(members)).backward()
                if rank == hvd.rank():
                    _loss(model, _batch(step, rank, turn), lacks).backward()
        before = _weights(model)
        try:
            if synchronized:
                optimizer.synchronize()
                between(model)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                between(model)
                optimizer.step()
        except AssertionError as error:
            errors.append(str(error))
            assert torch.equal(_weights(model), before), "nobody takes the step"
        else:
            if between.__name__ in [change.__name__ for change in CHANGES]:  # what it does to averages, it does alike
                between(alone)
            reference.step()
        everybody = hvd.allgather(_weights(model)[None], name="weights", process_set=process_set)
        assert all(torch.equal(everybody[0], one) for one in everybody), step
    return errors, float((_weights(model) - _weights(alone)).abs().max())


def _check_plain(world: World, between: Callable[[Any], None], members: list[int], **given: Any) -> None:
    for errors, distance in world.run(_train, between, **given, members=members):
        assert errors == []
        assert distance < 1e-12


def _check_error(world: World, between: Callable[[Any], None], members: list[int], lacking: int, **given: Any) -> None:
    found = world.run(_train, between, lacking=lacking, **given, members=members)
    told = {tuple(errors) for rank, (errors, _) in enumerate(found) if rank in members}
    assert max(distance for _, distance in found) < 1e-12  # from one process that leaves the step out
    assert len(told) == 1, told  # the same on all ranks
    (error,) = told.pop()  # of one step
    facts = ("'0.weight' (and 3 more)", "synchronize()")
    assert re.search(ends_with(TrainingCode.CHANGED_GRADIENTS, *facts), error), error
    for rank in members:
        assert (f"rank {rank}" in error or f"{rank} " in error or f"{rank}," in error) or rank == lacking
    assert f"step {LACKING_STEP + 1} of this optimizer rank {lacking} made no gradient" in error


WAYS = [(True, 1, False), (False, 1, False), (True, 2, False), (True, 1, True), (False, 2, True)]


@pytest.mark.parametrize(("to_none", "passes", "part"), tiers.some(WAYS, 2))
@pytest.mark.parametrize("lacking", [0, 1])
def test_plain_loops_train_as_one_process(world: World, to_none: bool, passes: int, part: bool, lacking: int) -> None:
    everybody = list(range(world.size))
    for between in PLAIN:
        given = {"to_none": to_none, "passes": passes, "part": part, "lacking": lacking, "synchronized": False}
        _check_plain(world, between, everybody, **given, options={})


@pytest.mark.parametrize(("to_none", "passes", "part"), tiers.some(WAYS, 2))
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_change_is_an_error_on_all_ranks(world: World, to_none: bool, passes: int, part: bool, lacking: int) -> None:
    everybody = list(range(world.size))
    for between in CHANGES:
        given = {"to_none": to_none, "passes": passes, "part": part, "synchronized": False}
        _check_error(world, between, everybody, lacking, **given, options={})


@pytest.mark.parametrize(("to_none", "passes", "part"), tiers.some(WAYS, 2))
def test_changes_after_synchronize(world: World, to_none: bool, passes: int, part: bool) -> None:
    everybody = list(range(world.size))
    for between in (_norm, _value, _metric_and_norm):
        given = {"to_none": to_none, "passes": passes, "part": part, "lacking": 0, "synchronized": True}
        _check_plain(world, between, everybody, **given, options={})


@pytest.mark.parametrize("options", [{"groups": 2}, {"op": 0, "gradient_predivide_factor": 3.0}])
def test_groups_and_factors(pair: World, options: dict[str, Any]) -> None:
    given = {"to_none": True, "passes": 1, "part": False, "synchronized": False, "options": options}
    for between in PLAIN:
        _check_plain(pair, between, [0, 1], lacking=0, **given)
    for between in CHANGES:
        _check_error(pair, between, [0, 1], 0, **given)


@pytest.fixture(scope="module")
def three() -> Iterator[Keeper]:
    with Keeper(3, "shm") as keeper:
        yield keeper


def _in_a_set(function: Callable[..., Any], members: list[int], given: dict[str, Any]) -> Any:
    import horovod.torch as hvd

    hvd.shutdown()
    some = hvd.ProcessSet(members)
    hvd.init(process_sets=[some])
    try:
        return function(members=members, **given, options={"process_set": some})
    finally:
        hvd.shutdown()
        hvd.init()


@pytest.mark.parametrize("between", [_nothing, _norm])
def test_in_a_process_set(three: Keeper, between: Callable[[Any], None]) -> None:
    """The third rank is not concerned."""
    given = {"between": between, "to_none": True, "passes": 1, "part": False, "synchronized": False, "lacking": 2}
    found = three.get().run(_in_a_set, _train, [0, 2], given)
    assert found[1] == ([], 0.0)
    assert found[0][0] == found[2][0]
    if between is _norm:
        assert "rank 2 made no gradients" in found[0][0][0]
    else:
        assert found[0][0] == []
        assert found[0][1] < 1e-12


def _dropped(how: str) -> None:
    """Rank 0 has the averages of a step in which rank 1 made no gradients, and does not take it."""
    import torch

    import horovod.torch as hvd

    model = _model()
    optimizer = distributed_sgd(model)
    if hvd.rank() == 0:
        model(_batch(0, 0, 0)).square().mean().backward()

    def go_on() -> None:
        if hvd.rank() == 1:
            optimizer.step()
        elif how == "zero_grad":
            optimizer.zero_grad()
        else:
            model.zero_grad()
            model(_batch(0, 0, 0)).square().mean().backward()

    dropped = ends_with(TrainingCode.CHANGED_GRADIENTS, "dropped on rank 0", "step 1 ", "rank 1 made no gradients")
    with pytest.raises(AssertionError, match=dropped):
        go_on()
    optimizer.zero_grad()
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    weights = hvd.allgather(_weights(model)[None])
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("how", ["zero_grad", "backward"])
def test_a_step_that_only_some_ranks_take(pair: World, how: str) -> None:
    pair.run(_dropped, how)


def _restored() -> None:
    """load_state_dict gives a step up, and the others go on."""
    import torch

    import horovod.torch as hvd

    model = _model()
    optimizer = distributed_sgd(model)
    if hvd.rank() == 0:
        model(_batch(0, 0, 0)).square().mean().backward()
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.synchronize()
    for _ in range(2):
        optimizer.zero_grad()
        model(_batch(0, hvd.rank(), 0)).square().mean().backward()
        optimizer.step()
    weights = hvd.allgather(_weights(model)[None])
    assert torch.equal(weights[0], weights[1])


def test_a_step_that_a_rank_gives_up(pair: World) -> None:
    pair.run(_restored)


def _given_up(adasum: bool) -> bool:
    """All ranks load a state while the gradients of each one's own part are in flight, and train at once."""
    import torch

    import horovod.torch as hvd

    model = _model()
    optimizer = distributed_sgd(model, **({"op": hvd.Adasum} if adasum else {}))
    saved = copy.deepcopy(optimizer.state_dict())
    if hvd.rank() == 0:
        model[2](_batch(0, 0, 0)[:, :3]).square().mean().backward()
    else:
        model[0](_batch(0, 1, 0)).square().mean().backward()
    optimizer.load_state_dict(saved)
    for step in range(2):
        optimizer.zero_grad()
        model(_batch(step, hvd.rank(), 0)).square().mean().backward()
        optimizer.step()
    weights = _weights(model)
    alone = _model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        plain.zero_grad()
        for rank in range(2):
            (alone(_batch(step, rank, 0)).square().mean() / 2).backward()
        plain.step()
    is_same = torch.equal(*hvd.allgather(weights[None], name="weights"))
    return is_same and (adasum or torch.allclose(weights, _weights(alone)))


def test_all_ranks_give_a_step_up(pair: World) -> None:
    assert pair.run(_given_up, False) == [True, True]


@pytest.fixture(scope="module")
def overlapping() -> Iterator[Keeper]:
    with Keeper(2, "shm", {"HOROVOD_ADASUM_OVERLAP": "1"}) as keeper:
        yield keeper


def test_all_ranks_give_a_step_up_with_overlapping_adasum(overlapping: Keeper) -> None:
    assert overlapping.get().run(_given_up, True) == [True, True]


def _given_up_by_one(way: str) -> str:
    """Rank 0 loads a state in the middle of a step, and rank 1 takes the step."""
    import torch

    import horovod.torch as hvd

    model = _model()
    optimizer = distributed_sgd(model)
    before = _weights(model).clone()
    said = ""
    if hvd.rank() == 0:
        hidden = model[:2](_batch(0, 0, 0))
        if way == "failed":
            hidden.register_hook(_fail)
            with pytest.raises(OSError, match="no more"):
                model[2](hidden).square().mean().backward()
        else:
            model[2](hidden.detach()).square().mean().backward()
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        _loss(model, _batch(0, 1, 0), way == "part").backward()
        with pytest.raises(AssertionError, match=ends_with(TrainingCode.CHANGED_GRADIENTS, "rank 0", "dropped")) as it:
            optimizer.step()
        said = str(it.value)
    assert torch.equal(_weights(model), before), "no rank may take the step"
    for step in range(2):
        optimizer.zero_grad()
        model(_batch(step, hvd.rank(), 0)).square().mean().backward()
        optimizer.step()
    assert torch.equal(*hvd.allgather(_weights(model)[None], name="weights"))
    return said


def _fail(_: Any) -> None:
    raise OSError("no more")


@pytest.mark.parametrize("way", ["part", "whole", "failed"])
def test_a_rank_gives_up_gradients_that_others_wait_for(pair: World, way: str) -> None:
    assert "Gradients were dropped on rank 0" in pair.run(_given_up_by_one, way)[1]


def _away(changes: bool) -> None:
    """Rank 1 is in step() and waits to hear of rank 0, which waits for rank 1 in a barrier: a script that differs."""
    import torch

    import horovod.torch as hvd

    model = _model()
    optimizer = distributed_sgd(model)
    if hvd.rank() == 0:
        model(_batch(0, 0, 0)).square().mean().backward()
        hvd.barrier()
        if changes:
            _norm(model)
            with pytest.raises(AssertionError, match=ends_with(TrainingCode.CHANGED_GRADIENTS, "changed on rank 0")):
                optimizer.step()
        else:
            optimizer.step()
    else:
        optimizer.step()
        hvd.barrier()
    optimizer.zero_grad()
    model(_batch(1, hvd.rank(), 0)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    weights = hvd.allgather(_weights(model)[None])
    assert torch.equal(weights[0], weights[1]) != changes


@pytest.mark.parametrize("changes", [False, True])
def test_a_rank_that_waits_for_one_in_step(pair: World, changes: bool) -> None:
    pair.run(_away, changes)


def _unfinished_step_inside_skip_synchronize() -> None:
    import torch

    model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    optimizer = distributed_sgd(model)
    model[0](torch.ones(1, 2)).sum().backward()
    in_flight = ends_with(TrainingCode.GRADIENTS_IN_FLIGHT, "step()", "skip_synchronize()")
    with optimizer.skip_synchronize(), pytest.raises(AssertionError, match=in_flight):
        optimizer.step()
    optimizer.synchronize()


def test_skip_synchronize_needs_synchronize(pair: World) -> None:
    pair.run(_unfinished_step_inside_skip_synchronize)


def _grad_scaler(unscaled_first: bool) -> list[str]:
    """GradScaler divides gradients without a trace; rank 1 has those of an earlier step, which are zeros."""
    import torch

    import horovod.torch as hvd

    model = _model()
    optimizer = distributed_sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    errors = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss = scaler.scale(model(_batch(step, hvd.rank(), 0)).square().mean())
        if step != 1 or hvd.rank() == 0:
            loss.backward()
        try:
            if unscaled_first:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
        except AssertionError as error:
            errors.append(str(error))
        scaler.update()
        weights = hvd.allgather(_weights(model)[None])
        assert torch.equal(weights[0], weights[1])
    return errors


def test_grad_scaler(pair: World) -> None:
    assert pair.run(_grad_scaler, True) == [[], []]
    first, second = pair.run(_grad_scaler, False)
    assert first == second
    (error,) = first
    facts = ("GradScaler", "on rank 0", "step 2 ", "rank 1 made no gradients")
    assert re.search(ends_with(TrainingCode.CHANGED_GRADIENTS, *facts), error), error


def _compressed(clipped: bool) -> list[str]:
    import torch

    import horovod.torch as hvd
    from horovod.torch.compression import GradientCompressor

    class TwoRounds(GradientCompressor):
        def reduce(self, name: str, gradient: Any) -> Any:
            first = gradient / 2
            yield first
            gradient.sub_(gradient / 2)
            yield gradient
            return gradient + first

    errors = []
    for compression in (hvd.Compression.fp16, TwoRounds()):
        model = _model()
        optimizer = distributed_sgd(model, compression=compression)
        for step in range(3):
            optimizer.zero_grad()
            if step != 1 or hvd.rank() == 0:
                model(_batch(step, hvd.rank(), 0)).square().mean().backward()
            if clipped:
                _norm(model)
            try:
                optimizer.step()
            except AssertionError as error:
                errors.append(str(error))
            weights = hvd.allgather(_weights(model)[None])
            assert torch.equal(weights[0], weights[1])
    return errors


def test_compressed_gradients(pair: World) -> None:
    assert pair.run(_compressed, False) == [[], []]
    first, second = pair.run(_compressed, True)
    assert first == second
    assert [code_of(error) for error in first] == [TrainingCode.CHANGED_GRADIENTS] * 2


def _sparse(clipped: bool) -> list[str]:
    import torch

    import horovod.torch as hvd

    model = torch.nn.Embedding(5, 2, sparse=True).double()
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    errors = []
    for step in range(4):
        optimizer.zero_grad()
        if step != 2 or hvd.rank() == 0:
            model(torch.tensor([0, 2 + hvd.rank()])).sum().backward()
        if clipped and model.weight.grad is not None:
            model.weight.grad.mul_(0.5)
        try:
            optimizer.step()
        except AssertionError as error:
            errors.append(str(error))
        weights = hvd.allgather(model.weight.detach()[None])
        assert torch.equal(weights[0], weights[1])
    return errors


def test_sparse_gradients(pair: World) -> None:
    assert pair.run(_sparse, False) == [[], []]
    first, second = pair.run(_sparse, True)
    assert first == second
    assert [code_of(error) for error in first] == [TrainingCode.CHANGED_GRADIENTS]


def _joins() -> None:
    """Rank 1 has joined: no allgather can say what each rank did."""
    import torch

    import horovod.torch as hvd

    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = distributed_sgd(torch.nn.ModuleList([first, second]))
    if hvd.rank() == 0:
        first(torch.ones(1, 2)).sum().backward()
        _norm(first)
        with pytest.raises(AssertionError, match=ends_with(TrainingCode.CHANGED_GRADIENTS, "changed on rank 0")):
            optimizer.step()
    hvd.join()
    for _ in range(2):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
        hvd.barrier()
        optimizer.step()


def test_with_join(pair: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.run(_joins)


def _joins_without_names() -> None:
    """Rank 1's question stands when all have joined; its name holds that of a parameter without a name."""
    import torch

    import horovod.torch as hvd

    for turn in range(20):
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            if hvd.rank() == 0:
                model(torch.ones(1, 2)).sum().backward()
            hvd.barrier()
            optimizer.step()
        hvd.join()
        for index in range(4):
            assert hvd.allreduce(torch.ones(100), name=f"{turn}.{index}", op=hvd.Sum).tolist() == [2.0] * 100


def test_join_without_names(pair: World) -> None:
    pair.run(_joins_without_names)


# -- the end of a world ------------------------------------------------------------------------------------------------
def _leaves() -> bool:
    """Whether anything held the world, and with it the engine and its memory, after a shutdown; then trains on."""
    import gc
    import threading
    import weakref

    import torch

    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    model = _model()
    optimizer = distributed_sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        if hvd.rank() == 0:  # rank 1 asks what rank 0 waits for
            _loss(model, torch.ones(2, 4, dtype=torch.float64), part=False).backward()
        hvd.barrier()
        optimizer.step()

    step()
    hvd.join()
    step()
    world = weakref.ref(current())
    hvd.shutdown()
    for _ in range(100):  # a thread that ends with the world may still be on its way
        gc.collect()
        held = world() is not None
        if not held:
            break
        threading.Event().wait(0.05)
    hvd.init()
    step()
    return held


def test_an_optimizer_does_not_hold_a_world_that_is_over(pair: World) -> None:
    assert pair.run(_leaves) == [False, False]
