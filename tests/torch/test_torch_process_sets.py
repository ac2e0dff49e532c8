"""Process sets through the public API, on real ranks over shared memory and TCP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from error_codes import ends_with
from optimizer_model import counted_questions
from torch_fixtures import world_id
from worlds import World

from horovod.base.errors import OperationCode, WorldCode

WORLDS = [(4, "shm"), (3, "tcp")]


@pytest.fixture(scope="module", params=WORLDS, ids=world_id)
def dynamic(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world whose process sets are dynamic; each test removes what it added."""
    size, transport = request.param
    with World(size, transport, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as world:
        yield world


# -- adding and removing -----------------------------------------------------------------------------------------------
def _life() -> None:
    import horovod.torch as hvd

    first = hvd.add_process_set([1, 0])
    assert isinstance(first, hvd.ProcessSet)
    assert str(first) == "ProcessSet(process_set_id=1, ranks=[0, 1], mpi_comm=None)"
    second = hvd.ProcessSet(range(1, hvd.size()))
    assert second.size() is second.rank() is None
    assert hvd.add_process_set(second) is second
    assert second.process_set_id == 2
    assert (second.size(), second.included()) == (hvd.size() - 1, hvd.rank() != 0)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"^Process is not part of provided process set\. \[not-in-process-set\]$"):
            second.rank()
    else:
        assert second.rank() == hvd.rank() - 1
    for again in ([0, 1], first, list(range(hvd.size()))):
        with pytest.raises(ValueError, match=r"^Attempted to add a duplicate process set: "):
            hvd.add_process_set(again)
    for wrong, sentence in [
        ([], "at least one rank"),
        ([0, 0], "each rank once"),
        ([-1], "ranks of this world are 0 to"),
        ([9], "0 to"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            hvd.add_process_set(wrong)
    assert hvd.remove_process_set(first)
    assert first.process_set_id is None
    assert first.ranks == [0, 1]
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert not hvd.remove_process_set(hvd.ProcessSet([0]))
    third = hvd.add_process_set([0])  # ids are used again
    assert third.process_set_id == 1
    assert hvd.add_process_set(first).process_set_id == 3
    for process_set in (first, second, third):
        assert hvd.remove_process_set(process_set)
    hvd.barrier()


def test_ids_ranks_duplicates_and_removal(dynamic: World) -> None:
    dynamic.run(_life)


def _operations(ranks: list[int]) -> Any:
    import torch

    import horovod.torch as hvd

    chosen = hvd.add_process_set(ranks)
    results = None
    if chosen.included():
        mine = torch.full((3,), float(hvd.rank()))
        root = ranks[-1]
        gathered = hvd.allgather(torch.full((chosen.rank() + 1,), hvd.rank()), process_set=chosen)
        received, splits = hvd.alltoall(
            torch.arange(len(ranks)) + 10 * hvd.rank(), [1] * len(ranks), process_set=chosen
        )
        handle = hvd.allreduce_async(mine, op=hvd.Sum, name="x", process_set=chosen)
        everywhere = hvd.allreduce_async(mine, op=hvd.Sum, name="x")
        results = [
            hvd.synchronize(handle).tolist(),
            hvd.synchronize(everywhere).tolist(),
            hvd.allreduce(mine, process_set=chosen).tolist(),
            hvd.broadcast(mine, root, process_set=chosen).tolist(),
            gathered.tolist(),
            received.tolist(),
            splits.tolist(),
            hvd.reducescatter(torch.arange(3.0), op=hvd.Sum, process_set=chosen).tolist(),
            [one.tolist() for one in hvd.grouped_allreduce([mine, mine.int()], op=hvd.Sum, process_set=chosen)],
            hvd.broadcast_object({"from": hvd.rank()}, root, process_set=chosen),
            hvd.allgather_object(hvd.rank(), process_set=chosen),
        ]
        hvd.barrier(process_set=chosen)
        weight = torch.full((2,), float(hvd.rank()), requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0 + hvd.rank())
        hvd.broadcast_parameters([weight], root, process_set=chosen)
        hvd.broadcast_optimizer_state(optimizer, root, process_set=chosen)
        assert (weight.tolist(), optimizer.param_groups[0]["lr"]) == ([float(root)] * 2, 1.0 + root)
    else:
        hvd.allreduce(torch.full((3,), float(hvd.rank())), op=hvd.Sum, name="x")
        tensor = torch.ones(2)
        for name, act in {
            "Allreduce": lambda: hvd.allreduce(tensor, process_set=chosen),
            "Allreduce:": lambda: hvd.grouped_allreduce_([tensor], process_set=chosen),
            "Allgather": lambda: hvd.allgather(tensor, process_set=chosen),
            "Broadcast": lambda: hvd.broadcast_(tensor, ranks[0], process_set=chosen),
            "Alltoall": lambda: hvd.alltoall(tensor, process_set=chosen),
            "Reducescatter": lambda: hvd.reducescatter(tensor, process_set=chosen),
            "Barrier": lambda: hvd.barrier(process_set=chosen),
            "Broadcast:": lambda: hvd.broadcast_object(1, ranks[0], process_set=chosen),
        }.items():
            outside_set = ends_with(OperationCode.NOT_IN_SET, name, f"Rank {hvd.rank()}", ranks)
            with pytest.raises(ValueError, match=outside_set):
                act()
    if chosen.included() and len(ranks) < hvd.size():
        outside = next(rank for rank in range(hvd.size()) if rank not in ranks)
        with pytest.raises(ValueError, match=ends_with(OperationCode.INVALID_ROOT, f"root_rank {outside}", ranks)):
            hvd.broadcast(torch.ones(1), outside, process_set=chosen)
    hvd.remove_process_set(chosen)
    with pytest.raises(ValueError, match=ends_with(OperationCode.NO_SUCH_SET)):
        hvd.allreduce(torch.ones(1), process_set=chosen)
    return results


def test_every_collective_and_every_refusal(dynamic: World) -> None:
    everywhere = float(sum(range(dynamic.size)))
    for ranks in ([0, 2], [1], [1, 2]):
        total, count, root = float(sum(ranks)), len(ranks), ranks[-1]
        for rank, got in enumerate(dynamic.run(_operations, ranks)):
            if rank not in ranks:
                assert got is None
                continue
            place = ranks.index(rank)
            scattered = [[0.0, 1.0, 2.0]] if count == 1 else [[0.0, 2.0], [4.0]]
            assert got == [
                [total] * 3,
                [everywhere] * 3,
                [total / count] * 3,
                [float(root)] * 3,
                [one for index, one in enumerate(ranks) for _ in range(index + 1)],
                [place + 10 * one for one in ranks],
                [1] * count,
                scattered[place],
                [[total] * 3, [int(total)] * 3],
                {"from": root},
                ranks,
            ]


def _gradients() -> None:
    import torch

    import horovod.torch as hvd

    chosen = hvd.add_process_set([1, 2])
    if chosen.included():
        x = torch.ones(4, requires_grad=True)
        hvd.allgather(x * 2, process_set=chosen).sum().backward()
        assert x.grad.tolist() == [2.0] * 4
        x = torch.ones(4, requires_grad=True)
        hvd.broadcast(x, 2, process_set=chosen).sum().backward()
        assert x.grad.tolist() == [1.0 if hvd.rank() == 2 else 0.0] * 4
        x = torch.ones(4, requires_grad=True)
        hvd.reducescatter(x, op=hvd.Sum, process_set=chosen).sum().backward()
        assert x.grad.tolist() == [2.0] * 4
        x = torch.ones(4, requires_grad=True)
        hvd.allreduce(x * hvd.rank(), op=hvd.Sum, process_set=chosen).sum().backward()
        assert x.grad.tolist() == [2.0 * hvd.rank()] * 4
    hvd.remove_process_set(chosen)


def test_gradients_count_the_members_only(dynamic: World) -> None:
    dynamic.run(_gradients)


# -- sets side by side ------------------------------------------------------------------------------------------------
def _overlap() -> None:
    """Rank 1 is in both sets. While the first waits for rank 0, the second one works."""
    import torch

    import horovod.torch as hvd

    slow, quick = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
    if hvd.rank() == 1:
        late = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, process_set=slow)
    if quick.included():
        for step in range(10):
            got = hvd.allreduce(torch.full((50_000,), float(step)), op=hvd.Sum, process_set=quick)
            assert got.unique().tolist() == [2.0 * step]
    if hvd.rank() == 1:
        assert not hvd.poll(late)
    hvd.barrier()  # only now rank 0 takes part
    if hvd.rank() == 0:
        late = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, process_set=slow)
    if slow.included():
        assert hvd.synchronize(late).tolist() == [2.0, 2.0]
    assert hvd.remove_process_set(slow)
    assert hvd.remove_process_set(quick)


