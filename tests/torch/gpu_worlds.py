"""Worlds whose ranks have GPUs: real ones, or those of the libraries that stand in for them (fake_gpu.py).

The same functions run in both; `to_device` of op_cases.py puts a tensor where the rank's GPU is. Where there are fewer
real GPUs than ranks, some share one: NCCL refuses that within a host, but sees as many hosts as ranks where each names
its own (NCCL_HOSTID), and uses sockets between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
from worlds import Keeper, World

NO_DEVICE = "no CUDA device on this machine"


def standin_world(size: int, transport: str = "shm", **environment: str) -> Keeper:
    """Rank r has GPU r of the stand-in."""
    from native_builds import gpu_libraries  # the ranks, which import this module, can't

    files = [str(file) for file in gpu_libraries()]
    given = {"HOROVOD_CUDA_LIBRARY": files[0], "HOROVOD_NCCL_LIBRARY": files[1], **environment}

    def prepare(world: World) -> None:
        world.run(use_standins, files)

    return Keeper(size, transport, given, prepare)


def cuda_world(size: int, transport: str = "shm", **environment: str) -> Keeper:
    """Rank r has GPU r, counted around where there are fewer. Skips the test where there is none."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip(NO_DEVICE)

    def prepare(world: World) -> None:
        world.run(use_cuda)

    return Keeper(size, transport, environment, prepare)


WORLDS: dict[str, Callable[..., Keeper]] = {"standin": standin_world, "cuda": cuda_world}


# -- on each rank ------------------------------------------------------------------------------------------------------
def use_standins(files: Sequence[str]) -> None:
    import fake_gpu
    import op_cases

    import horovod.torch as hvd

    fake_gpu.install(files, hvd.rank())
    op_cases.to_device = fake_gpu.on_gpu


def use_cuda() -> None:
    import op_cases
    import torch

    import horovod.torch as hvd

    devices = torch.cuda.device_count()
    if hvd.size() > devices:
        os.environ["NCCL_HOSTID"] = f"horovod-test-{hvd.rank()}"
    torch.cuda.set_device(hvd.rank() % devices)
    op_cases.to_device = lambda made: made.cuda()
