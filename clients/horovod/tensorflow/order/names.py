"""Under which name an operation meets the same one of the other ranks.

An eager call is done before the next one begins, so calls without a name match by their order. Nodes of a graph run in
any order: each has a name of its own, made from what it reduces or from the user's name, as TensorFlow names nodes.
No other node of its function has that name, nor of the function's loops and branches. Where functions call each other,
the number of the call is added when it runs (call_numbers.py), so the name does not depend on what was traced before.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import tensorflow as tf

from horovod.tensorflow.order.call_numbers import call_number, names_in

_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_.\\/>-]")
_NOT_IN_DEFAULT_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")


class Named(NamedTuple):
    """How a call is known."""

    wire: str  # to other ranks
    node: str | None  # in the graph; None: there is none
    wait: bool  # whether the calling thread waits for the result: an eager call
    forward: Any = None  # the node whose gradient it is, if it is one's

    def as_kind(self, kind: str) -> Named:
        """The same of another kind of operation."""
        return self._replace(wire=f"{kind}.{self.wire.partition('.')[2]}")

    def of_gradient(self) -> Named:
        """Of the operation in the backward pass."""
        if tf.executing_eagerly():
            return Named(self.wire if self.wire.endswith(".noname") else self.wire + ".grad", None, True)
        kind, _, name = self.wire.partition(".")
        return Named(f"{kind}.{_unique(name + '.grad', self.forward)}", None, False, self.forward)

    def call_number(self) -> tf.Tensor:
        """Of the function that the operation is in; in the backward pass that of the forward pass."""
        return call_number() if self.forward is None else self.forward.inputs[-1]


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
    node = operation if hasattr(operation, "graph") else None  # that of an eager call is no node
    return Named(_wire(operation), None, False, node).of_gradient()


def vectorized(operation: Any) -> Named:
    """Of the operation that takes the place of those of all iterations."""
    kind, _, name = _wire(operation).partition(".")
    return Named(f"{kind}.{_unique(name + '.vectorized')}", None, False)


def another(base: Named, kind: str, part: str) -> Named:
    """Of an operation that belongs to the one called `base`."""
    _, _, name = base.wire.partition(".")
    if base.wait:
        return Named(f"{kind}.{name if name == 'noname' else f'{name}.{part}'}", None, True)
    wire = f"{kind}.{_unique(f'{name}.{part}', base.forward)}"
    return Named(wire, None if base.node is None else f"{base.node}_{part}", False, base.forward)


def _wire(operation: Any) -> str:
    wire = operation.get_attr("tensor_name")
    return wire.decode() if isinstance(wire, bytes) else str(wire)


def _unique(name: str, forward: Any = None) -> str:
    """The same nowhere else in this function: a loop's body may run beside what is around it.

    Nor in the one that a gradient is of, in which there may be gradients, too, and whose number a gradient has.
    """
    used = names_in(tf.compat.v1.get_default_graph()).used
    there = used if forward is None else names_in(forward.graph).used
    count = max(used[name], there[name])
    used[name] = count + 1
    return name if count == 0 else _unique(f"{name}_{count}", forward)
