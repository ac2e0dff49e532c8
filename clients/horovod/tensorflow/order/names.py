"""Under which name an operation meets the same one of the other ranks.

An eager call is done before the next one begins, so calls without a name match by their order. Nodes of a graph run in
any order: each has a name of its own, made from what it reduces or from the user's name, as TensorFlow names nodes.
No other node of its function has that name, nor of the function's loops and branches. Where functions call each other,
the number of the call is added when it runs (below), so the name does not depend on what was traced before.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.saved_model import save_context

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


# -- which call of its function an operation belongs to ----------------------------------------------------------------
# Where a function of a graph (tf.function) is called in another. A function that was traced keeps the names of its
# operations in every call, and calls that run at once must not meet each other's. So an operation is given the number
# of the call, a scalar that a function passes on to what it calls:
#
#     of a function that is called eagerly    0
#     of one that is called in a graph        number of the caller's call * 65537 + k
#
# k is 0 unless the caller has an operation, or another call, that uses one of the same names; then it is 1, 2 and so on
# in the order in which the caller was traced. It says nothing of when the functions themselves were traced: it is the
# same on all ranks. TensorFlow asks for it at each call, as for what a graph captures at call time
# (FuncGraph.capture_call_time_value). What is not numbered has its calls put into an order instead: call_order.py.

ARGUMENT: Final = "horovod_call"  # of the functions that are given a number
_BASE: Final = 65537  # as in csrc/tensorflow/collective.cc


class Names:
    """The names in a function, with the graphs of its loops and branches and with the functions that it calls.

    A function that is traced again begins anew: its operations are those of the first trace, with other shapes.
    """

    def __init__(self) -> None:
        self.used: Counter[str] = Counter()  # how often
        # Asked wherever the function is called, for operations that must end before the call begins.
        self.at_calls: list[Callable[[], list[Any]]] = []

    def called(self, names: Names) -> int:
        """Adds those of a function that is called here; k of the call."""
        number = max((self.used[name] for name in names.used), default=0)
        for name in names.used:
            self.used[name] = number + 1
        return number


_names: weakref.WeakKeyDictionary[Any, Names] = weakref.WeakKeyDictionary()  # by the graph of the function
_number_of_eager_calls: list[tf.Tensor] = []  # made when first asked for


def names_in(graph: Any) -> Names:
    return _names.setdefault(function_of(graph), Names())


def function_of(graph: Any) -> Any:
    """The graph of the function that a loop's or a branch's graph belongs to. To XLA all functions are one program."""
    in_xla = GraphOrParentsInXlaContext(graph)
    while getattr(graph, "is_control_flow_graph", False) or (in_xla and isinstance(graph.outer_graph, FuncGraph)):
        graph = graph.outer_graph
    return graph


def call_number() -> tf.Tensor:
    """Of the call of the function that is being traced."""
    if tf.executing_eagerly():
        return _zero()
    function = function_of(tf.compat.v1.get_default_graph())
    if not _is_numbered(function):
        return tf.constant(0, tf.int64)
    with function.as_default(), function.control_dependencies(None):
        number = function.capture_call_time_value(_zero, tf.TensorSpec([], tf.int64, ARGUMENT), key=ARGUMENT)
    captures = function.function_captures.by_ref_external
    if not isinstance(captures[ARGUMENT], _Caller):  # TensorFlow's would give the callee the number of its caller
        captures[ARGUMENT] = _Caller(names_in(function), captures[ARGUMENT].output_spec)
    return tf.identity(number)  # by whose name call_order.py does not take a backward pass for one that is numbered


class _Caller:
    """What TensorFlow asks for the number of a call, at each call of a function."""

    def __init__(self, names: Names, output_spec: Any) -> None:
        self._names = names  # of the function that is called
        self.output_spec = output_spec

    def __call__(self) -> list[tf.Tensor]:
        if tf.executing_eagerly() or _is_exported(tf.compat.v1.get_default_graph()):
            return [_zero()]
        number = names_in(tf.compat.v1.get_default_graph()).called(self._names)
        checks = [check for at_call in self._names.at_calls for check in at_call()]
        with tf.control_dependencies(checks), tf.device("CPU:0"):
            return [call_number() * _BASE + number]


def _is_numbered(function: Any) -> bool:
    """Not, when a SavedModel is made, the functions that it begins with: a file has no caller to ask."""
    if not isinstance(function, FuncGraph) or not hasattr(function, "function_captures"):
        return False
    if function.experimental_acd_manager is None:  # what TensorFlow makes for a gradient has other inputs
        return False
    return not save_context.in_save_context() or isinstance(function.outer_graph, FuncGraph)


def _is_exported(graph: Any) -> bool:
    return save_context.in_save_context() and not isinstance(graph, FuncGraph)


def _zero() -> tf.Tensor:
    """Always the same tensor, by which a SavedModel knows it."""
    if not _number_of_eager_calls:
        with tf.init_scope(), tf.device("CPU:0"):
            _number_of_eager_calls.append(tf.constant(0, tf.int64))
    return _number_of_eager_calls[0]
