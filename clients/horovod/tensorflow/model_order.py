"""Whether all ranks reduce for several models in one order, where a function trains more than one.

What a function reduces for a second model has the names of the first one with a number, in the order in which the
function was traced. A rank that traced the models in another order would get the gradients of the wrong one. The order
in which they were made tells: where that is not the order in the function, it must differ alike on all ranks. A small
allreduce compares it, before what it is about, in each step of a function with several models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Max
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import xla
from horovod.tensorflow.call_numbers import Made, names_in
from horovod.tensorflow.names import named
from horovod.tensorflow.ops.calls import id_of
from horovod.tensorflow.ops.reductions import reduce


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
    known = names_in(tf.compat.v1.get_default_graph())
    moved = {
        place: known.moved(Made(owner.name, process_set_id), (_counted(owner.path), owner.made))
        for place, owner in enumerate(owners)
    }
    again = {place: by for place, by in moved.items() if by is not None}
    if xla.compiling():  # XLA drops assertions, and waits in order: a name that is nowhere else is found
        yield [f"{name}.before_{again[place]}" if again.get(place) else name for place, name in enumerate(names)]
        return
    with tf.control_dependencies(compared(list(again.values()), process_set_id) if again else []):
        yield names


def compared(moved: Sequence[int], process_set_id: int) -> list[Any]:
    """The operation that fails where ranks differ."""
    own = tf.constant([*moved, *(-by for by in moved)], tf.int32)
    called = named("allreduce", "HorovodAllreduce", "models.order", own, ignore_name_scope=True)
    most = reduce(own, called, Max, 1.0, 1.0, process_set_id)
    sentence = coded(
        TrainingCode.DIFFERENT_ORDER,
        "The ranks reduce for several models in one function, and not in the same order: that in which the models or "
        "their variables were made is not on all ranks that in which the function uses them. Make the models in the "
        "same order on all ranks, and use them in the same order (a set has none), or train each in a function of its "
        "own.",
    )
    return [tf.debugging.Assert(tf.reduce_all(tf.equal(most, own)), [sentence])]


def _counted(path: str) -> list[tuple[bool, int, str]]:
    """For comparison: dense_9 comes before dense_10."""
    parts = re.split(r"(\d+)", path)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
