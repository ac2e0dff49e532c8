"""What the ranks of MXNet's tests have imported when they are forked; see fork_server.py."""

from __future__ import annotations

import copyreg
from multiprocessing.connection import Connection

import mxnet
import worlds

import horovod.mxnet  # noqa: F401

STOPS_ITS_THREADS = True  # those of MXNet's engine, which come back after a fork
copyreg.pickle(mxnet.MXNetError, lambda error: (RuntimeError, error.args))  # pytest's environment has no MXNet


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    worlds.serve(Connection(descriptors[0]), lambda: None)
