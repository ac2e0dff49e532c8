"""What `fit` calls, for any Keras: mixins of which horovod.keras.callbacks and the like make classes.

The public module first imports all names of the shared one, which is what readers and type checkers see, and then puts
classes for its own Keras in their places (`classes_for`); so do the modules of elastic states.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from horovod._keras.backends import backend_of
from horovod._keras.held import note_differences
from horovod._keras.state import build_optimizer, state_of
from horovod.base.errors import TrainingCode, coded
from horovod.base.words import ranks_in_words
from horovod.common.basics import rank, size
from horovod.common.counted_weights import postpone
from horovod.common.gradients import identity
from horovod.common.ops.objects import allgather_object
from horovod.common.process_sets import global_process_set
from horovod.worker.runtime.context import current

if TYPE_CHECKING:
    from keras.callbacks import Callback
else:
    Callback = object


__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class CallbackMixin(Callback):
    """Comes before Keras's Callback, of whichever Keras, in the bases of a public class."""

    _hvd_keras: Any


def classes_for(keras: Any, module: str, shared: ModuleType) -> dict[str, type]:
    """By name, for the globals of `module`. `_hvd_keras` of each is the Keras that it is for."""
    made = {}
    for name in shared.__all__:
        of_both = getattr(shared, name)
        bases = (of_both, keras.callbacks.Callback) if issubclass(of_both, CallbackMixin) else (of_both,)
        made[name] = type(name, bases, {"__module__": module, "__doc__": of_both.__doc__, "_hvd_keras": keras})
    return made


# -- how far an elastic training is where `fit` begins to count again --------------------------------------------------
# After an interruption `fit` is called once more: it counts the batches of the epoch from 0, though some of them are
# done, and a script may let it count the epochs from 0 as well. UpdateBatchStateCallback and UpdateEpochStateCallback
# know better, and write here what the other callbacks of the same `fit` read, in whatever order the script lists them:
#
#     on_train_begin           every callback of ours forgets what an earlier fit of the model left
#     on_epoch_begin           the Update callbacks write
#     on_train_batch_begin     the others read


@dataclass
class Progress:
    """What `fit` does not count. All zero in a `fit` without the Update callbacks."""

    state: Any = None  # the elastic state, if there is one
    batches: int = 0  # batches of the running epoch that were trained before this fit
    epochs: int = 0  # epochs before this fit, without those that initial_epoch has told it of


_OF_MODELS: Final[weakref.WeakKeyDictionary[Any, Progress]] = weakref.WeakKeyDictionary()


def begins(model: Any) -> None:
    """A `fit` of the model begins."""
    _OF_MODELS.pop(model, None)


def written(model: Any, state: Any) -> Progress:
    """The progress of the running fit, for a callback that writes it. state: the elastic state that it is of."""
    progress = _OF_MODELS.setdefault(model, Progress())
    progress.state = state
    return progress


def progress_of(model: Any) -> Progress:
    """The progress of the running fit, to be read."""
    return _OF_MODELS.get(model) or Progress()


# -- the callbacks -----------------------------------------------------------------------------------------------------


class _OfAKeras(CallbackMixin):
    @property
    def backend(self) -> Any:
        """`keras.backend` of the Keras at hand, for subclasses."""
        return self._hvd_keras.backend

    @property
    def _hvd_backend(self) -> Any:
        return backend_of(self._hvd_keras)


