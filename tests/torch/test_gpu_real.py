"""Training on real GPUs, with one rank and with two, which share a GPU where there is only one.

For what the device does meanwhile see test_gpu_training.py, where it can be held, and for the collectives
test_gpu_op_matrix.py.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from gpu_worlds import cuda_world
from worlds import Keeper

STEPS, ROWS = 5, 8


def train(device: str, parts: bool) -> Any:
    """The parameters after some steps, in one vector. With `parts` each rank takes its own of the rows."""
    import torch
    import torch.nn.functional as F

    import horovod.torch as hvd

    rank, size = (hvd.rank(), hvd.size()) if parts else (0, 1)
    torch.manual_seed(rank)  # only rank 0 begins with the weights that count
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if parts:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    chance = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs = torch.randn((ROWS, 16), generator=chance)[rank::size].to(device)
        labels = torch.randn((ROWS, 4), generator=chance)[rank::size].to(device)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def train_both_ways(device: str) -> tuple[Any, Any]:
    return train(device, parts=True), train("cpu", parts=False)


@pytest.mark.parametrize(("device", "size"), [("cpu", 2), ("cuda", 1), ("cuda", 2)])
def test_training_equals_one_process_on_the_cpu(device: str, size: int) -> None:
    """On CPUs too, where the test itself can be seen to work."""
    import torch

    with cuda_world(size) if device == "cuda" else Keeper(size, "shm") as keeper:
        found = keeper.get().run(train_both_ways, device)
    for together, alone in found:
        assert torch.equal(together, found[0][0])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def train_until_rank_1_is_lost() -> str:
    import torch

    import horovod.torch as hvd

    gradient = torch.ones(1000, device="cuda")

    def steps() -> None:
        for step in range(1_000_000):
            if step == 5 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce_(gradient, name="gradient")
            torch.cuda.synchronize()  # here a kernel waits whose peer is gone

    with pytest.raises(hvd.HorovodInternalError) as raised:
        steps()
    torch.cuda.synchronize()  # nothing is stuck there
    assert (gradient + 1).shape == (1000,)  # and the device can be used
    hvd.shutdown()
    return str(raised.value)


def test_a_lost_rank_is_named_and_leaves_the_gpu_usable() -> None:
    with cuda_world(2) as keeper:
        world = keeper.get()
        lost = world.pids[1]
        outcomes = world.outcomes(train_until_rank_1_is_lost)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].error is None, outcomes[0].text
    assert f"ank 1 (pid {lost})" in outcomes[0].value
