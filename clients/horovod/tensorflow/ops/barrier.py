"""hvd.barrier: all ranks have come here."""

from __future__ import annotations

import tensorflow as tf

from horovod.base.errors import OperationCode, coded
from horovod.common.ops import collectives
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.library import raised_as_tensorflow_does


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until every rank of `process_set` has called it. Only eagerly: a graph sets its own order. Example:

    >>> hvd.barrier()
    """
    if not tf.executing_eagerly():
        raise NotImplementedError(
            coded(
                OperationCode.NOT_COMPILABLE,
                "hvd.barrier() is a call of Python and would run while the graph is made. Call it outside of "
                "tf.function.",
            )
        )
    with raised_as_tensorflow_does("HorovodBarrier"):
        collectives.barrier(process_set)
