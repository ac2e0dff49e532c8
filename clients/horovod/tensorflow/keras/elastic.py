"""Elastic training with tf.keras: processes may be lost, or replaced, while the others keep their weights and go on.

>>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
>>> @hvd.elastic.run
... def train(state):
...     state.model.fit(
...         images,
...         labels,
...         initial_epoch=state.epoch,
...         epochs=epochs,
...         callbacks=[
...             hvd.elastic.UpdateBatchStateCallback(state),
...             hvd.elastic.UpdateEpochStateCallback(state),
...             hvd.elastic.CommitStateCallback(state),
...         ],
...     )
>>> train(state)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod._keras import elastic as shared
from horovod._keras.callbacks import classes_for
from horovod._keras.elastic import *  # noqa: F403
from horovod.common.basics import init as init
from horovod.common.basics import shutdown as shutdown
from horovod.common.elastic import leave_at_next_commit as leave_at_next_commit
from horovod.tensorflow.elastic import TensorFlowKerasState as TensorFlowKerasState
from horovod.tensorflow.elastic import run as run

keras: Any = tf.keras
globals().update(classes_for(keras, __name__, shared))

if not TYPE_CHECKING:
    __all__ = [*shared.__all__, "leave_at_next_commit", "run"]  # noqa: PLE0604
