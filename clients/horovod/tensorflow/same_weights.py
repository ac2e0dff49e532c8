"""Comparisons of weights over the ranks (common/counted_weights.py) before the gradients of a step are reduced.

In a function that is an operation, HorovodSameWeights, before the reductions. It asks Python whether ranks compare in
this step, which is so in few, and Python reads the variables: so a function has neither their values as inputs nor a
variable that counts, which a SavedModel would have to hold. What XLA compiles has no such operation, nor have graphs of
tf.compat.v1 sessions, whose variables only a session can read: these compare nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import save_context

from horovod._keras import held
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow import xla
from horovod.tensorflow.library import OPS, raised_as_tensorflow_does
from horovod.tensorflow.names import named


@contextmanager
def compared(
    trained: Mapping[str, Any], process_set: ProcessSet, optimizer: Any = None, made: Made | None = None
) -> Iterator[None]:
    """Around the reduction of the gradients of these variables, by the names of these. made: as for `reduced`.

    Raises InvalidArgumentError, in a function when it runs, on all ranks: they differ, and the setting says that this
    is an error. UnknownError: a rank was lost.
    """
    if xla.compiling() or save_context.in_save_context() or not _can_read_variables():
        yield
        return
    first = next(iter(trained), "")
    called_first = made.called(first) if made is not None and tf.executing_eagerly() else first
    name = f"{called_first}.same_weights"
    called = named("allreduce", "HorovodSameWeights", name, None, True)
    counted = held.counted(called.wire, trained, process_set, optimizer, _values, made)
    if counted is None:
        yield
    elif tf.executing_eagerly():
        with raised_as_tensorflow_does("HorovodSameWeights"):
            if counted.is_due():
                counted.compare()
        yield
    else:
        compares = OPS.horovod_same_weights(call=called.call_number(), comparison=counted.number)
        with tf.control_dependencies([compares]):
            yield


def _can_read_variables() -> bool:
    """Outside of sessions."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def _values(variable: Any) -> Any:
    value = getattr(variable, "_value", variable)  # of a keras.Variable
    return value.numpy()
