"""Several optimizers, some without gradients on some ranks (tasks, experts, GANs): exact values, and what it costs."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from error_codes import ends_with
from optimizer_model import counted_questions
from worlds import Keeper, World

from horovod.base.errors import TrainingCode

STEPS = 6


@pytest.fixture(scope="module")
def three() -> Iterator[Keeper]:
    with Keeper(3, "shm") as keeper:
        yield keeper


def _parts(case: str, model: Any) -> list[list[Any]]:
    """The parameters of each optimizer."""
    trunk, a, b = (list(model[name].parameters()) for name in ("trunk", "a", "b"))
    return {
        "tasks": [a, b],
        "trunk and heads": [trunk, a, b],
        "heads and trunk": [a, b, trunk],
        "heads in one": [a + b, trunk],
        "one": [trunk + a + b],
    }[case]


def _train(case: str, momentum: float, averaged_loss: bool) -> float:
    """In each step each rank uses one of two heads. The distance from one process that has all ranks' batches."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"trunk": torch.nn.Linear(4, 4), "a": torch.nn.Linear(4, 1), "b": torch.nn.Linear(4, 1)}
    ).double()
    alone = copy.deepcopy(model)
    size = hvd.size()
    inputs = torch.randn(STEPS, size, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss_of(model: Any, step: int, rank: int) -> Any:
        head = "a" if (step + rank) % 2 or step == 4 else "b"  # in one step all ranks use the same head
        return model[head](model["trunk"](inputs[step, rank])).square().mean()

    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(part, 0.1, momentum=momentum), [(names[parameter], parameter) for parameter in part]
        )
        for part in _parts(case, model)
    ]
    references = [torch.optim.SGD(part, 0.1, momentum=momentum) for part in _parts(case, alone)]
    if case == "tasks":
        model["trunk"].requires_grad_(False)
        alone["trunk"].requires_grad_(False)
    for step in range(STEPS):
        for optimizer in optimizers + references:
            optimizer.zero_grad()
        loss = loss_of(model, step, hvd.rank())
        loss.backward()
        if averaged_loss:
            hvd.allreduce(loss.detach(), name="loss")
        for rank in range(size):
            (loss_of(alone, step, rank) / size).backward()
        for parameter in alone.parameters():  # what no rank has used takes part with zeros
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers + references:
            optimizer.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


CASES = ["tasks", "trunk and heads", "heads and trunk", "heads in one", "one"]


