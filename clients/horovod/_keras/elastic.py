"""State of a Keras training that survives failures, and the callbacks that keep it up to date."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from horovod._keras.backends import backend_of
from horovod._keras.callbacks import CallbackMixin, begins, written
from horovod._keras.optimizer import distribution_in
from horovod._keras.state import build_optimizer, classes_of, kind_of, state_of, variables_of
from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import rank
from horovod.common.elastic import ObjectState, check_results
from horovod.common.gradients import identity
from horovod.common.ops.objects import allgather_object, broadcast_object
from horovod.common.optimizer_numbers import Made
from horovod.common.process_sets import global_process_set
from horovod.common.state_parts import Parts

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]

log = logging.getLogger(__name__)


class VariablesState(ObjectState):
    """Variables beside plain values. A subclass says which (`_own_variables`) and how they are sent.

    Models, optimizers, variables and so on among the plain values, also in lists, dicts and objects, stay the objects
    that they are, and their variables are kept with the others.

    `sync` makes all ranks equal to rank 0, or, in a training that some of them were in already, to the one of these
    that has committed most often. Afterwards everything counts as saved.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._parts_now: dict[str, Any] = {}  # path -> part; during a sync, the parts of the source
        self._saved_variables: list[tuple[Any, Any]] = []  # (variable, its saved value)
        super().__init__(broadcast_object, rank, **kwargs)
        self.save()

    def _own_variables(self) -> list[Any]:
        raise NotImplementedError

    def _variables(self) -> list[Any]:
        own = self._own_variables()
        known = {identity(one) for one in own}
        for path, part in sorted(self._parts_now.items()):
            kind = kind_of(part)
            for one in variables_of(part, kind, path) if kind is not None and path not in self._fixed_parts() else ():
                if identity(one) not in known:
                    known.add(identity(one))
                    own.append(one)
        return own

    def _kind_of(self, value: Any) -> str | None:
        return kind_of(value)

    def _take_parts(self, parts: Parts) -> None:
        super()._take_parts(parts)
        self._parts_now = parts.found

    def _optimizers_left_out(self) -> Iterator[Any]:
        ours = {identity(one) for one in self._variables()}
        classes = classes_of("optimizer")
        for one in gc.get_objects():
            # Optimizers of Keras 3 keep a list of the variables that they train; those of tf_keras keep none.
            if issubclass(type(one), classes) and any(
                identity(each) in ours for each in getattr(one, "_trainable_variables", ())
            ):
                yield one

    def _memory_of(self, optimizer: Any) -> list[str]:
        ours = {identity(one) for one in self._variables()}
        return [one.name for one in variables_of(optimizer, "optimizer", "") if identity(one) not in ours]

    def _values(self, variables: list[Any]) -> list[Any]:
        return [np.array(variable.numpy()) for variable in variables]

    def _assign(self, values: list[tuple[Any, Any]]) -> None:
        for variable, value in values:
            variable.assign(value)

    def _broadcast_variables(self, root_rank: int) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        self._settled_values()

    def _settled_values(self) -> list[tuple[Any, Any]]:
        """The variables and copies of their values. To copy them waits for the steps that a GPU still does."""
        variables = self._variables()
        values = self._values(variables)
        check_results()
        return list(zip(variables, values, strict=True))

    def save(self) -> None:
        self._parts_now = self._find_parts().found
        self._saved_variables = self._settled_values()
        super().save()

    def restore(self) -> None:
        self._assign(self._saved_variables)
        super().restore()

    def sync(self) -> None:
        self._choose_source(allgather_object)
        self._parts_now = self._agreed
        self._broadcast_variables(self._source)
        values = self._settled_values()  # first: plain values that count as saved are to be of the same commit
        super().sync()
        self._saved_variables = values


