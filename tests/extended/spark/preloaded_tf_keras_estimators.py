"""The same for tf_keras."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
import tensorflow as tf  # it starts its threads with the first operation
import worlds

import horovod.tensorflow.keras  # noqa: F401


def forked(descriptors: list[int]) -> None:
    """A rank that serves functions from the pipe."""
    worlds.serve(Connection(descriptors[0]), lambda: tf.random.set_seed(0))
