"""One order for the collectives of what XLA compiles: that in which the script's functions were traced.

Their handler waits (docs/adr/0049), and XLA puts calls that need nothing of each other into an order of its own, for
each shape another one: ranks with batches of different sizes would wait for each other for ever. So each call takes a
number from a variable and gives it back for the next one. TensorFlow carries a variable through loops, branches and
functions in the order of the program, and XLA must keep to it, since it does not know what a call does with the number.

A compiled function holds the lock of what it assigns while it runs. So threads have variables of their own: each may
run functions that it has traced itself, whatever the others run.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # past tf.function's creators of variables

_NAME: Final = "horovod_xla_order"


class _OfThread(threading.local):
    variable: Any = None


_of_thread: Final = _OfThread()
_of_v1_function: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()


def take() -> tf.Tensor:
    """The first argument of the call that is traced next, an int32 scalar."""
    if not _in_a_function():
        return tf.constant(0)
    return tf.raw_ops.ReadVariableOp(resource=_variable().handle, dtype=tf.int32)


def give(token: tf.Tensor) -> None:
    """To be called with the call's first result."""
    if _in_a_function():
        tf.raw_ops.AssignVariableOp(resource=_variable().handle, value=token)


def _in_a_function() -> bool:
    """Outside of one (tf.xla.experimental.compile in a v1 graph) TensorFlow keeps nothing in the script's order."""
    return bool(getattr(tf.compat.v1.get_default_graph(), "building_function", False))


def _variable() -> Any:
    function = _outermost_function()
    with tf.init_scope():
        if not tf.executing_eagerly():
            return _in_a_v1_graph(function)
        if _of_thread.variable is None:
            with tf.device("CPU:0"):
                _of_thread.variable = ResourceVariable(0, trainable=False, name=_NAME)
        return _of_thread.variable


def _outermost_function() -> Any:
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph.outer_graph, "building_function", False):
        graph = graph.outer_graph
    return graph


def _in_a_v1_graph(function: Any) -> Any:
    """A variable of the graph that no saver knows, and that needs no initializer: the function assigns it first."""
    if function not in _of_v1_function:
        with tf.device("CPU:0"):
            made = ResourceVariable(0, trainable=False, collections=[], name=_NAME)
        _of_v1_function[function] = made
        with function.as_default():
            tf.raw_ops.AssignVariableOp(resource=made.handle, value=tf.constant(0))
    return _of_v1_function[function]
