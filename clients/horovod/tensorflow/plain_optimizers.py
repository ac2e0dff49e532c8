"""Optimizers that are not distributed, in functions and sessions of TensorFlow (common/unreduced.py).

A step that is traced runs no Python, so what runs it is counted: calls of the outermost tf.function in whose trace an
optimizer applied gradients, or of a concrete function of it, and runs of a session of tf.compat.v1 that fetch what
applies them or depends on that.
Nothing is added to a graph, which the script may save.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework.func_graph import FuncGraph

from horovod.common import unreduced
from horovod.common.unreduced import Steps, Trained, least_bytes, steps_of


def stepped(optimizer: Any, steps: Steps) -> None:
    """After `optimizer` has applied gradients, or while that is traced."""
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        return  # it reduces
    if tf.executing_eagerly():
        steps.add()
    elif (function := _outermost_function()) is not None:
        _functions.setdefault(function, {})[id(steps)] = loop = _Loop(optimizer, steps)
        _functions.setdefault(_outermost_graph(), {})[id(steps)] = loop
        unreduced.replace(Function, "__call__", _call)
        unreduced.replace(ConcreteFunction, "__call__", _call_concrete)


# -- functions ---------------------------------------------------------------------------------------------------------
class _Loop:
    """Calls of a function count as many steps as its optimizer has counted meanwhile, as there may be a loop in it."""

    def __init__(self, optimizer: Any, steps: Steps) -> None:
        self._optimizer, self._steps = weakref.ref(optimizer), steps
        self._last: int | None = None

    def called(self) -> None:
        variable = getattr(self._optimizer(), "iterations", None)
        if variable is None:  # an optimizer of tf.compat.v1.train does not count
            self._steps.add()
            return
        now = int(getattr(variable, "_value", variable).numpy())  # _value: of a keras.Variable
        self._steps.add(1 if self._last is None else max(now - self._last, 0))
        self._last = now


# By a tf.function, or by the graph of a concrete function.
_functions: Final[weakref.WeakKeyDictionary[Any, dict[int, _Loop]]] = weakref.WeakKeyDictionary()


def _outermost_function() -> Any:
    """The one that the script has called; None: it is traced by something else."""
    found = None
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == Function.__module__:
            owner = frame.f_locals.get("self")
            found = owner if isinstance(owner, Function) else found
        frame = frame.f_back
    return found


def _outermost_graph() -> Any:
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph.outer_graph, FuncGraph):
        graph = graph.outer_graph
    return graph


def _call(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(function, *args, **kwargs)
    _ran(function)
    return result


def _call_concrete(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A tf.function calls its concrete ones in another way."""
    result = original(function, *args, **kwargs)
    _ran(function.graph)
    return result


def _ran(function: Any) -> None:
    loops = _functions.get(function)
    if loops is not None and unreduced.are_counted() and tf.executing_eagerly():
        for loop in list(loops.values()):
            loop.called()


# -- optimizers of tf.compat.v1.train ----------------------------------------------------------------------------------
_REMEDY: Final = "Write optimizer = hvd.DistributedOptimizer(optimizer) before optimizer.minimize(...)."


def _apply_gradients(original: Any, optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = list(grads_and_vars)
    result = original(optimizer, pairs, *args, **kwargs)

    def trained() -> Trained:
        shapes = [[] if pair[1].shape.rank is None else pair[1].shape.as_list() for pair in pairs]
        return Trained(type(optimizer).__name__, least_bytes([pair[0] for pair in pairs], shapes), _REMEDY)

    steps = steps_of(optimizer, trained)
    if tf.compat.v1.executing_eagerly_outside_functions():
        stepped(optimizer, steps)
    elif result is not None:
        operation = getattr(result, "op", result)
        _trained.setdefault(operation.graph, []).append(_Training(operation.name, steps))
        unreduced.replace(BaseSession, "_do_run", _do_run)
        unreduced.replace(BaseSession, "make_callable", _make_callable)
    return result


class _Training:
    """What applies gradients in a graph."""

    def __init__(self, operation: str, steps: Steps) -> None:
        self._operation, self._steps = operation, steps
        self._version = -1
        self._dependent: set[str] = set()

    def ran(self, graph: Any, names: set[str]) -> None:
        """The names of operations, which a session ran with all that they need."""
        if graph.version != self._version:
            self._version = graph.version
            self._dependent = _dependents(graph.get_operation_by_name(self._operation))
        if not self._dependent.isdisjoint(names):
            self._steps.add()


def _dependents(operation: Any) -> set[str]:
    """The names of the operation and of those that can't run without it."""
    found, waiting = {operation.name}, [operation]
    while waiting:
        one = waiting.pop()
        for user in [user for output in one.outputs for user in output.consumers()] + list(one._control_outputs):
            if user.name not in found:
                found.add(user.name)
                waiting.append(user)
    return found


_trained: Final[weakref.WeakKeyDictionary[Any, list[_Training]]] = weakref.WeakKeyDictionary()  # by graph


def _do_run(original: Any, session: Any, handle: Any, targets: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
    """The part of BaseSession.run that knows the operations and tensors; positional, as `run` calls it."""
    result = original(session, handle, targets, fetches, *args, **kwargs)
    _session_ran(session, {one.name for one in targets} | {one.op.name for one in fetches})
    return result


def _make_callable(original: Any, session: Any, fetches: Any, feed_list: Any = None, *args: Any, **kwargs: Any) -> Any:
    run = original(session, fetches, feed_list, *args, **kwargs)
    if feed_list is not None:
        return run  # it calls session.run
    names: set[str] = set()
    for fetch in tf.nest.flatten(fetches):
        with contextlib.suppress(TypeError, ValueError, KeyError):  # a composite of tensors, which trains nothing
            element = session.graph.as_graph_element(fetch)
            names.add(getattr(element, "op", element).name)

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if not unreduced.watch.is_over:
            _session_ran(session, names)
        return result

    return call


def _session_ran(session: Any, names: set[str]) -> None:
    trained = _trained.get(session.graph)
    if trained is not None and not session.sess_str:  # a session on servers of TensorFlow's own shares variables
        for training in trained:
            training.ran(session.graph, names)


def _watch() -> None:
    unreduced.replace(tf.compat.v1.train.Optimizer, "apply_gradients", _apply_gradients)


unreduced.when_in_a_world(_watch)
