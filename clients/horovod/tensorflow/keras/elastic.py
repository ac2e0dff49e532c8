"""Elastic training with tf.keras: processes may be lost, or replaced, while the others keep their weights and go on.

>>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
>>> @hvd.elastic.run
... def train(state):
...     state.model.fit(
...         images,
...         labels,
...         epochs=epochs - state.epoch,
...         callbacks=[
...             hvd.elastic.UpdateBatchStateCallback(state),
...             hvd.elastic.UpdateEpochStateCallback(state),
...             hvd.elastic.CommitStateCallback(state),
...         ],
...     )
>>> train(state)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._keras import elastic as shared
from horovod.tensorflow.elastic import run

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

keras: Any = tf.keras


class KerasState(shared.ModelState):
    __doc__ = shared.ModelState.__doc__

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(keras, model, optimizer, **kwargs)


class CommitStateCallback(shared.CommitState, keras.callbacks.Callback):
    __doc__ = shared.CommitState.__doc__


class UpdateBatchStateCallback(shared.UpdateBatchState, keras.callbacks.Callback):
    __doc__ = shared.UpdateBatchState.__doc__


class UpdateEpochStateCallback(shared.UpdateEpochState, keras.callbacks.Callback):
    __doc__ = shared.UpdateEpochState.__doc__