def test_a_set_works_while_an_overlapping_one_waits(dynamic: World) -> None:
    dynamic.run(_overlap)


def _optimize(ranks: list[int]) -> tuple[list[float], int]:
    import torch

    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    chosen = hvd.add_process_set(ranks)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], groups=1, process_set=chosen
    )
    submitted = current().counters()["submitted"]
    with counted_questions() as asked:
        for _ in range(2):
            optimizer.zero_grad()
            (weight * float(hvd.rank())).sum().backward()
            optimizer.step()
    operations = current().counters()["submitted"] - submitted - asked.total()
    hvd.remove_process_set(chosen)
    with pytest.raises(ValueError, match=ends_with(OperationCode.NO_SUCH_SET)):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=chosen)
    return weight.tolist(), operations


def test_an_optimizer_averages_over_its_set_and_elsewhere_trains_alone(dynamic: World) -> None:
    for rank, (weight, operations) in enumerate(dynamic.run(_optimize, [0, 2])):
        assert weight == [-2.0 * (1 if rank in (0, 2) else rank)] * 3
        # In each of the two steps the gradient, and whether every rank has made its own.
        assert operations == (4 if rank in (0, 2) else 0)


# -- ranks that do not agree ------------------------------------------------------------------------------------------
def _disagree() -> list[str]:
    import horovod.torch as hvd

    messages = []
    odd = hvd.rank() == 1
    with pytest.raises(ValueError, match=ends_with(WorldCode.PROCESS_SETS_DISAGREE)) as caught:
        hvd.add_process_set([1, 2] if odd else [0, 2])
    messages.append(str(caught.value))
    kept = hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match=ends_with(WorldCode.PROCESS_SETS_DISAGREE)) as caught:
        hvd.add_process_set([2]) if odd else hvd.remove_process_set(kept)
    messages.append(str(caught.value))
    assert kept.process_set_id == 1
    hvd.barrier()
    assert hvd.remove_process_set(kept)
    return messages


