"""Ranks with less data than others and worlds that come and go, on real GPUs and on those of the stand-ins.

What only the stand-ins can show (who waits for whom, that nothing at all is left) is in test_gpu_training.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu_worlds import WORLDS, cuda_world
from worlds import World

CYCLES = 20
# What the driver and NCCL may keep for themselves, after they have settled. A communicator takes more.
SLACK_BYTES = 8 << 20


@pytest.fixture(params=WORLDS)
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    with WORLDS[request.param](2) as keeper:
        yield keeper.get()


def reduce_uneven_data(used_before: bool) -> tuple[int, list[list[float]]]:
    """Rank r reduces 2 r + 1 times and joins; rank 0 not at all where it has not used a GPU before."""
    import op_cases
    import torch

    import horovod.torch as hvd

    made = op_cases.to_device(torch.ones(1000))
    if used_before:
        hvd.allreduce_(made, name="both")
    seen = []
    for _ in range(2 * hvd.rank() + 1 if used_before or hvd.rank() > 0 else 0):
        value = op_cases.to_device(torch.full((1000,), 2.0))
        small = [op_cases.to_device(torch.full((3,), 4.0)) for _ in range(10)]
        hvd.allreduce_(value, name="uneven")
        hvd.grouped_allreduce_(small, name="small", op=hvd.Sum)
        seen.append([float(one.cpu()[-1]) for one in (value, *small)])
    last = hvd.join(-1 if used_before else made.device.index)
    assert hvd.allreduce_(made, name="whole", op=hvd.Sum).cpu().tolist() == [2.0] * 1000
    return last, seen


@pytest.mark.parametrize("used_before", [True, False])
def test_join(pair: World, used_before: bool) -> None:
    both, alone = [2.0] + [8.0] * 10, [1.0] + [4.0] * 10
    first, second = pair.run(reduce_uneven_data, used_before)
    assert first == (1, [both] if used_before else [])
    assert second == (1, [both if used_before else alone, alone, alone])


def come_and_go(cycles: int) -> list[int]:
    """Free bytes of the device in each world of `cycles`, while both ranks do nothing but meet."""
    import gc

    import torch

    import horovod.torch as hvd

    free = []
    for _ in range(cycles):
        small = [torch.ones(50 + i, device="cuda") for i in range(20)]
        values = torch.ones(1 << 20, device="cuda")
        hvd.allreduce_(values, op=hvd.Average, prescale_factor=0.5)
        hvd.grouped_allreduce_(small, op=hvd.Sum)
        gathered = hvd.allgather(values)
        part = hvd.reducescatter(values, op=hvd.Sum)
        through_the_host = hvd.allreduce(torch.ones(1000, dtype=torch.int16, device="cuda"), op=hvd.Sum)
        assert int(through_the_host.sum()) == 1000 * hvd.size()
        del small, values, gathered, part, through_the_host
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        hvd.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        hvd.barrier()
        hvd.shutdown()
        hvd.init()
    return free


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2])
def test_twenty_worlds_take_no_memory_of_the_device_on_cuda(size: int) -> None:
    with cuda_world(size) as keeper:
        found = keeper.get().run(come_and_go, CYCLES, deadline_seconds=240)
    for free in found:
        settled = free[4]
        assert settled - free[-1] <= SLACK_BYTES, f"free bytes, world by world: {free}"


def lose_a_rank(victim: int) -> Any:
    import os
    import signal

    import op_cases
    import torch

    import horovod.torch as hvd

    values = op_cases.to_device(torch.ones(1000))
    hvd.allreduce_(values, name="values")
    values.cpu()
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)

    def steps() -> None:
        for _ in range(1_000_000):
            hvd.allreduce_(values, name="values")
            values.cpu()

    with pytest.raises(hvd.HorovodInternalError) as raised:
        steps()
    hvd.shutdown()
    return str(raised.value)


@pytest.mark.parametrize("kind", WORLDS)
def test_every_survivor_is_told_who_is_lost(kind: str) -> None:
    import signal

    with WORLDS[kind](3) as keeper:
        world = keeper.get()
        lost = world.pids[1]
        outcomes = world.outcomes(lose_a_rank, 1)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].text
        assert f"ank 1 (pid {lost})" in outcomes[rank].value
