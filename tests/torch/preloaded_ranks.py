"""What the ranks of worlds.py have imported when they are forked; see fork_server.py."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

# Whether there are GPUs must not be found out by asking CUDA, which no child could use after that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
import torch._dynamo  # noqa: F401  (seconds, which the first optimizer would take in each child)
import worlds

import horovod.torch  # noqa: F401


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    worlds.serve(Connection(descriptors[0]))
