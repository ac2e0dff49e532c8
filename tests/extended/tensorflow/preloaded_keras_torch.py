"""What the ranks of tests of Keras on PyTorch have imported when they are forked; see fork_server.py."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

os.environ["KERAS_BACKEND"] = "torch"
import keras  # noqa: F401
import torch._dynamo  # which a step of Keras imports, in seconds
import worlds

import horovod.keras  # noqa: F401


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    torch.set_num_threads(1)
    worlds.serve(Connection(descriptors[0]), lambda: torch.manual_seed(0))
