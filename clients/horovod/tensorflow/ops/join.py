"""hvd.join: a rank that has no more data says so, and the others go on."""

from __future__ import annotations

import tensorflow as tf

from horovod.common.ops import collectives
from horovod.tensorflow.library import OPS, tensorflow_code


def join() -> tf.Tensor:
    """Waits until all ranks have joined; the rank that did so last, an int32 scalar.

    Meanwhile this rank contributes zeros to the other ranks' allreduces, which still divide by the number of all ranks;
    their other collectives fail. Example, where rank 1 has one batch more:

        >>> for _ in range(1 + hvd.rank()):
        ...     _ = hvd.allreduce(tf.ones(2), name="loss")
        >>> int(hvd.join())
        1

    Raises:
        tf.errors.FailedPreconditionError: before hvd.init().
        tf.errors.UnknownError: a rank was lost.
    """
    if not tf.executing_eagerly():
        return OPS.horovod_join()
    try:
        return tf.constant(collectives.join(-1))  # TensorFlow's wait for a node would keep signals from the main thread
    except Exception as error:
        of_tensorflow = tf.errors.exception_type_from_error_code(tensorflow_code(error))
        raise of_tensorflow(None, None, f"{error} [Op:HorovodJoin]") from None
