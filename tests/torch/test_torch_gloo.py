"""HOROVOD_CPU_OPERATIONS=gloo in real processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from event_words import NO_GLOO
from test_failures import _assert_lost
from test_training import train_alone, train_distributed
from worlds import World

from horovod import _core

pytestmark = pytest.mark.skipif(
    NO_GLOO in _core.gloo_obstacle(), reason="built without Gloo (libgloo-dev was not there)"
)


def gloo_world(size: int) -> World:
    return World(size, "auto", {"HOROVOD_CPU_OPERATIONS": "gloo"})


@pytest.fixture(scope="module")
def trio() -> Iterator[World]:
    with gloo_world(3) as world:
        yield world


def _what_is_used() -> tuple[bool, str, str]:
    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    return hvd.gloo_built(), current().settings.cpu_operations, current().transport


def test_gloo_is_in_use_and_says_so(trio: World) -> None:
    assert trio.run(_what_is_used) == [(True, "gloo", "tcp")] * 3


def _every_collective() -> None:
    import torch

    import horovod.torch as hvd

    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        for count in (0, 1, 5000):
            ones = torch.full((count,), rank + 1, dtype=dtype)
            total = size * (size + 1) // 2
            assert torch.equal(hvd.allreduce(ones, op=hvd.Sum), torch.full((count,), total, dtype=dtype))
            assert torch.equal(hvd.broadcast(ones, 1), torch.full((count,), 2, dtype=dtype))
        rows = torch.full((rank, 2), rank, dtype=dtype)
        gathered = hvd.allgather(rows)
        assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
        got, splits = hvd.alltoall(torch.arange(size * 3).to(dtype), splits=torch.tensor([0, 1, 5], dtype=torch.int32))
        assert splits.tolist() == [[0, 1, 5][rank]] * size
        assert len(got) == size * [0, 1, 5][rank]
        mine = hvd.reducescatter(torch.ones(size + 1, 2, dtype=dtype), op=hvd.Sum)
        assert mine.tolist() == [[size] * 2] * (2 if rank == 0 else 1)
    hvd.barrier()


def test_every_collective(trio: World) -> None:
    trio.run(_every_collective)


def test_training_equals_one_process(trio: World) -> None:
    alone = train_alone("SGD", trio.size)
    for weights in trio.run(train_distributed, "SGD"):
        for mine, expected in zip(weights, alone, strict=True):
            assert mine == pytest.approx(expected, rel=1e-9, abs=1e-12)


def _die_at_work() -> None:
    """Rank 1 is killed while all ranks are inside of Gloo, or between two of its operations."""
    import torch

    import horovod.torch as hvd
    from horovod.worker.runtime.context import current

    def kill_at(batches: int) -> None:
        engine, pause = current().engine, threading.Event()
        while engine.counters()["batches"] < batches:  # there is no event to wait for
            pause.wait(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    if hvd.rank() == 1:
        threading.Thread(target=kill_at, args=(5,), daemon=True).start()
    while True:
        hvd.allreduce_(torch.ones(4_000_000), name="large")


def test_a_killed_rank_is_named_on_all_others() -> None:
    with gloo_world(3) as world:
        outcomes = world.outcomes(_die_at_work)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        _assert_lost(outcomes[rank], 1)
