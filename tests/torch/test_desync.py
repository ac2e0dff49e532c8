"""Scripts that take other ways on different ranks: the error names the first operation at which they part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import tiers
from torch_fixtures import SHORT_WORLDS, world_id
from worlds import Keeper, World

from horovod.base.errors import OperationCode, code_of
from horovod.coordinator.core.agreement.deadlock import DeadlockTimes

SOON = DeadlockTimes(still_s=1.0, idle_s=3.0, look_s=0.1)  # ranks report once in a second


@pytest.fixture(scope="module", params=tiers.some(SHORT_WORLDS, 2), ids=world_id)
def keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    with Keeper(*request.param, deadlock=SOON) as keeper:
        yield keeper


def _parts(known: bool) -> str:
    import torch

    import horovod.torch as hvd

    def step(name: str) -> Any:
        return hvd.allreduce(torch.ones(8), name=name)

    names = ["common", "first", "second", "third"]
    for name in names if known else []:
        step(name)
    step("common")
    hvd.allreduce_async(torch.ones(3), name="in flight")  # all ranks have it, so it is not where they part
    try:
        if hvd.rank() == 0:
            step("first")
        elif hvd.rank() == 1:
            handles = [hvd.allreduce_async(torch.ones(8), name=name) for name in ("second", "third")]
            hvd.synchronize(handles[1])
        else:
            step("second")
    except hvd.HorovodInternalError as error:
        sentence = str(error)
    step("common")  # the engine stays usable
    return sentence


@pytest.mark.longer
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_ranks_that_wait_for_each_other(keeper: Keeper, known: bool) -> None:
    world = keeper.get()
    sentences = world.run(_parts, known)
    others = "rank 1" if world.size == 2 else "ranks 1 and 2" if world.size == 3 else "ranks 1-3"
    for sentence in sentences:
        assert code_of(sentence) is OperationCode.DEADLOCK, sentence
        assert re.search(rf"rank 0 .*allreduce\.first, .*{others} ", sentence), sentence
    if world.size == 2:
        assert re.search(r"rank 1 .*allreduce\.second, .*rank 0 ", sentences[0])
    else:
        assert re.search(rf"{others} .*allreduce\.second, .*rank 0 ", sentences[0])


def _counts() -> str:
    import torch

    import horovod.torch as hvd

    for _ in range(3):
        hvd.allreduce(torch.ones(8))
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(8), name=None if hvd.rank() == 0 else "named")
    hvd.barrier()
    return str(caught.value)


@pytest.mark.longer
@pytest.mark.parametrize("transport", tiers.some(["shm", "tcp"], 1))
def test_unnamed_operations_of_one_rank_are_counted(transport: str) -> None:
    with World(2, transport, deadlock=SOON) as world:
        sentences = world.run(_counts)
    first = r"of allreduce\.noname, rank 0 has started 4 and is at test_desync\.py:\d+, in _counts; "
    for sentence in sentences:
        assert re.search(first + r"rank 1 has started 3 and is at test_desync\.py:\d+, in _counts\.", sentence), (
            sentence
        )


def _polls(known: bool) -> str:
    import threading

    import torch

    import horovod.torch as hvd

    names = ["a", "b"]
    for name in names if known else []:
        hvd.allreduce(torch.ones(8), name=name)
    handle = hvd.allreduce_async(torch.ones(8), name=names[hvd.rank() % 2])
    while not hvd.poll(handle):
        threading.Event().wait(0.05)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(handle)
    hvd.barrier()
    return str(caught.value)


@pytest.mark.longer
@pytest.mark.parametrize("known", tiers.pick([False], [True]), ids=["known" if tiers.EXTENDED else "new"])
def test_ranks_that_poll(keeper: Keeper, known: bool) -> None:
    for sentence in keeper.get().run(_polls, known):
        assert re.search(r"(rank 0|ranks 0 and 2) \w+ for allreduce\.a", sentence), sentence


def _parts_in_process_sets() -> str:
    """Every rank waits in another process set: 0 in that of 0 and 1, 1 in that of 1 and 2, 2 in that of 2 and 0."""
    import torch

    import horovod.torch as hvd

    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name="ring", process_set=sets[hvd.rank()])
    hvd.barrier()
    return str(caught.value)


@pytest.mark.longer
@pytest.mark.parametrize("transport", tiers.some(["shm", "tcp"], 1))
def test_a_ring_of_process_sets(transport: str) -> None:
    with World(3, transport, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, deadlock=SOON) as world:
        sentences = world.run(_parts_in_process_sets)
    for rank, other in ((0, 1), (1, 2), (2, 0)):
        expected = f"rank {rank} waits for allreduce.ring in process set {rank + 1}, which rank {other} has not started"
        assert all(expected in sentence for sentence in sentences), sentences


def _who_may_still_start_something() -> list[bool]:
    """all_threads of this rank while its main thread is blocked: with another thread that uses Horovod, and without."""
    import threading

    import torch

    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    engine = current().engine
    used, may_end, blocked = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def other() -> None:
        hvd.allreduce(torch.ones(1), name="from another thread")
        used.set()
        may_end.wait(30)

    def observer() -> None:
        while not any(one.awaited for one in engine.blocked_report().unfinished):
            blocked.wait(0.05)
        seen.append(engine.blocked_report().all_threads)
        may_end.set()
        thread.join(30)
        while not engine.blocked_report().all_threads:
            blocked.wait(0.05)
        both = hvd.allreduce_async(torch.ones(1), name="both have seen it")
        while not hvd.poll(both):
            blocked.wait(0.05)
        hvd.allreduce_async(torch.ones(1), name=f"of {1 - hvd.rank()}")

    thread = threading.Thread(target=other)
    thread.start()
    used.wait(30)
    watching = threading.Thread(target=observer)
    watching.start()
    hvd.allreduce(torch.ones(1), name=f"of {hvd.rank()}")
    watching.join(30)
    return seen


def test_a_thread_that_has_used_horovod_may_do_so_again(pair: World) -> None:
    assert pair.run(_who_may_still_start_something) == [[False]] * 2


def _backward_in_a_thread_that_is_not_pythons() -> str:
    """As on a GPU: the end of the backward pass runs in a thread of autograd's, while the script's waits for it."""
    import _thread

    import torch

    import horovod.torch as hvd

    model = torch.nn.Linear(2, 1)
    optimizers = []  # rank 1 has none that could say that its gradients are not made
    if hvd.rank() == 0:
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers.append(hvd.DistributedOptimizer(plain, model.named_parameters()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # from now on the script's thread counts
    loss = model(torch.ones(1, 2)).sum()
    sentences: list[str] = []
    over = _thread.allocate_lock()
    over.acquire()

    def backward() -> None:
        try:
            loss.backward()
        except hvd.HorovodInternalError as error:
            sentences.append(str(error))
        finally:
            over.release()

    try:
        if hvd.rank() == 0:
            _thread.start_new_thread(backward, ())
            assert over.acquire(timeout=60), "the deadlock was not found"
        else:
            hvd.allreduce(torch.ones(1), name="another operation")
    except hvd.HorovodInternalError as error:
        sentences.append(str(error))
    for optimizer in optimizers:
        optimizer.zero_grad()
    return sentences[0]


def test_a_thread_of_autograd_stands_in_for_the_scripts() -> None:
    with World(2, "shm", {}, deadlock=SOON) as world:
        sentences = world.run(_backward_in_a_thread_that_is_not_pythons)
    for sentence in sentences:
        assert re.search(r"rank 1 .*allreduce\.another operation, .*rank 0 ", sentence), sentence