class BroadcastGlobalVariablesCallback(_OfAKeras):
    """Gives all ranks the weights and the optimizer's state of `root_rank`, before the first batch.

    >>> model.fit(images, labels, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    If a rank does not have all variables yet (a model that learns its shapes from the first batch), the broadcast comes
    after that batch. In elastic training every world has a broadcast, because new processes would wait for it.

    Args:
        root_rank: the rank whose values all get.
        device: accepted for scripts of older releases.
        local_variables: variables that each rank keeps; ValueError if one is not a variable.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.local_variables: dict[int, Any] = {}
        self.broadcast_done = False
        self._begun = False
        self._world: int | None = None  # the epoch of the world in which these two count
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """This variable stays what it is on each rank."""
        if not hasattr(var, "assign"):
            raise ValueError(
                coded(
                    TrainingCode.INVALID_ARGUMENT,
                    f"local_variables must be variables, but one element is a {type(var).__name__}.",
                )
            )
        self.local_variables[identity(var)] = var

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._world != (world := current().world.epoch):
            self._world, self.broadcast_done, self._begun = world, False, False
        if self.broadcast_done or self._begun:
            return
        self._begun = True
        # Whether the variables are there is each rank's own business: one may have loaded a file. A decision for all.
        built = self._hvd_backend.allgather(np.array([_has_all(self.model)], np.int32), "callbacks.built")
        note_differences(self.model.optimizer, self.local_variables)
        if np.asarray(built).all():
            self._broadcast()
        else:
            postpone(True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        known = state_of(self.model, self.model.optimizer)
        variables = [one for one in known if identity(one) not in self.local_variables]
        self._hvd_backend.broadcast_variables(variables, self.root_rank, global_process_set)
        self.broadcast_done = True
        postpone(False)


class MetricAverageCallback(_OfAKeras):
    """Replaces the metrics of an epoch by their averages over the ranks. Callbacks that read them come after it.

    >>> model.fit(images, labels, callbacks=[hvd.callbacks.MetricAverageCallback()])

    All ranks must have the same metrics; else it is a ValueError on all of them, since a callback that decides by a
    metric would decide on some ranks only. device: accepted for scripts of older releases.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if size() == 1:
            return
        own = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        of_ranks = allgather_object(own, "callbacks.metrics")
        for name in sorted(set().union(*of_ranks)):
            values = [metrics[name] for metrics in of_ranks if name in metrics]
            if len(values) < len(of_ranks):
                raise ValueError(_not_of_all(name, of_ranks))
            if logs is not None:
                logs[name] = sum(values) / len(values)


def _not_of_all(name: str, of_ranks: Sequence[dict[str, float]]) -> str:
    have = [rank for rank, metrics in enumerate(of_ranks) if name in metrics]
    lack = [rank for rank, metrics in enumerate(of_ranks) if name not in metrics]
    return coded(
        TrainingCode.DIFFERENT_METRICS,
        f"MetricAverageCallback can't average {name!r}: {ranks_in_words(have)} had that metric at the end of "
        f"the epoch, and {ranks_in_words(lack)} had not. Give all ranks the same metrics. If one rank has "
        "validation data, give validation data to all of them.",
    )


