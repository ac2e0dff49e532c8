"""What the ranks of the tests of Keras on JAX have imported when they are forked; see fork_server.py."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_TRACEBACK_FILTERING"] = "off"
import worlds

import horovod.jax
import horovod.keras  # noqa: F401


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    worlds.serve(Connection(descriptors[0]), lambda: None)
