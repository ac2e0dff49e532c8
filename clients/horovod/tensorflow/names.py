"""Under which name an operation meets the same one of the other ranks.

An eager call is done before the next one begins, so calls without a name match by their order. Nodes of a graph run in
any order: each has a name of its own, made from what it reduces or from the user's name, as TensorFlow names nodes.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from typing import Any, Final, NamedTuple

import tensorflow as tf

_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_.\\/>-]")
_NOT_IN_DEFAULT_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")

# How often a name was given in each function that users call, with the graphs of its loops and branches. A function
# that is traced again begins anew: its operations are those of the first trace, with other shapes.
_given: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


class Named(NamedTuple):
    """How a call is known."""

    wire: str  # to other ranks
    node: str | None  # in the graph; None: there is none
    wait: bool  # whether the calling thread waits for the result: an eager call

    def as_kind(self, kind: str) -> Named:
        """The same of another kind of operation."""
        return Named(f"{kind}.{self.wire.partition('.')[2]}", self.node, self.wait)

    def of_gradient(self) -> Named:
        """Of the operation in the backward pass."""
        if tf.executing_eagerly():
            return Named(self.wire if self.wire.endswith(".noname") else self.wire + ".grad", None, True)
        kind, _, name = self.wire.partition(".")
        return Named(f"{kind}.{_unique(name + '.grad')}", None, False)


def named(kind: str, operation: str, name: str | None, tensor: Any, ignore_name_scope: bool = False) -> Named:
    """kind: "allreduce" and so on, with which the name begins on the wire. operation: of TensorFlow, for its node."""
    if tf.executing_eagerly():
        return Named(f"{kind}.{'noname' if name is None else name}", None, True)
    if name is None:
        name = f"{operation}_{_NOT_IN_DEFAULT_NAMES.sub('_', tensor.name)}"
    node = _NOT_IN_NAMES.sub("_", name)
    scope = "" if ignore_name_scope else tf.compat.v1.get_default_graph().get_name_scope()
    return Named(f"{kind}.{_unique(f'{scope}/{node}' if scope else node)}", node, False)


def of_gradient(operation: Any) -> Named:
    """Of the operation in the backward pass of a node."""
    wire = operation.get_attr("tensor_name")
    return Named(wire.decode() if isinstance(wire, bytes) else wire, None, False).of_gradient()


def another(base: Named, kind: str, part: str) -> Named:
    """Of an operation that belongs to the one called `base`."""
    _, _, name = base.wire.partition(".")
    if base.wait:
        return Named(f"{kind}.{name if name == 'noname' else f'{name}.{part}'}", None, True)
    return Named(f"{kind}.{_unique(f'{name}.{part}')}", None if base.node is None else f"{base.node}_{part}", False)


def _unique(name: str) -> str:
    """The same in no other graph of this function: a loop's body may run beside what is around it."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):  # the outermost graph is that of no function
        graph = graph.outer_graph
    given = _given.setdefault(graph, Counter())
    count = given[name]
    given[name] += 1
    return name if count == 0 else _unique(f"{name}_{count}")