@pytest.mark.parametrize("averaged_loss", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_heads_that_not_all_ranks_use(pair: World, case: str, averaged_loss: bool) -> None:
    assert max(pair.run(_train, case, 0.9, averaged_loss)) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_on_three_ranks(three: Keeper, case: str) -> None:
    assert max(three.get().run(_train, case, 0.0, True)) < 1e-12


def _clipped(case: str) -> list[str]:
    """A gradient that is not there on some rank is not averaged when backward() returns."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 1) for _ in range(2)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), [(f"{index}.{name}", p) for name, p in model.named_parameters()]
        )
        for index, model in enumerate(models)
    ]
    models[hvd.rank()](torch.ones(2, 3)).sum().backward()
    torch.nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], 0.01)
    errors = []
    for optimizer in optimizers:
        try:
            optimizer.step()
        except AssertionError as error:
            errors.append(str(error))
    for model in models:
        weights = hvd.allgather(model.weight.detach())
        assert torch.equal(weights[0], weights[1])
    return errors


def test_clipping_is_an_error_on_both(pair: World) -> None:
    first, second = pair.run(_clipped, "")
    assert first == second
    assert len(first) == 2
    for rank, error in enumerate(first):
        facts = (f"'{rank}.weight' (and 1 more)", f"changed on rank {rank}", f"rank {1 - rank} made no gradients")
        assert re.search(ends_with(TrainingCode.CHANGED_GRADIENTS, *facts), error), error


# -- what it costs -----------------------------------------------------------------------------------------------------
def _counted(train: Callable[[], Callable[[], int]], steps: int) -> tuple[int, int, Counter[str]]:
    """Operations in some steps but for questions, how many the steps say that they take, and questions by name."""
    from horovod.worker.runtime.context import current

    with counted_questions() as asked:
        step = train()
        step()
        before, asked_before = current().engine.counters()["submitted"], asked.total()
        wanted = sum(step() for _ in range(steps))
        submitted = current().engine.counters()["submitted"] - before - (asked.total() - asked_before)
    return submitted, wanted, asked


def _gan() -> Callable[[], int]:
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    generator, critic = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.01), [(f"{name}.{n}", p) for n, p in model.named_parameters()]
        )
        for name, model in (("generator", generator), ("critic", critic))
    ]

    def step() -> int:
        optimizers[1].zero_grad()
        (critic(torch.ones(2, 3)) - critic(generator(torch.ones(2, 3)).detach())).sum().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic(generator(torch.ones(2, 3))).sum().backward()  # makes the critic's gradients too
        optimizers[0].step()
        optimizers[1].zero_grad()
        return 3 * (2 + 1)

    return step


def _with_metrics() -> Callable[[], int]:
    import torch

    import horovod.torch as hvd

    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())

    def step() -> int:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        hvd.allreduce(torch.ones(1), name="loss")
        optimizer.step()
        hvd.barrier()
        return 2 + 1 + 2

    return step


def _unused() -> Callable[[], int]:
    """One round of words, in which all say FINAL."""
    import torch

    import horovod.torch as hvd

    model = torch.nn.ModuleList([torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())

    def step() -> int:
        optimizer.zero_grad()
        model[0](torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return 4 + 1

    return step


@pytest.mark.parametrize("train", [_gan, _with_metrics, _unused])
def test_one_more_operation_in_a_step(pair: World, train: Callable[[], Callable[[], int]]) -> None:
    for submitted, wanted, _ in pair.run(_counted, train, 20):
        assert submitted == wanted


def _evaluation(late: int) -> Counter[str]:
    """One rank is later than usual in each operation."""
    import torch

    import horovod.torch as hvd

    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())

    def loop() -> Callable[[], int]:
        def step() -> int:
            if hvd.rank() == late:
                torch.randn(700, 700) @ torch.randn(700, 700)
            hvd.allreduce(torch.ones(1), name="accuracy")
            return 1

        return step

    submitted, wanted, asked = _counted(loop, 50)
    assert submitted == wanted
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return asked


def test_questions_that_stand_are_not_asked_again(pair: World) -> None:
    """A question that is answered was asked by all ranks, so two of them differ by one that stands at either end."""
    for late in (0, 1):
        first, second = pair.run(_evaluation, late)
        assert all(abs(first[wire] - second[wire]) <= 2 for wire in first | second)


def _removal() -> None:
    """A question stands in a process set that is removed, and in a world that ends."""
    import gc

    import torch

    import horovod.torch as hvd
    from horovod.common.ops.questions import _wait_lasts, standing
    from horovod.common.ops.specs import registered_number

    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    model = torch.nn.Linear(3, 1)
    both = hvd.add_process_set([0, 1])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), model.named_parameters(), process_set=both
    )
    number = registered_number(both, "This test")
    if hvd.rank() == 0:
        _wait_lasts(-1, 1_000_000, number)
        assert standing(number) == 1
    assert hvd.remove_process_set(both)
    del optimizer
    gc.collect()
    assert standing(number) == 0
    other = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    if hvd.rank() == 1:
        _wait_lasts(-2, 1_000_000, 0)
        assert standing(0) >= 1
    hvd.shutdown()
    hvd.init()
    model(torch.ones(2, 3)).sum().backward()
    other.step()


def test_a_question_that_stands_ends_with_its_process_set_and_its_world(three: Keeper) -> None:
    three.get().run(_removal)


def _joined() -> None:
    """A question stands when ranks join, and one of an optimizer that is gone."""
    import torch

    import horovod.torch as hvd
    from horovod.common.ops.questions import _wait_lasts

    model = torch.nn.Linear(3, 1)
    other = torch.nn.Linear(3, 1)
    gone = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), 0.01), [(f"gone.{name}", p) for name, p in other.named_parameters()]
    )
    if hvd.rank() == 0:
        _wait_lasts(-100, 1_000_000, 0)
    del gone
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    for epoch in range(3):
        for step in range(3):
            if step == 2 and hvd.rank() == 0:
                continue
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if step == 1 and hvd.rank() == epoch % 2:
                _wait_lasts(-1 - epoch, 1_000_000, 0)
        hvd.join()


def test_a_question_that_stands_when_ranks_join(pair: World) -> None:
    pair.run(_joined)


def _joined_crosswise() -> None:
    """On each rank another question stands, and both join at once."""
    import torch

    import horovod.torch as hvd

    models = [torch.nn.Linear(3, 1) for _ in range(2)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.01), [(f"{index}.{n}", p) for n, p in model.named_parameters()]
        )
        for index, model in enumerate(models)
    ]
    for epoch in range(2):
        optimizers[hvd.rank()]._hvd_reducer._all_made.question.look(-1 - epoch, 1_000_000, 0, 0)
        hvd.join()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (1 + hvd.rank())).sum().backward()
            torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 3.0))
            optimizer.step()


def _joined_with_data() -> None:
    """What a rank has submitted and does not wait for takes part once with its data after the rank has joined."""
    import torch

    import horovod.torch as hvd
    from horovod import _core
    from horovod.common.ops.specs import reduction
    from horovod.worker.runtime.context import current

    data, result = torch.full((4,), 10.0), torch.zeros(4)
    for epoch in range(3):
        if hvd.rank() == 0:
            spec = reduction(_core.OpType.ALLREDUCE, hvd.Sum, 1.0, 1.0, 0)
            span = (data.data_ptr(), result.data_ptr(), _core.DType.FLOAT32, (4,))
            handle = current().engine.submit(spec, "allreduce.stands", (span,), (data, result), unawaited=True)
        if hvd.rank() == 1 and epoch < 2:
            for wanted in (11.0, 1.0, 1.0):
                assert hvd.allreduce(torch.ones(4), op=hvd.Sum, name="stands").tolist() == [wanted] * 4
        if hvd.rank() == 1:  # the last one to join, whose zeros would answer
            assert hvd.allreduce(torch.ones(4), op=hvd.Sum, name="others have joined").tolist() == [1.0] * 4
        hvd.join()
        if hvd.rank() == 0:
            assert handle.done() == (epoch < 2)
    assert hvd.allreduce(torch.ones(4), op=hvd.Sum, name="after").tolist() == [3.0] * 4
    if hvd.rank():  # what outlived the join
        assert hvd.allreduce(torch.ones(4), op=hvd.Sum, name="stands").tolist() == [12.0] * 4
    else:
        handle.result()
        assert result.tolist() == [12.0] * 4


def test_what_nobody_waits_for_takes_part_while_its_rank_has_joined(three: Keeper) -> None:
    three.get().run(_joined_with_data)


def test_questions_that_stand_crosswise_when_ranks_join(pair: World) -> None:
    pair.run(_joined_crosswise)


def _wrapped_again() -> None:
    """The same parameters are given to a second distributed optimizer, while the first one is there or not."""
    import warnings

    import torch

    import horovod.torch as hvd

    def step(optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 3), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()

    def wrapped(op: int) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=op)

    model = torch.nn.Linear(3, 1, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer = wrapped(hvd.Sum)  # here the one before is still there, but not in step()
            step(optimizer)
            assert model.weight.grad.tolist() == [[3.0] * 3]
    kept = optimizer
    optimizer = wrapped(hvd.Sum)
    for _ in range(2):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.REDUCED_TWICE, "'weight'")):
            step(optimizer)
        kept._hvd_reducer.reset()
    del kept
    step(optimizer)
    assert model.weight.grad.tolist() == [[3.0] * 3]

    model = torch.nn.Linear(3, 1, bias=False)
    first = wrapped(hvd.Average)
    second = wrapped(hvd.Average)
    with pytest.warns(UserWarning, match="'weight' is reduced by two optimizers"):
        step(second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of equal gradients on all ranks
        for optimizer in (first, second, first, first):
            step(optimizer)
            assert model.weight.grad.tolist() == [[1.5] * 3]


def test_parameters_of_two_distributed_optimizers(pair: World) -> None:
    pair.run(_wrapped_again)
