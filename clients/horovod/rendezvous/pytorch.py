"""Processes with the four variables that torch.distributed's env:// asks for, whoever has set them.

The Training Operator of Kubeflow (PyTorchJob) and many a script set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT and
no more; these tell nothing of who shares a host.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.rendezvous.task import Task, number
from horovod.rendezvous.torchrun import torch_task


def find(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by these variables; None where one is missing."""
    if any(not environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT")):
        return None
    local = environ["MASTER_ADDR"] == "localhost" or environ["MASTER_ADDR"].startswith("127.")
    run = tuple(f"{name}={environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    size = number(environ, "WORLD_SIZE") if local else None
    return torch_task(environ, "a launcher that sets RANK and WORLD_SIZE", run, size, name_may_come=True)