class LearningRateScheduleCallback(_OfAKeras):
    """Sets the learning rate to initial_lr * multiplier(epoch).

    >>> schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.1 ** (epoch // 30))
    >>> model.fit(images, labels, epochs=90, callbacks=[schedule])

    Args:
        initial_lr: the learning rate at epoch 0, of all ranks together; ValueError for None.
        multiplier: a function of the epoch, or a number, which is then multiplied by once in each epoch: in epoch e the
            factor is multiplier ** (e - start_epoch). So multiplier=0.1, start_epoch=30 gives 1 in epoch 30, 0.1 in
            31, 0.01 in 32 and so on. For a step to a tenth that stays, pass a function: multiplier=lambda epoch: 0.1.
        start_epoch, end_epoch: the epochs, from the first up to before the last, in which this changes anything.
        staircase: change it at the begin of an epoch; else before each batch, where the epoch is a fraction.
        momentum_correction: optimizers with momentum scale what it has gathered by the change, as if all of it had been
            gathered with the new rate (Goyal et al. 2017, section 2.1).
        steps_per_epoch: batches in an epoch, where Keras does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError(
                coded(
                    TrainingCode.INVALID_ARGUMENT, "Parameter `initial_lr` is required: the learning rate at epoch 0."
                )
            )
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase if callable(multiplier) else True  # a number is one for each epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._asks_for_steps = not steps_per_epoch
        self.current_epoch = 0
        self._before: Progress | None = None  # of the epoch, once its first batch begins
        factor = multiplier
        self.multiplier: Callable[[float], float] = (
            factor if callable(factor) else lambda epoch: factor ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        begins(self.model)
        self.current_epoch = 0
        # Anew for each fit: in an elastic world of another size, ranks that were in the last one would keep its steps,
        # and have other rates than those that are new.
        if not self.staircase and self._asks_for_steps:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    coded(
                        TrainingCode.INVALID_ARGUMENT,
                        "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                        f"parameter to the {type(self).__name__}() or upgrade to a data set of known size.",
                    )
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch
        self._before = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._before is None:  # once in an epoch: on JAX, to ask for self.model makes Keras's trainer slower
            self._before = progress_of(self.model)
            self.current_epoch += self._before.epochs
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase:
            if batch == 0:
                self._adjust_learning_rate(self.current_epoch)
        else:
            steps = self.steps_per_epoch or 1
            if done := self._before.batches:  # may be more than an epoch of this world has, and `fit` adds one
                batch = min(done + batch, steps - 1)
            self._adjust_learning_rate(self.current_epoch + batch / steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _rate_of(self.model.optimizer)

    def _adjust_learning_rate(self, epoch: float) -> None:
        """Subclasses call or replace it."""
        optimizer = self.model.optimizer
        old, new = _rate_of(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0 and new != old:
            for gathered in _momentums_of(optimizer):
                gathered.assign(gathered * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr in the first epochs, a little before each batch.

    >>> model.fit(images, labels, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size())])

    That of one process grows to `size` times its value with the batch; from the first step on it would diverge
    (Goyal et al. 2017, section 2.2).

    Args:
        initial_lr: the learning rate of all ranks together, which it reaches.
        warmup_epochs: after how many epochs.
        momentum_correction, steps_per_epoch: as for `LearningRateScheduleCallback`.
        verbose: 1 says when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # By the end of an epoch, when its last batch has been, the rate is that of the end.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.current_epoch + 1 == self.end_epoch and self.verbose > 0 and rank() == 0:
            rate = _rate_of(self.model.optimizer)
            print(f"\nEpoch {self.current_epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


# -- what the Keras at hand calls it -----------------------------------------------------------------------------------
def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _rate_of(optimizer: Any) -> float:
    rate = optimizer.learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)


def _momentums_of(optimizer: Any) -> list[Any]:
    optimizer = _innermost(optimizer)
    if not getattr(optimizer, "momentum", 0):
        return []
    if hasattr(optimizer, "get_slot_names"):  # tf_keras.optimizers.legacy
        return [one for one in optimizer.variables() if one.name.endswith("/momentum:0")]
    return [one for one in getattr(optimizer, "momentums", getattr(optimizer, "_momentums", [])) if one is not None]


def _has_all(model: Any) -> bool:
    """Whether all variables of the model and its optimizer exist; those of the optimizer are made, if they can be."""
    if not model.built:
        return False
    if model.optimizer is not None:
        build_optimizer(model.optimizer, model)
    return True


# -- BestModelCheckpoint -----------------------------------------------------------------------------------------------
# Keras's ModelCheckpoint whose path is set later, by who knows it. In elastic training each world is another `fit`, for
# which scripts make their callbacks anew. A new callback would take the first model that it sees for the best one, and
# write it over a better one. So the best value is kept for the elastic state.

# Elastic state -> (metric, path) -> the best value so far.
_BEST: Final[weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Any]]] = weakref.WeakKeyDictionary()


class BestModel:
    """The mixin; Keras's ModelCheckpoint comes second."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        # Keras refuses a path that does not end with .keras or .weights.h5.
        path: Any = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(
            filepath=path,  # type: ignore[call-arg]
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def _save_model(self, *arguments: Any, **options: Any) -> None:
        if self.filepath is None:
            raise ValueError(
                coded(
                    TrainingCode.INVALID_ARGUMENT,
                    "BestModelCheckpoint has no path to save to. Set its attribute `filepath` first.",
                )
            )
        state = progress_of(self.model).state  # type: ignore[attr-defined]
        best = {} if state is None else _BEST.setdefault(state, {})
        place = (self.monitor, str(self.filepath))  # type: ignore[attr-defined]
        if place in best:
            self.best = best[place]
        super()._save_model(*arguments, **options)  # type: ignore[misc]
        best[place] = self.best
