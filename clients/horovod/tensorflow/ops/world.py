"""The numbers of the world as operations, which a graph that outlives a world asks for anew each time.

What XLA compiles has them as constants, of when the function was traced.
"""

from __future__ import annotations

import tensorflow as tf

from horovod.common import basics
from horovod.common.ops.specs import set_size
from horovod.tensorflow import xla
from horovod.tensorflow.library import OPS, process_set_of


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks in a process set when it runs, an int32 scalar.

    >>> int(hvd.size_op())
    2

    `process_set_id` is that of a hvd.ProcessSet, 0 for all ranks; `name` is that of the operation in a graph. Raises
    tf.errors.FailedPreconditionError before hvd.init(), InvalidArgumentError if there is no such set.
    """
    if xla.compiling():
        return tf.constant(set_size(process_set_of(process_set_id)), name=name)
    return OPS.horovod_size(process_set_id=process_set_id, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 when this process is in a process set, else 0, an int32 scalar. Takes and raises what `size_op` does.

    >>> int(hvd.process_set_included_op())
    1
    """
    if xla.compiling():
        return tf.constant(int(bool(process_set_of(process_set_id).included())), name=name)
    return OPS.horovod_process_set_included(process_set_id=process_set_id, name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of processes on this host when it runs, an int32 scalar. Takes and raises what `size_op` does.

    >>> int(hvd.local_size_op())
    2
    """
    if xla.compiling():
        return tf.constant(basics.local_size(), name=name)
    return OPS.horovod_local_size(name=name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number in the world when it runs, an int32 scalar. Takes and raises what `size_op` does.

    >>> int(hvd.rank_op())
    0  # on rank 0; 1 on rank 1
    """
    if xla.compiling():
        return tf.constant(basics.rank(), name=name)
    return OPS.horovod_rank(name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number on its host when it runs, an int32 scalar. Takes and raises what `size_op` does.

    >>> int(hvd.local_rank_op())
    0  # on rank 0; 1 on rank 1
    """
    if xla.compiling():
        return tf.constant(basics.local_rank(), name=name)
    return OPS.horovod_local_rank(name=name)
