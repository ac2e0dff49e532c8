"""What the ranks of tests of KerasEstimator have imported when they are forked; see fork_server.py."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras  # noqa: F401
import tensorflow as tf  # it starts its threads with the first operation
import worlds

import horovod.keras  # noqa: F401


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    worlds.serve(Connection(descriptors[0]), lambda: tf.random.set_seed(0))
