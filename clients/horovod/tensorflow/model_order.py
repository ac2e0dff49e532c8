"""Whether all ranks reduce for several models in one order, where a function trains more than one.

What a function reduces for a second model has the names of the first one with a number, in the order in which the
function was traced. A rank that traced the models in another order would get the gradients of the wrong one. The order
in which they were made tells: where that is not the order in the function, it must differ alike on all ranks. A small
allreduce compares it, before what it is about, in each step of a function with several models.
"""

from __future__ import annotations

import bisect
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Max
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import xla
from horovod.tensorflow.ops.calls import id_of
from horovod.tensorflow.ops.reductions import reduce
from horovod.tensorflow.order.names import function_of, named, names_in


class Owner(NamedTuple):
    """What something is reduced for, a variable or a layer."""

    name: str
    path: str  # the name of the owner, in which Keras counts: dense, dense_1
    made: int = 0  # of two with one path, which was made first


@contextmanager
def in_order(owners: Sequence[Owner], process_set: ProcessSet = global_process_set) -> Iterator[list[str]]:
    """Under which names to reduce, in the context. Raises InvalidArgumentError on all ranks when they differ."""
    names = [owner.name for owner in owners]
    if tf.executing_eagerly():
        yield names
        return
    process_set_id = id_of(process_set, "Allreduce")
    known = _models_in(tf.compat.v1.get_default_graph())
    moved = {
        place: known.moved(_Made(owner.name, process_set_id), (_counted(owner.path), owner.made))
        for place, owner in enumerate(owners)
    }
    again = {place: by for place, by in moved.items() if by is not None}
    if xla.compiling():  # XLA drops assertions, and waits in order: a name that is nowhere else is found
        yield [f"{name}.before_{again[place]}" if again.get(place) else name for place, name in enumerate(names)]
        return
    with tf.control_dependencies(_compared(list(again.values()), process_set_id) if again else []):
        yield names


class _Made(NamedTuple):
    """What belongs to a model: in a function, there is one for each model."""

    name: str
    process_set_id: int


class _Models:
    """The models that a function reduces for, with its loops and branches and with the functions that it calls."""

    def __init__(self) -> None:
        self._made: dict[_Made, list[Any]] = {}  # when the owners were made, in ascending order

    def moved(self, what: _Made, when: Any) -> int | None:
        """How many owners came before and were made later; None if there was no other. It is one from now on."""
        others = self._made.setdefault(what, [])
        place = bisect.bisect_right(others, when)
        others.insert(place, when)
        return None if others[0] == others[-1] else len(others) - 1 - place

    def called(self) -> list[Any]:
        """Adds those of this function to that which calls it now. Returns the operations that compare the ranks."""
        caller = _models_in(tf.compat.v1.get_default_graph())
        moved: dict[int, list[int]] = {}
        for what, several in self._made.items():
            by = [caller.moved(what, when) for when in list(several)]
            moved.setdefault(what.process_set_id, []).extend(one for one in by if one is not None)
        return [check for process_set_id, by in moved.items() if by for check in _compared(by, process_set_id)]


_models: Final[weakref.WeakKeyDictionary[Any, _Models]] = weakref.WeakKeyDictionary()  # by the graph of the function


def _models_in(graph: Any) -> _Models:
    function = function_of(graph)
    if function not in _models:
        _models[function] = models = _Models()
        names_in(function).at_calls.append(models.called)
    return _models[function]


def _compared(moved: Sequence[int], process_set_id: int) -> list[Any]:
    """The operation that fails where ranks differ."""
    own = tf.constant([*moved, *(-by for by in moved)], tf.int32)
    called = named("allreduce", "HorovodAllreduce", "models.order", own, ignore_name_scope=True)
    most = reduce(own, called, Max, 1.0, 1.0, process_set_id)
    sentence = coded(
        TrainingCode.DIFFERENT_ORDER,
        "One function reduces gradients of several models, and the ranks do so in different orders: on some rank, the "
        "function uses the models in another order than that in which they or their variables were made. Make the "
        "models in the same order on all ranks, and use them in the same order (a set has none), or train each in a "
        "separate function.",
    )
    return [tf.debugging.Assert(tf.reduce_all(tf.equal(most, own)), [sentence])]


def _counted(path: str) -> list[tuple[bool, int, str]]:
    """For comparison: dense_9 comes before dense_10."""
    parts = re.split(r"(\d+)", path)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
