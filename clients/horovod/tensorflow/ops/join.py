"""hvd.join: a rank that has no more data says so, and the others go on."""

from __future__ import annotations

import tensorflow as tf

from horovod.common.ops import collectives
from horovod.tensorflow.library import OPS, raised_as_tensorflow_does


def join() -> tf.Tensor:
    """Waits until all ranks have joined; the rank that did so last, an int32 scalar.

    Meanwhile this rank contributes zeros to the other ranks' allreduces, which still divide by the number of all ranks;
    their other collectives fail. Example, where rank 1 has one batch more:

        >>> for _ in range(1 + hvd.rank()):
        ...     _ = hvd.allreduce(tf.ones(2), name="loss")
        >>> int(hvd.join())
        1
    """
    if not tf.executing_eagerly():
        return OPS.horovod_join()
    with raised_as_tensorflow_does("HorovodJoin"):
        # Waits here, because a node of TensorFlow would keep signals from the main thread.
        return tf.constant(collectives.join(-1))
