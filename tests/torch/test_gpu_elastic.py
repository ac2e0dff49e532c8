"""Elastic training whose weights are on GPUs: a rank is killed in a step, the others go on, a newcomer is taken in.

Each step takes the gradient of the same rows, whatever the number of ranks that share them, so the weights are those of
one process. On CPUs too, where the test itself can be seen to work.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from gpu_worlds import NO_DEVICE
from worlds import World

STEPS, ROWS = 12, 12  # 1 to 4 ranks share the rows evenly
KILLED_AT, WAITS_AT = 5, 8  # steps; in the second one the world waits until it has its size again


def make(device: str) -> tuple[Any, Any]:
    import torch

    chance = torch.Generator().manual_seed(7)
    batches = torch.randn((STEPS, ROWS, 16), dtype=torch.float64, generator=chance).to(device)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
    return model.to(device), batches


def weights_of(model: Any) -> Any:
    import torch

    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def train_alone(device: str) -> Any:
    import torch

    model, batches = make(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def train_elastic(device: str, victims: list[int], size: int, is_replaced: bool, lives: str) -> dict[str, Any]:
    """lives: the beginning of a file's name for each victim, by which its replacement knows that it is one."""
    import torch

    import horovod.torch as hvd

    number = int(os.environ["HOROVOD_RANK"])
    if device == "cuda":
        os.environ["NCCL_HOSTID"] = f"horovod-test-{number}-{os.getpid()}"  # ranks may share one GPU
        torch.cuda.set_device(number % torch.cuda.device_count())
    dies = number in victims and not os.path.exists(f"{lives}{number}")
    hvd.init()
    model, batches = make(device)
    if hvd.rank() > 0:  # what others begin with must not matter
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer: Any = hvd.DistributedOptimizer(inner, model.named_parameters())
    sizes = [hvd.size()]
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            while is_replaced and state.step == WAITS_AT and hvd.size() < size:
                time.sleep(0.01)  # training takes its time meanwhile
                state.commit()
            optimizer.zero_grad()
            model(batches[state.step].chunk(hvd.size())[hvd.rank()]).square().mean().backward()
            if dies and state.step == KILLED_AT:
                with open(f"{lives}{number}", "w"):
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    assert all(parameter.device.type == device for parameter in model.parameters())
    return {"weights": weights_of(model), "sizes": sizes}


@pytest.mark.parametrize(
    ("size", "victims", "is_replaced"), [(3, [0], False), (2, [1], True), (4, [1, 2], False)], ids=str
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_survivors_train_on(device: str, size: int, victims: list[int], is_replaced: bool, tmp_path: Any) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_DEVICE)
    with World(size, "shm", {"HOROVOD_MIN_SIZE": "1", "HOROVOD_MAX_SIZE": str(size)}) as world:
        before = [lambda: None] if is_replaced else []
        outcomes = world.outcomes(
            train_elastic, device, victims, size, is_replaced, f"{tmp_path}/life-", before_replacing=before
        )
    alone = train_alone(device)
    for rank, outcome in enumerate(outcomes):
        if rank in victims and not is_replaced:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.text
        assert outcome.value["sizes"][-1] == (size if is_replaced else size - len(victims))
        torch.testing.assert_close(outcome.value["weights"], alone, rtol=1e-9, atol=1e-12)
