"""Comparisons of weights over the ranks (common/counted_weights.py) before the gradients of a step are reduced.

In a function that is an operation, HorovodSameWeights, before the reductions. It asks Python whether ranks compare in
this step, which is so in few, and Python reads the variables: so a function has neither their values as inputs nor a
variable that counts, which a SavedModel would have to hold. What XLA compiles has no such operation: it compares
nothing.

Variables of a tf.compat.v1 session only the session can read. The graph of an optimizer of tf.compat.v1.train asks
Python (HorovodWeightsDue) and has a branch that reads them, gives them to Python and compares (HorovodCompareWeights).
Before gradients are reduced there are no slots that such a branch could read, so it is put before they are applied.
One with the weights alone is before the reductions, and compares as long as the optimizer has applied nothing: another
one may.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import save_context

from horovod._keras import held
from horovod.common.counted_weights import CountedWeights, Thing, of_model
from horovod.common.optimizer_numbers import Line, Made
from horovod.common.process_sets import ProcessSet
from horovod.common.same_weights import Kind
from horovod.common.script import lines_of_the_script
from horovod.tensorflow import xla
from horovod.tensorflow.library import OPS, raised_as_tensorflow_does
from horovod.tensorflow.order.names import named


@contextmanager
def compared(
    trained: Mapping[str, Any], process_set: ProcessSet, optimizer: Any = None, made: Made | None = None
) -> Iterator[None]:
    """Around the reduction of the gradients of these variables, by the names of these. made: as for `reduced`.

    optimizer: of Keras, which holds more that is compared, or of tf.compat.v1.train.

    Raises InvalidArgumentError, in a function when it runs, on all ranks: they differ, and the setting says that this
    is an error. UnknownError: a rank was lost.
    """
    if xla.compiling() or save_context.in_save_context():
        yield
        return
    is_v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if not tf.compat.v1.executing_eagerly_outside_functions():
        with _weights_in_session(trained, process_set, optimizer) if is_v1 else nullcontext():
            yield
        return
    first = next(iter(trained), "")
    called_first = made.called(first) if made is not None and tf.executing_eagerly() else first
    name = f"{called_first}.same_weights"
    called = named("allreduce", "HorovodSameWeights", name, None, True)
    order = None
    if made is None and (anchor := trained.get(first)) is not None:
        order = functools.partial(_Tape, called.wire, process_set.process_set_id, getattr(anchor, "_value", anchor))
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
    """From where the first gradients of a model come: the line of the script. What CountedWeights calls an Order."""

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


# -- sessions ----------------------------------------------------------------------------------------------------------
# Comparisons of weights alone, by the optimizer before whose reductions they are.
_alone: Final[weakref.WeakKeyDictionary[Any, list[CountedWeights]]] = weakref.WeakKeyDictionary()


@contextmanager
def _weights_in_session(trained: Mapping[str, Any], process_set: ProcessSet, optimizer: Any) -> Iterator[None]:
    variables = _trainable(trained)
    if not variables:
        yield
        return
    counted, compares = _compared_in_session("same_weights", variables, process_set, ())
    _alone.setdefault(optimizer, []).append(counted)
    with tf.control_dependencies([compares]):
        yield


@contextmanager
def compared_with_slots(trained: Mapping[str, Any], process_set: ProcessSet, optimizer: Any) -> Iterator[None]:
    """Around what applies gradients of these variables in the graph of a session. The slots exist."""
    variables = _trainable(trained)
    if not variables:
        yield
        return
    state = list(optimizer.hvd_state(_by_owner(variables)))
    _, compares = _compared_in_session("same_state", variables, process_set, state)
    for one in _alone.pop(optimizer, ()):
        one.retire()
    with tf.control_dependencies([compares]):
        yield


def _trainable(trained: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in trained.items() if getattr(one, "trainable", False)}


def _by_owner(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {held.owner(place, name): one for place, (name, one) in enumerate(variables.items())}


def _compared_in_session(
    what: str, variables: Mapping[str, Any], process_set: ProcessSet, state: Sequence[Thing]
) -> tuple[CountedWeights, Any]:
    """The comparison, and what must run before the step. state: first, because variables differ after a step in which
    one of these did.
    """
    name, anchor = next(iter(variables.items()))
    called = named("allreduce", "HorovodSameWeights", f"{name}.{what}", None, True)
    things = [*state, *((owner, "", one) for owner, one in _by_owner(variables).items())]
    read = _Read([(owner, part) for owner, part, _ in things])

    def make() -> CountedWeights:
        return CountedWeights(called.wire, read, process_set, _remedy_in_session)

    counted = of_model(anchor, (called.wire, process_set.process_set_id), make)
    number = called.call_number()

    def compare() -> Any:
        values = [one.read_value() if hasattr(one, "read_value") else tf.convert_to_tensor(one) for _, _, one in things]
        with tf.control_dependencies([tf.numpy_function(counted.things.take, values, tf.int32)]):
            compares = OPS.horovod_compare_weights(call=number, comparison=counted.number)
        with tf.control_dependencies([compares]):
            return tf.numpy_function(counted.things.drop, [], tf.int32)

    is_due = OPS.horovod_weights_due(call=number, comparison=counted.number) > 0
    # A file of this graph may be loaded where the function of Python is not: there no comparison of this number is due.
    return counted, tf.cond(is_due, compare, lambda: tf.constant(0))


class _Read:
    """What a session has read of the things with these owners and names, until it is compared."""

    def __init__(self, names: list[tuple[str, str]]) -> None:
        self._names = names
        self._values: tuple[Any, ...] = ()

    def take(self, *values: Any) -> np.int32:
        self._values = values
        return np.int32(0)

    def drop(self) -> np.int32:
        return self.take()

    def __call__(self) -> Iterator[Thing]:
        for (owner, name), value in zip(self._names, self._values, strict=True):
            yield owner, name, value


def _remedy_in_session(_: set[Kind]) -> str:
    return (
        "Broadcast them from rank 0 before the first step and after a checkpoint was loaded: "
        "tf.compat.v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]), or in a session of "
        "your own session.run(hvd.broadcast_global_variables(0))."
    )


def _values(variable: Any) -> Any:
    value = getattr(variable, "_value", variable)  # of a keras.Variable
    return value.numpy() if hasattr(value, "numpy") else value
