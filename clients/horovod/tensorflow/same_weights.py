"""Comparisons of weights over the ranks (common/counted_weights.py) before the gradients of a step are reduced.

In a function that is an operation, HorovodSameWeights, before the reductions. It asks Python whether ranks compare in
this step, which is so in few, and Python reads the variables: so a function has neither their values as inputs nor a
variable that counts, which a SavedModel would have to hold. What XLA compiles has no such operation, nor have graphs of
tf.compat.v1 sessions, whose variables only a session can read: these compare nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.python.saved_model import save_context

from horovod._keras import held
from horovod.common.optimizer_numbers import Line, Made
from horovod.common.process_sets import ProcessSet
from horovod.common.script import lines_of_the_script
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
    order = None
    if made is None and (anchor := trained.get(first)) is not None:
        order = _Tape(called.wire, process_set.process_set_id, getattr(anchor, "_value", anchor))
    counted = held.counted(called.wire, trained, process_set, optimizer, _values, made, order)
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


class _Tape:
    """From where the gradients of a model come: the line of the script. What CountedWeights calls an Order."""

    verb = "computed"
    _known: ClassVar[dict[tuple[str, int | None], dict[str, weakref.ref[Any]]]] = {}  # by names: a variable, by line

    def __init__(self, wire: str, process_set: int | None, anchor: Any) -> None:
        self.place = lines_of_the_script()
        self._anchor = weakref.ref(anchor)
        self._lines = self._known.setdefault((wire, process_set), {})
        self._lines[self.place] = self._anchor

    def line(self) -> Line:
        """The place, and those at which this rank has trained other models."""
        own = self._anchor()
        others = ((place, variable()) for place, variable in self._lines.items())
        return self.place, [place for place, variable in others if variable is not None and variable is not own]


def _can_read_variables() -> bool:
    """Outside of sessions."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def _values(variable: Any) -> Any:
    value = getattr(variable, "_value", variable)  # of a keras.Variable
    return value.numpy()