def test_ranks_that_do_not_agree_are_all_told_who_said_what(dynamic: World) -> None:
    others = ", ".join(str(rank) for rank in range(2, dynamic.size - 1))
    others = f"ranks 0{', ' + others if others else ''} and {dynamic.size - 1}"
    for sentences in dynamic.run(_disagree):
        for sentence, (their, mine) in zip(
            sentences, [("adds [0, 2]", "adds [1, 2]"), ("removes [0, 1]", "adds [2]")], strict=True
        ):
            expected = f"The ranks do not agree on their process sets: {others} {their}; rank 1 {mine}. Call hvd.add"
            assert sentence.startswith(expected), sentence


def _remove_too_early() -> str:
    import torch

    import horovod.torch as hvd

    chosen = hvd.add_process_set([0, 1])
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="early", process_set=chosen) if hvd.rank() == 1 else 0
    with pytest.raises(ValueError, match=ends_with(WorldCode.PROCESS_SET_IN_USE)) as caught:
        hvd.remove_process_set(chosen)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="early", process_set=chosen)
    if chosen.included():
        assert hvd.synchronize(handle).tolist() == [2.0]
    assert hvd.remove_process_set(chosen)
    return str(caught.value)


def test_a_set_in_use_is_not_removed(dynamic: World) -> None:
    for sentence in dynamic.run(_remove_too_early):
        assert re.search(ends_with(WorldCode.PROCESS_SET_IN_USE, "[0, 1]", "rank 1 has 1"), sentence)


def _mismatch() -> str | None:
    import torch

    import horovod.torch as hvd

    chosen = hvd.add_process_set([0, 2])
    message = None
    if chosen.included():
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="odd", process_set=chosen)
        message = str(caught.value)
    hvd.remove_process_set(chosen)
    return message


def test_a_mismatch_within_a_set_names_its_ranks(dynamic: World) -> None:
    messages = dynamic.run(_mismatch)
    for rank in (0, 2):
        assert "rank 0 has [2]; rank 2 has [4]" in messages[rank], messages[rank]
