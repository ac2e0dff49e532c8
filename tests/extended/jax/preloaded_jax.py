"""What the ranks of JAX's tests have imported when they are forked; see fork_server.py."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_TRACEBACK_FILTERING"] = "off"  # else JAX adds a note to the text of errors, behind the code
import jax  # noqa: F401  (it starts its threads with the first array)
import optax  # noqa: F401
import worlds

import horovod.jax  # noqa: F401


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    worlds.serve(Connection(descriptors[0]), lambda: None)
