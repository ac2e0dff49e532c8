"""Elastic training: processes may be lost, or replaced, while the others keep their weights and go on.

>>> state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
>>> @hvd.elastic.run
... def train(state):
...     while state.batch < 100:
...         train_one_batch(state.model, state.optimizer)
...         state.batch += 1
...         state.commit()
>>> train(state)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from horovod._keras.elastic import KerasState, VariablesState
from horovod.base.errors import TrainingCode, code_of, coded
from horovod.common.basics import init as init
from horovod.common.basics import join_again
from horovod.common.basics import shutdown as shutdown
from horovod.common.elastic import leave_at_next_commit, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "leave_at_next_commit", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function `func(state, ...)`, so that it goes on after failures.

    >>> @hvd.elastic.run
    ... def train(state):
    ...     while state.batch < 1000:
    ...         state.batch += 1
    ...         state.commit()
    >>> train(state)

    Before `func` starts, the state is made equal on all ranks. When a collective in it fails because a rank was lost,
    the state goes back to its last commit; when hosts come or go (HostsUpdatedInterrupt from `state.commit()`), nothing
    is undone. Then this process shuts Horovod down and calls hvd.init() again with the same arguments; once the
    next world stands, the state is made equal again and `func` called again. In an elastic job (HOROVOD_MIN_SIZE) the
    next world has the remaining and the new processes; in any other job it has as many processes as before. A process
    of an elastic job that gets SIGTERM leaves at the next commit, as for horovod.torch.elastic.run.

    Traced functions remain valid: they read the numbers of the world when they run. Between hvd.init() and `func` a
    script must run no collective. Process sets that were added after hvd.init() are gone in the next world; add them
    again, and trace functions that use them again, in a callback of `state.register_reset_callbacks`.

    Raises:
        ValueError: before hvd.init(), or the next world did not stand in time ("Horovod initialization failed. ...").
        Exception: any other exception of `func` than HorovodInternalError, HostsUpdatedInterrupt and the errors in
            which TensorFlow reports a lost rank.
    """
    return run_fn(func, join_again, lost_ranks)


@contextmanager
def lost_ranks() -> Iterator[None]:
    """TensorFlow has no error of ours: it reports a lost rank as UnknownError, and in its text our sentence.

    Nodes have names of ours or of the script's variables, so the code at the end of the sentence tells as well. Other
    errors, among them other UnknownErrors, pass.
    """
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Horovod" not in str(error) and not any(map(code_of, str(error).splitlines())):
            raise
        raise HorovodInternalError(str(error)) from error


class TensorFlowState(VariablesState):
    """The state of a training: variables and plain values given by name.

    Args:
        variables: tf.Variables, the same on all ranks except for their values. None in a v1 graph: all global
            variables.
        session: of a v1 graph, or the default one.
        kwargs: plain values, the same names on all ranks. tf.Variables, tf.Modules, models and so on among them, also
            in lists, dicts and objects, are kept as the variables are, but not in a v1 graph.

    `sync` broadcasts from rank 0, or, in a training that some ranks were in already, from the one of these that has
    committed most often. Example:

        >>> state = hvd.elastic.TensorFlowState([weight], batch=0)
        >>> state.commit()
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None:
            variables = [] if tf.executing_eagerly() else tf.compat.v1.global_variables()
        self.variables = list(variables)
        self._session = session
        self._operations: dict[Any, Any] = {}  # assign operations of a v1 graph, made once
        super().__init__(**kwargs)

    def _own_variables(self) -> list[Any]:
        return list(self.variables)

    def _kind_of(self, value: Any) -> str | None:
        # In a v1 graph nothing that a script gives as a plain value has variables of its own.
        return super()._kind_of(value) if tf.executing_eagerly() else None

    def _values(self, variables: list[Any]) -> list[Any]:
        if tf.executing_eagerly():
            return super()._values(variables)
        values: list[Any] = self._run_in_session(variables)
        return values

    def _assign(self, values: list[tuple[Any, Any]]) -> None:
        if tf.executing_eagerly():
            super()._assign(values)
            return
        for variable, value in values:
            variable.load(value, self._session or tf.compat.v1.get_default_session())

    def _broadcast_variables(self, root_rank: int) -> None:
        with lost_ranks():
            if tf.executing_eagerly():
                broadcast_variables(self._variables(), root_rank)
                return
            if root_rank not in self._operations:
                self._operations[root_rank] = broadcast_variables(self.variables, root_rank)
            self._run_in_session(self._operations[root_rank])

    def _run_in_session(self, what: Any) -> Any:
        session = self._session or tf.compat.v1.get_default_session()
        if session is None:
            raise ValueError(
                coded(
                    TrainingCode.NO_GRAPH, "TensorFlowState of a v1 graph needs a session: pass session=, or enter one."
                )
            )
        return session.run(what)


class TensorFlowKerasState(KerasState):
    """The state of a training of a Keras model, with its weights and those of its optimizer.

    Args:
        model: a built Keras model (Keras 3 or tf_keras), else ValueError.
        optimizer: that of the model, if None is given.
        backend: accepted for scripts of older releases.
        kwargs: plain values, the same names on all ranks.

    `sync` works as that of `TensorFlowState`. Example:

        >>> state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
        >>> state.commit()
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)

    def _broadcast_variables(self, root_rank: int) -> None:
        with lost_ranks():
            broadcast_variables(self._variables(), root_rank)
