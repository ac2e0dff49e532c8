"""What the ranks of MXNet's tests have imported when they are forked; see fork_server.py."""

from __future__ import annotations

from multiprocessing.connection import Connection

import mxnet  # noqa: F401
import worlds

import horovod.mxnet  # noqa: F401

STOPS_ITS_THREADS = True  # those of MXNet's engine, which come back after a fork


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    worlds.serve(Connection(descriptors[0]), lambda: None)
