"""The order of calls in a graph whose operations have the same names, where the calls have no numbers of their own.

A function of a loaded model, one that XLA compiles, or the backward pass of a function gives no number to its
operations (call_numbers.py). Two calls of it that ran at once would meet each other's operations. TensorFlow keeps what
uses the same resource in the order of the program (automatic control dependencies), and asks functions that are
registered with it what an operation uses: here each name is a resource. An operation with a number reads its name, and
so is in no order with others that read it; one without writes it.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps

from horovod.tensorflow.order.call_numbers import ARGUMENT

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
