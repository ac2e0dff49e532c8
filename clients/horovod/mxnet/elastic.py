"""Elastic training: processes may be lost, or replaced, while the others keep their weights and go on.

>>> state = hvd.elastic.MXNetState(model.collect_params(), trainer, batch=0)
>>> @hvd.elastic.run
... def train(state):
...     while state.batch < 100:
...         train_one_batch(model, trainer)
...         state.batch += 1
...         state.commit()
>>> train(state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import Parameter

from horovod.common.basics import init as init
from horovod.common.basics import join_again, rank
from horovod.common.basics import shutdown as shutdown
from horovod.common.elastic import ObjectState, leave_at_next_commit, run_fn
from horovod.common.optimizer_numbers import Made, of_root
from horovod.mxnet.errors import drop_errors, lost_ranks
from horovod.mxnet.functions import allgather_object, broadcast_object

__all__ = ["MXNetState", "leave_at_next_commit", "run"]


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
    next world stands, the state is made equal again and `func` called again.

    Raises:
        ValueError: before hvd.init(), or the next world did not stand in time ("Horovod initialization failed. ...").
        Exception: any other exception of `func` than HorovodInternalError, HostsUpdatedInterrupt and the MXNetError
            of a gradient whose collective in the backward pass failed.
    """
    return run_fn(func, join_again, lost_ranks)


class MXNetState(ObjectState):
    """The state of a training: parameters, what the trainer knows of them, and plain values given by name.

    Args:
        params: `model.collect_params()`, or a dict of parameters or arrays; of the same names on all ranks. Parameters
            that have no values yet get those of the others.
        trainer: a gluon Trainer, whose optimizer's state and counts are part of the training.
        kwargs: plain values, the same names on all ranks.

    Everything travels with pickle. `sync` sends from rank 0, or, in a training that some ranks were in already, from
    the one of these that has committed most often. Example:

        >>> state = hvd.elastic.MXNetState(model.collect_params(), trainer, epoch=0)
        >>> state.commit()
    """

    def __init__(self, params: Any = None, trainer: Any = None, **kwargs: Any) -> None:
        self._parameters = dict(params.items()) if params is not None else {}
        self._trainer = trainer
        super().__init__(broadcast_object, rank, **kwargs)
        self._saved_values = self._values()

    def save(self) -> None:
        self._saved_values = self._values()
        super().save()

    def restore(self) -> None:
        drop_errors()  # an array whose operation has failed takes no new values before that
        self._assign(self._saved_values)
        super().restore()

    def sync(self) -> None:
        self._choose_source(allgather_object, self._parameters)
        is_source = rank() == self._source
        values: Any = broadcast_object(self._values() if is_source else None, self._source, "elastic.values")
        if not is_source:
            with of_root():
                self._assign(values)
        super().sync()
        self._saved_values = values

    def _optimizers(self) -> list[Made]:
        optimizers = (self._trainer, getattr(self._trainer, "_optimizer", None))
        return [made for one in optimizers if (made := vars(one).get("_made") if one is not None else None)]

    def _settle(self) -> None:
        with lost_ranks():
            mx.nd.waitall()

    def _values(self) -> tuple[dict[str, Any], bytes | None]:
        arrays = {name: _array(one) for name, one in self._parameters.items()}
        held = {name: array.asnumpy() for name, array in arrays.items() if array is not None}
        return held, self._trainer and self._trainer._updaters[0].get_states(dump_optimizer=True)

    def _assign(self, values: tuple[dict[str, Any], bytes | None]) -> None:
        held, trained = values
        with mx.autograd.pause():
            for name, array in held.items():
                one = self._parameters[name]
                if isinstance(one, Parameter):
                    one.set_data(mx.nd.array(array, dtype=array.dtype))
                else:
                    one[:] = array
        if trained is not None:
            trainer = self._trainer
            (updater,) = trainer._updaters
            updater.set_states(trained)
            # trainer.load_states() does the same with a file.
            trainer._optimizer = updater.optimizer
            trainer._optimizer.param_dict = dict(enumerate(trainer._params))


def _array(one: Any) -> Any:
    """The values of a parameter, or an array itself; None for a parameter that has none yet."""
    if not isinstance(one, Parameter):
        return one
    return one.data() if one._data is not None else None
