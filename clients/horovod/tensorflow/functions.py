"""What every rank starts from and what everyone has: variables, objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.common.broadcast_order import check_broadcast
from horovod.common.ops import objects
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.library import as_it_is, raised_as_tensorflow_does
from horovod.tensorflow.ops.broadcast import broadcast_

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives the variables the values that they have on `root_rank`. Call it before training, on every rank. Example:

        >>> hvd.broadcast_variables(model.variables, root_rank=0)

    Args:
        variables: tf.Variable, or keras.Variable on TensorFlow.
        root_rank: a rank of the world.
        process_set: the ranks that take part.
        inplace: accepted for scripts of older releases: memory is not copied in either case.

    Returns:
        None; in a v1 graph the operation to run in the session.

    Raises what `hvd.broadcast_` does.
    """
    if tf.executing_eagerly():
        with raised_as_tensorflow_does("HorovodBroadcast"):
            check_broadcast("broadcast_variables", map(_leaf, variables), process_set)
    assigned = broadcast_(list(variables), root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


def _leaf(variable: Any) -> str:
    """The last part of its name: ranks may know a variable by different paths."""
    path = str(getattr(variable, "path", None) or getattr(variable, "name", None) or "")
    return path.rpartition("/")[2].partition(":")[0]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object that `root_rank` has, on every rank: pickled with cloudpickle. Example:

        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None)
        {'epoch': 3}

    Args:
        obj: anything that can be pickled; ignored elsewhere than on the root.
        root_rank: a rank of the world.
        session: accepted for scripts of older releases; no graph is involved.
        name: matches the call across ranks.
        process_set: the ranks that take part.

    Raises:
        ValueError: the root can't pickle its object, a bad root or process set.
        HorovodInternalError: a rank was lost.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that broadcasts the object it is given, as `broadcast_object` does with these arguments.

    >>> send = hvd.broadcast_object_fn(root_rank=0)
    >>> send([1, 2])
    [1, 2]

    Takes and raises what `broadcast_object` does.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in rank order. Example, on ranks 0 and 1:

        >>> hvd.allgather_object("x" * hvd.rank())
        ['', 'x']

    Takes arguments and raises as `broadcast_object`.
    """
    return objects.allgather_object(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """Of v1 graphs: the operation that gives all global variables the values of `root_rank`.

    Raises RuntimeError where TensorFlow executes eagerly, and there is no such collection: use `broadcast_variables`.

    >>> with tf.Graph().as_default():
    ...     weights = tf.compat.v1.get_variable("w", [2])
    ...     begin = hvd.broadcast_global_variables(0)
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            coded(
                TrainingCode.NO_GRAPH,
                "hvd.broadcast_global_variables() does not support eager execution. Please use "
                "hvd.broadcast_variables(<model/optimizer variables>) instead.",
            )
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Of v1 sessions: broadcasts all global variables from `root_rank` when the session has been made. Example:

    >>> hook = hvd.BroadcastGlobalVariablesHook(0)
    >>> session = tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook])
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._broadcast: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph."""
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self._broadcast)


as_it_is(allgather_object, broadcast_global_variables, broadcast_object, broadcast_object_fn, broadcast_variables)
