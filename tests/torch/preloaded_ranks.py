"""What the ranks of worlds.py have imported when they are forked; see fork_server.py."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

# Whether there are GPUs must not be found out by asking CUDA, which no child could use after that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
import torch._dynamo
import worlds

import horovod.torch  # noqa: F401


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    torch.set_num_threads(1)
    worlds.serve(Connection(descriptors[0]), lambda: torch.manual_seed(0))
