"""Which call of its function an operation belongs to, where a function of a graph (tf.function) is called in another.

A function that was traced keeps the names of its operations in every call, and calls that run at once must not meet
each other's. So an operation is given the number of the call, a scalar that a function passes on to what it calls:

    of a function that is called eagerly    0
    of one that is called in a graph        number of the caller's call * 65537 + k

k is 0 unless the caller has an operation, or another call, that uses one of the same names; then it is 1, 2 and so on
in the order in which the caller was traced. It says nothing of when the functions themselves were traced: it is the
same on all ranks. TensorFlow asks for it at each call, as for what a graph captures at call time
(FuncGraph.capture_call_time_value). What is not numbered has its calls put into an order instead: call_order.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.saved_model import save_context

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
