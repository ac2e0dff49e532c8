"""The order of calls in a graph whose operations have the same names, where the calls have no numbers of their own.

A function of a loaded model, one that XLA compiles, or the backward pass of a function gives no number to its
operations (names.py). Two calls of it that ran at once would meet each other's operations. TensorFlow keeps what
uses the same resource in the order of the program (automatic control dependencies), and asks functions that are
registered with it what an operation uses: here each name is a resource. An operation with a number reads its name, and
so is in no order with others that read it; one without writes it.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # past tf.function's creators of variables

from horovod.tensorflow.order.names import ARGUMENT

_CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_WITH_FUNCTIONS: Final = _CALLS | {"Case", "If", "While"}  # with effects
_XLA_NAME: Final = re.compile(rb'wire = "([^"]*)"')  # in a program of xla.py


class _Uses(NamedTuple):
    """The names on the wire of all operations in a function and in what it calls."""

    numbered: frozenset[str] = frozenset()
    unnumbered: frozenset[str] = frozenset()


class _Resource:
    """What TensorFlow takes for the tensor of a resource."""

    op = SimpleNamespace(type="HorovodName")

    def __init__(self, number: int | None) -> None:
        self._id = number


_numbers: Final = itertools.count(-1, -1)  # TensorFlow numbers its tensors upward
_EFFECTS: Final = _Resource(None)  # used by all that has effects and uses no resource


@functools.cache
def _resource(name: str) -> _Resource:
    return _Resource(next(_numbers))


def keep_order(operations: frozenset[str]) -> None:
    """operations: types of nodes with a name on the wire. To be called once in a process."""

    def resolve(operation: Any, reads: Any, writes: Any) -> bool:
        """Adds what a node uses to the sets, until there is nothing to add: then it returns False."""
        if operation.type in operations:
            uses = _Uses(numbered=frozenset({_text(operation.get_attr("tensor_name"))}))
        elif operation.type in _WITH_FUNCTIONS:
            uses = _uses(_functions(operation.node_def), operation.type in _CALLS)
        else:
            return False
        written = {_resource(name) for name in uses.unnumbered}
        read = {_resource(name) for name in uses.numbered - uses.unnumbered}
        if (not written and not read) or any(one in writes or one in reads for one in written | read):
            return False
        if operation.type not in operations and not reads and not writes:
            written.add(_EFFECTS)
        writes.update(written)
        reads.update(read)
        _wait_for_results(operation, uses)
        return True

    auto_control_deps.register_acd_resource_resolver(resolve)


# By graph and name: what runs when the results of the earlier calls are there.
_results: weakref.WeakKeyDictionary[Any, dict[str, list[Any]]] = weakref.WeakKeyDictionary()


def _wait_for_results(operation: Any, uses: _Uses) -> None:
    """To TensorFlow the backward pass of a function is done when it has begun: nothing in it must run for its effect.

    All that does run in it makes its results, so who comes after waits for these.
    """
    earlier = _results.setdefault(operation.graph, {})
    for name in uses.numbered | uses.unnumbered:
        operation._add_control_inputs(earlier.get(name, []))
    if operation.type not in _CALLS or any(_definition(name).control_ret for name in _functions(operation.node_def)):
        return
    with tf.control_dependencies(None):
        results = [tf.identity(one) for one in operation.outputs]
        with tf.control_dependencies(results):
            there = tf.no_op()
    for name in uses.unnumbered:
        earlier.setdefault(name, []).append(there)


def _uses(functions: Iterator[str], called: bool) -> _Uses:
    found = [_uses_of(name, called) for name in functions]
    return _Uses(
        frozenset().union(*(one.numbered for one in found)),
        frozenset().union(*(one.unnumbered for one in found)),
    )


@functools.lru_cache(maxsize=4096)
def _uses_of(function: str, called: bool) -> _Uses:
    """called: it is not the body of a loop or a branch, which belong to the function around them."""
    definition = _definition(function)
    numbered: set[str] = set()
    unnumbered: set[str] = set()
    for node in definition.node_def:
        if node.op in _WITH_FUNCTIONS:
            inner = _uses(_functions(node), node.op in _CALLS)
            numbered |= inner.numbered
            unnumbered |= inner.unnumbered
        elif node.op == "XlaCallModule":
            unnumbered |= {_text(name) for name in _XLA_NAME.findall(node.attr["module"].s)}
        elif node.op.startswith("Horovod") and "tensor_name" in node.attr:
            numbered.add(_text(node.attr["tensor_name"].s))
    if called and not any(argument.name.startswith(ARGUMENT) for argument in definition.signature.input_arg):
        return _Uses(unnumbered=frozenset(numbered | unnumbered))
    return _Uses(frozenset(numbered), frozenset(unnumbered))


def _definition(function: str) -> Any:
    try:
        return context.context().get_function_def(function)
    except tf.errors.NotFoundError:  # of a graph that was imported, which TensorFlow does not run as a function
        return FunctionDef()


def _functions(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (one.name for one in value.list.func)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


# -- of what XLA compiles ----------------------------------------------------------------------------------------------
# One order for its collectives: that in which the script's functions were traced. Their handler waits (docs/adr/0049),
# and XLA puts calls that need nothing of each other into an order of its own, for each shape another one: ranks with
# batches of different sizes would wait for each other for ever. So each call takes a number from a variable and gives
# it back for the next one. TensorFlow carries a variable through loops, branches and functions in the order of the
# program, and XLA must keep to it, since it does not know what a call does with the number.
#
# A compiled function holds the lock of what it assigns while it runs. So threads have variables of their own: each may
# run functions that it has traced itself, whatever the others run.

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
