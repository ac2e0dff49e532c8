"""What the ranks of tests of Lightning have imported when they are forked; see fork_server.py."""

from __future__ import annotations

import logging
import os
import warnings
from multiprocessing.connection import Connection

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
import lightning.pytorch  # noqa: F401
import pytorch_lightning  # noqa: F401
import torch
import worlds

import horovod.lightning  # noqa: F401


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(package).setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module=rf"{package}.*")
    torch.set_num_threads(1)
    worlds.serve(Connection(descriptors[0]), lambda: torch.manual_seed(0))
