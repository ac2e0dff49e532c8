"""Elastic training with Keras 3: processes may be lost, or replaced, while the others keep their weights and go on.

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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from horovod._keras import elastic as shared
from horovod._keras.callbacks import classes_for
from horovod._keras.elastic import *  # noqa: F403
from horovod.base.errors import SettingCode, coded
from horovod.common.basics import init as init
from horovod.common.basics import join_again
from horovod.common.basics import shutdown as shutdown
from horovod.common.elastic import leave_at_next_commit as leave_at_next_commit
from horovod.common.elastic import run_fn

globals().update(classes_for(keras, __name__, shared))

if not TYPE_CHECKING:
    __all__ = [*shared.__all__, "leave_at_next_commit", "run"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "TensorFlowKerasState":  # only where it is asked for: Keras may have another backend
        from horovod.tensorflow.elastic import TensorFlowKerasState

        return TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function `func(state, ...)`, so that it goes on after failures.

    >>> @hvd.elastic.run
    ... def train(state):
    ...     state.model.fit(data, epochs=10 - state.epoch, callbacks=callbacks)
    >>> train(state)

    As horovod.tensorflow.elastic.run and horovod.torch.elastic.run, whichever is Keras's backend.

    Raises:
        NotImplementedError: Keras's backend is JAX.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        sentence = (
            "Elastic training of Keras models works with TensorFlow and PyTorch as Keras's backend. On JAX, train in a "
            "loop with horovod.jax.elastic.run."
        )
        raise NotImplementedError(coded(SettingCode.UNSUPPORTED, sentence))
    if backend == "tensorflow":
        from horovod.tensorflow.elastic import run as run_tensorflow

        return run_tensorflow(func)
    return run_fn(func, join_again)
