"""Where a rank's tensors are: in memory or, with BENCHMARK_DEVICE=cuda, on a GPU, which ranks may have to share."""

from __future__ import annotations

import os

import torch

from benchmarks.device import share_a_gpu


def place(size: int) -> torch.device:
    """This rank's device, which is torch's current one from now on. Before its library joins a world of `size`."""
    if os.environ.get("BENCHMARK_DEVICE") != "cuda":
        return torch.device("cpu")
    rank, devices = int(os.environ["BENCHMARK_RANK"]), torch.cuda.device_count()
    if size > devices:
        share_a_gpu(rank)
    torch.cuda.set_device(rank % devices)
    return torch.device("cuda", rank % devices)


def finish(device: torch.device) -> None:
    """Waits until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
