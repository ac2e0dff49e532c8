"""hvd.join(): ranks with less data than others."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from event_words import tells
from worlds import World

from horovod.base.errors import TrainingCode, code_of

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])

# Every test leaves the shared world as it was: all ranks have joined, so the last line of a test is an allreduce that
# shows it.


def _whole() -> None:
    import torch

    import horovod.torch as hvd

    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="whole").tolist() == [hvd.size()] * 3


def _uneven(names: str) -> list[list[float]]:
    """Rank r has r + 1 values of 2; returns what its averages came to."""
    import torch

    import horovod.torch as hvd

    seen = []
    for step in range(hvd.rank() + 1):
        name = {"one": "uneven", "new": f"uneven.{step}", "none": None}[names]
        seen.append(hvd.allreduce(torch.full((2,), 2.0), name=name).tolist())
    last = hvd.join()
    assert last == hvd.size() - 1
    _whole()
    return seen


@pytest.mark.parametrize("names", ["one", "new", "none"])
def test_zeros_stand_in_for_ranks_that_have_joined(world: World, names: str) -> None:
    for _ in range(2):  # the second time under ids that are known
        results = world.run(_uneven, names)
        for rank, seen in enumerate(results):
            # In step k ranks k to n-1 still work, and the divisor stays n.
            averages = [2.0 * (world.size - step) / world.size for step in range(rank + 1)]
            assert seen == [pytest.approx([value] * 2) for value in averages]


def _never_seen_here() -> Any:
    """Rank 0 joins at once; the others do things of which it has never heard."""
    import torch

    import horovod.torch as hvd

    if hvd.rank() == 0:
        hvd.join()
        _whole()
        return None
    results = []
    for elements in (1, 700, 70_000, 1 << 20, 0):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            tensor = torch.ones(elements, dtype=dtype)
            op = hvd.Max if dtype == torch.bool else hvd.Sum
            total = hvd.allreduce(tensor, op=op, name=f"unseen.{elements}.{dtype}")
            results.append(bool((total == (1 if dtype == torch.bool else hvd.size() - 1)).all()))
    grouped = hvd.grouped_allreduce([torch.ones(5), torch.full((3, 2), 3.0)], op=hvd.Sum, name="unseen.group")
    results.append(grouped[0].tolist() == [hvd.size() - 1] * 5)
    results.append(grouped[1].tolist() == [[3.0 * (hvd.size() - 1)] * 2] * 3)
    handles = [hvd.allreduce_async(torch.ones(10), op=hvd.Sum, name=f"unseen.{i}") for i in range(100)]
    results += [hvd.synchronize(handle).tolist() == [hvd.size() - 1] * 10 for handle in handles]
    handles = [hvd.allreduce_async(torch.ones(10), op=hvd.Sum) for i in range(100)]
    results += [hvd.synchronize(handle).tolist() == [hvd.size() - 1] * 10 for handle in handles]
    # Scaled, and zeros where they matter: the smallest, the product.
    results.append(
        hvd.allreduce(torch.ones(4), op=hvd.Sum, prescale_factor=3.0).tolist() == [3.0 * (hvd.size() - 1)] * 4
    )
    results.append(hvd.allreduce(torch.ones(4), op=hvd.Min).tolist() == [0.0] * 4)
    results.append(hvd.allreduce(-torch.ones(4), op=hvd.Max).tolist() == [0.0] * 4)
    results.append(hvd.allreduce(torch.ones(4), op=hvd.Product).tolist() == [0.0] * 4)
    if hvd.size() & (hvd.size() - 1) == 0:
        results.append(bool(hvd.allreduce(torch.ones(4), op=hvd.Adasum).isfinite().all()))
    hvd.join()
    _whole()
    return results


def test_a_joined_rank_takes_part_in_what_it_never_heard_of(world: World) -> None:
    for _ in range(2):
        for seen in world.run(_never_seen_here)[1:]:
            assert all(seen), seen


def _training(batches: list[int]) -> tuple[int, list[float]]:
    """The loss is linear, so the weights count the batches of all ranks."""
    import torch
    from torch import nn

    import horovod.torch as hvd

    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    for step in range(batches[hvd.rank()]):
        optimizer.zero_grad()
        model(torch.full((3, 4), float(step + hvd.rank()))).sum().backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    return last, [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def test_training_goes_on_without_the_ranks_that_have_joined(world: World) -> None:
    batches = [2, 7, 4, 5][: world.size]
    results = world.run(_training, batches)
    assert {last for last, _ in results} == {1}
    assert all(weights == results[0][1] for _, weights in results)


def _refused() -> list[str]:
    import torch

    import horovod.torch as hvd

    whole = torch.ones(2 * hvd.size())
    calls = {
        "allgather": lambda: hvd.allgather(whole, name="refused"),
        "broadcast": lambda: hvd.broadcast(whole, 1, name="refused"),
        "alltoall": lambda: hvd.alltoall(whole, name="refused"),
        "reducescatter": lambda: hvd.reducescatter(whole, name="refused"),
        "unnamed": lambda: hvd.allgather(whole),
        "barrier": hvd.barrier,
        "sparse": lambda: hvd.synchronize(hvd.sparse_allreduce_async(whole.to_sparse(), "refused.sparse", hvd.Sum)),
    }
    for call in calls.values():  # so that half of them run under ids
        if call is not calls["alltoall"] and call is not calls["broadcast"]:
            call()
    sentences = []
    if hvd.rank() != 0:
        for call in calls.values():
            try:
                call()
            except hvd.HorovodInternalError as error:
                sentences.append(str(error))
    hvd.join()
    for call in calls.values():
        call()
    _whole()
    return sentences


def test_what_is_no_allreduce_is_refused(world: World) -> None:
    for _ in range(2):
        results = world.run(_refused)
        for sentences in results[1:]:
            kinds = ["Allgather", "Broadcast", "Alltoall", "Reducescatter", "Allgather", "Barrier", "Allgather"]
            assert len(sentences) == len(kinds)
            for sentence, kind in zip(sentences, kinds, strict=True):
                stem = rf"{kind} is not supported with Join at this time\. Ranks? 0\b.* called hvd\.join\(\)"
                assert re.match(stem, sentence), sentence


def _own_operations_first() -> tuple[list[float], list[float], int]:
    import torch

    import horovod.torch as hvd

    gathered = hvd.allgather_async(torch.tensor([float(hvd.rank())]), name="first")
    reduced = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    last = hvd.join()
    return hvd.synchronize(gathered).tolist(), hvd.synchronize(reduced).tolist(), last


def test_what_a_rank_started_before_completes(world: World) -> None:
    results = world.run(_own_operations_first)
    for gathered, reduced, last in results:
        assert gathered == list(range(world.size))
        assert reduced == [world.size]
        assert last == results[0][2]


def _threads() -> str:
    """Another thread of a joined rank submits; then every rank joins from two threads at once."""
    import threading

    import torch

    import horovod.torch as hvd

    lasts: list[int] = []
    joiner = threading.Thread(target=lambda: lasts.append(hvd.join()))
    sentence = ""
    if hvd.rank() == 0:
        joiner.start()
        while not sentence:
            try:
                hvd.allreduce(torch.ones(1), op=hvd.Sum, name="from another thread")
            except hvd.HorovodInternalError as error:
                sentence = str(error)
    else:
        # The sum is the number of ranks until rank 0 has joined and contributes zeros. So every rank leaves this loop
        # after the same allreduce: the first that rank 0 did not submit itself.
        while hvd.allreduce(torch.ones(1), op=hvd.Sum, name="from another thread").item() == hvd.size():
            pass
        joiner.start()
    lasts.append(hvd.join())
    joiner.join(30)
    assert len(lasts) == 2
    assert lasts[0] == lasts[1]
    _whole()
    return sentence


def test_a_joined_rank_starts_nothing_itself(world: World) -> None:
    sentence = world.run(_threads)[0]
    assert tells(sentence, "rank 0", "hvd.join()")


def _in_process_sets() -> list[float]:
    import torch

    import horovod.torch as hvd

    some = hvd.add_process_set([0, 2])
    seen: list[float] = []
    if hvd.rank() != 1:
        while hvd.allreduce(torch.ones(1), op=hvd.Sum, name="joined?").item() == hvd.size():
            pass
        seen = hvd.allgather(torch.tensor([float(hvd.rank())]), process_set=some).tolist()
    else:
        hvd.allreduce(torch.ones(1), op=hvd.Sum, name="joined?")
    hvd.join()
    hvd.remove_process_set(some)
    return seen


@TRANSPORTS
def test_other_process_sets_go_on(transport: str) -> None:
    with World(3, transport, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as world:
        assert world.run(_in_process_sets) == [[0.0, 2.0], [], [0.0, 2.0]]


def _dies_while_others_join(how: str) -> None:
    import torch

    import horovod.torch as hvd

    hvd.allreduce(torch.ones(1), name="before")
    if hvd.rank() == 1:
        hvd.allreduce(torch.ones(1), name="before")  # the others have joined
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.shutdown()
        return
    hvd.join()


@TRANSPORTS
@pytest.mark.parametrize("how", ["kill", "shutdown"])
def test_a_rank_that_goes_without_joining(transport: str, how: str) -> None:
    with World(3, transport) as world:
        outcomes = world.outcomes(_dies_while_others_join, how)
    for rank in (0, 2):
        assert type(outcomes[rank].error).__name__ == "HorovodInternalError"
        assert "ank 1 (pid " in str(outcomes[rank].error)
        assert "hvd.join()" in str(outcomes[rank].error)


def _join_only() -> int:
    import horovod.torch as hvd

    return hvd.join()


def test_rounds_in_which_nothing_happens(world: World) -> None:
    for _ in range(20):
        assert len(set(world.run(_join_only))) == 1


def _alone() -> tuple[int, str | None]:
    import horovod.torch as hvd

    try:
        hvd.join(device="cuda:0")  # type: ignore[arg-type]
    except TypeError as error:
        return hvd.join(), code_of(error)
    return -1, None


def test_alone() -> None:
    with World(1) as world:
        assert world.run(_alone) == [(0, TrainingCode.INVALID_ARGUMENT)]
