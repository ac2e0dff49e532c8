"""Elastic training with Keras 3: processes may be lost, or replaced, while the others keep their weights and go on.

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

from collections.abc import Callable
from typing import Any

import keras

from horovod._keras import elastic as shared
from horovod._keras.backends import backend_of
from horovod.common.basics import join_again
from horovod.common.elastic import run_fn

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function `func(state, ...)`, so that it goes on after failures.

    As horovod.tensorflow.elastic.run and horovod.torch.elastic.run, whichever is Keras's backend.
    """
    if backend_of(keras).__name__.endswith("tensorflow_backend"):
        from horovod.tensorflow.elastic import run as run_tensorflow

        return run_tensorflow(func)
    return run_fn(func, join_again)


class KerasState(shared.ModelState):
    """The state of a Keras training: the model, its optimizer and plain values given by name.

    Args:
        model: a built model, else ValueError.
        optimizer: that of the model, if None is given.
        kwargs: plain values, the same names on all ranks.

    `sync` makes all ranks equal to rank 0, or, when rank 0 is new in a training that others were in already, to the
    lowest rank of these. Afterwards everything counts as saved.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(keras, model, optimizer, **kwargs)


class CommitStateCallback(shared.CommitStateCallback, keras.callbacks.Callback):
    __doc__ = shared.CommitStateCallback.__doc__


class UpdateBatchStateCallback(shared.UpdateBatchStateCallback, keras.callbacks.Callback):
    __doc__ = shared.UpdateBatchStateCallback.__doc__


class UpdateEpochStateCallback(shared.UpdateEpochStateCallback, keras.callbacks.Callback):
    __doc__ = shared.UpdateEpochStateCallback.__doc__