class KerasState(VariablesState):
    """The state of a Keras training: the model, its optimizer and plain values given by name.

    >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    >>> state.commit()

    Args:
        model: a built model, else ValueError.
        optimizer: that of the model, if None is given.
        kwargs: plain values, the same names on all ranks. Further models, optimizers, variables and so on among them,
            also in lists, dicts and objects, are kept as the model is; they must be built, else ValueError.

    `sync` makes all ranks equal to rank 0, or, in a training that some of them were in already, to the one of these
    that has committed most often. Afterwards everything counts as saved.
    """

    _hvd_keras: Any  # the Keras module of the model: see `classes_for`

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                coded(
                    TrainingCode.NOT_BUILT,
                    "The model must be built first, so that it has weights to keep: call model.build(input_shape), or "
                    "it with a batch.",
                )
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        super().__init__(**kwargs)

    def _fixed_parts(self) -> dict[str, Any]:
        return {"model": self.model} | ({} if self.optimizer is None else {"optimizer": self.optimizer})

    def _optimizers(self) -> list[Made]:
        distribution = distribution_in(self.optimizer)
        return [] if distribution is None else [distribution.made]

    def _own_variables(self) -> list[Any]:
        if self.optimizer is not None:  # so that all ranks have the same variables from the first sync on
            build_optimizer(self.optimizer, self.model)
        return state_of(self.model, self.optimizer)

    def _broadcast_variables(self, root_rank: int) -> None:
        backend_of(self._hvd_keras).broadcast_variables(self._variables(), root_rank, global_process_set)


class _OfBatches(CallbackMixin):
    """Knows how many batches have ended: with steps_per_execution, Keras calls back once for several of them."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._last = -1  # the number of the last batch that has ended

    @property
    def _steps(self) -> int | None:
        """Batches of an epoch; None where Keras does not know."""
        return (self.params or {}).get("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last = -1

    def _ended(self, batch: int) -> int:
        """How many batches have ended since the last call."""
        if self._steps:  # Keras 3 counts a last call that has fewer batches as a whole one
            batch = min(batch, self._steps - 1)
        before, self._last = self._last, batch
        return max(batch - before, 1)


class CommitStateCallback(_OfBatches):
    """Commits the state every `batches_per_commit` batches, and at the end of an epoch.

    >>> model.fit(data, callbacks=[hvd.elastic.CommitStateCallback(state)])

    If `UpdateBatchStateCallback` counts the batches, the last batch of an epoch is committed only at the end of the
    epoch: from a state without a batch left, `fit` would train one more.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self._batches_left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches_left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches_left -= self._ended(batch)
        if self._batches_left <= 0:
            self._batches_left = self.batches_per_commit
            if not self._has_none_left():
                self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()

    def _has_none_left(self) -> bool:
        done = getattr(self.state, "batch", None)
        return isinstance(done, int) and bool(self._steps) and done >= (self._steps or 0)


class UpdateBatchStateCallback(_OfBatches):
    """Counts batches in `state.batch`, and ends the first epoch after an interruption when its other batches are done.

    >>> model.fit(data, callbacks=[hvd.elastic.UpdateBatchStateCallback(state)])

    If Keras does not know how many batches an epoch has, that epoch starts from its beginning, with a warning.

    Place it before callbacks that end training at the end of an epoch, and before `CommitStateCallback`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._ends_epoch = False

    def on_train_begin(self, logs: Any = None) -> None:
        begins(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._ends_epoch = False
        if self.state.batch and not self._steps:
            log.warning(
                "The epoch that was interrupted after batch %d starts again from its first batch, because "
                "Keras does not know how many batches it has. Give fit() steps_per_epoch, or a data set of "
                "known size.",
                self.state.batch,
            )
            self.state.batch = 0
        written(self.model, self.state).batches = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch += self._ended(batch)
        if self._steps and self.state.batch >= self._steps > batch + 1:
            self.model.stop_training = self._ends_epoch = True  # the only way to end an epoch; `fit` ends with it ...

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0
        if self._ends_epoch:
            self.model.stop_training = self._ends_epoch = False  # ... unless it is taken back here


class UpdateEpochStateCallback(CallbackMixin):
    """Counts epochs in `state.epoch`, also when `fit` counts from 0 again after an interruption.

    >>> model.fit(data, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])

    Place it before `CommitStateCallback`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before: int | None = None  # epochs that `fit` does not count

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = None
        begins(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._before is None:
            self._before = self.state.epoch - epoch
        written(self.model, self.state).epochs = self._before

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = (self._before or 0) + epoch + 1
