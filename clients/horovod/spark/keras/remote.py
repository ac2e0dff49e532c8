"""The training of a model of Keras on one rank: what KerasEstimator sends to all of them.

Keras has the epochs. What is done between them is done by its callbacks: random numbers, running means and learning
rates are those that a run would have that was not interrupted, in checkpoints those of one process.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from horovod._keras.backends import backend_of
from horovod.common.process_sets import global_process_set
from horovod.data.prefetch import Prefetch
from horovod.spark.common.batches import Batches
from horovod.spark.common.training import Trainer, Training, gpu_of_rank
from horovod.spark.common.transformation import Batch, columns_of
from horovod.spark.keras.tensors import inputs_for, labels_for, predictions_of, weights_for
from horovod.spark.keras.util import SavedModel, SavedOptimizer, from_bytes, import_keras, to_bytes, with_run


@dataclass(kw_only=True)
class KerasTraining(Training):
    """The model of a run that goes on is that of its checkpoint, with its optimizer.

    resumed: whether it is. checkpoint_callback: what saves the model after an epoch in place of the trainer.
    """

    package: str
    keras_backend: str
    model: SavedModel
    resumed: bool
    optimizer: SavedOptimizer
    loss: Any
    checkpoint_callback: Any
    prefetched: int


class KerasTrainer(Trainer):
    """A model of Keras 3 or tf_keras on one rank."""

    training: KerasTraining

    def __init__(self, training: KerasTraining) -> None:
        super().__init__(training)
        os.environ.setdefault("KERAS_BACKEND", training.keras_backend)
        if training.package == "tf_keras":
            os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # tf.keras is that one, then
        name = "horovod.tensorflow.keras" if training.package == "tf_keras" else "horovod.keras"
        self.hvd: Any = importlib.import_module(name)
        self.keras = import_keras(training.package)

    def choose_device(self) -> str:
        """Makes the rank's GPU the only one that is used."""
        if self.training.keras_backend == "torch":
            import torch

            if not (self.training.use_gpu and torch.cuda.is_available()):
                return "cpu"
            torch.cuda.set_device(gpu_of_rank())
            return "cuda"
        if self.training.keras_backend == "tensorflow":
            import tensorflow as tf

            gpus = tf.config.list_physical_devices("GPU")
            if not gpus:
                return "cpu"
            tf.config.set_visible_devices([gpus[gpu_of_rank()]] if self.training.use_gpu else [], "GPU")
            for gpu in tf.config.get_visible_devices("GPU"):
                tf.config.experimental.set_memory_growth(gpu, True)
            return "gpu" if self.training.use_gpu else "cpu"
        return "any"  # JAX has chosen already

    def load(self) -> None:
        training, keras, hvd = self.training, self.keras, self.hvd
        keras.utils.set_random_seed(self.run["seed"] % 2**32)  # for weights of layers that are not built yet
        saved = training.model
        self.model = from_bytes(keras, saved.content, saved.custom_objects, compiled=training.resumed)
        optimizer = self.model.optimizer if training.resumed else training.optimizer.load()
        self.rates = Rates(keras, optimizer, hvd.size())
        self.rates.scale()
        compression = {"compression": training.gradient_compression} if training.gradient_compression else {}
        passes = training.backward_passes_per_step
        self.model.compile(
            optimizer=hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes, **compression),
            loss=training.loss,
            loss_weights=training.loss_weights,
            metrics=training.metrics or None,
        )

    def fit(self, train: Batches, val: Batches | None) -> None:
        training, hvd, first = self.training, self.hvd, self.run["epochs"]
        options: dict[str, Any] = {}
        if val is not None:
            options = {"validation_data": self._endless(val, first), "validation_steps": val.steps}
        with tempfile.TemporaryDirectory() as scratch:
            self.model.fit(
                self._endless(train, first),
                shuffle=False,  # the reader does
                steps_per_epoch=train.steps,
                initial_epoch=first,
                epochs=training.epochs,
                callbacks=[
                    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                    hvd.callbacks.MetricAverageCallback(),
                    _epochs(self.keras, self.run["seed"], hvd.rank()),
                    *training.callbacks,
                    *(self._checkpoints(Path(scratch, "checkpoint.keras")) if hvd.rank() == 0 else ()),
                ],
                verbose=training.verbose and (2 if hvd.rank() == 0 else 0),
                **options,
            )

    def checkpoint(self) -> bytes:
        """The model that a given callback has saved last, else the model as it is: when a training ends, callbacks may
        change it, as EarlyStopping(restore_best_weights=True) does.
        """
        if self.training.checkpoint_callback is not None and self.kept is not None:
            return self.kept
        return with_run(self._content(), self.run)

    def predicted(self, batch: Batch) -> Sequence[np.ndarray]:
        features = self.training.feature_columns
        found = self.model.predict_on_batch(inputs_for(self.model, columns_of(batch, features), features))
        return predictions_of(found, self.training.label_columns)

    def _endless(self, batches: Batches, epoch: int) -> Iterator[Any]:
        """The batches of this epoch and all that follow: Keras takes as many as an epoch has steps."""
        if self.training.prefetched:
            yield from Prefetch(lambda: self._all_epochs(batches, epoch), self.training.prefetched)
        else:
            yield from self._all_epochs(batches, epoch)

    def _all_epochs(self, batches: Batches, epoch: int) -> Iterator[Any]:
        training, model = self.training, self.model
        features, columns = training.feature_columns, training.label_columns
        weighted = training.weight_column is not None or batches.weighted
        while True:
            for batch, _, scale in batches.of_epoch(epoch):
                inputs = inputs_for(model, columns_of(batch, features), features)
                labels = labels_for(model, columns_of(batch, columns), columns, training.label_shapes)
                if not weighted:
                    yield inputs, labels
                    continue
                weights = np.ones(len(batch[columns[0]]))
                if training.weight_column is not None:
                    (weights,) = columns_of(batch, [training.weight_column])
                weights = (weights * scale).astype(np.float32)
                yield inputs, labels, weights_for(model, weights, columns)
            epoch += 1

    def _checkpoints(self, path: Path) -> list[Any]:
        """The callback that fit() is to call last of all on rank 0. path: where a given callback saves to."""
        trainer, given = self, self.training.checkpoint_callback
        base: Any = self.keras.callbacks.Callback

        class Unscaled(base):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                trainer.rates.restore()

        class Kept(base):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if given is not None:
                    trainer.rates.scale()
                trainer._after(epoch, logs or {}, None if given is None else path)

        if given is None:
            return [Kept()]
        given.filepath = str(path)
        return [Unscaled(), given, Kept()]

    def _after(self, epoch: int, logs: dict[str, Any], path: Path | None) -> None:
        """The epoch is over. path: where a given callback has saved the model, unless the epoch was not to its
        liking.
        """
        history = {name: list(values) for name, values in self.run["history"].items()}
        for name, value in logs.items():
            history.setdefault(name, []).append(float(value))
        self.done(epoch, history)
        if path is None:
            self.keep(with_run(self._content(), self.run))
        elif path.exists():
            self.keep(with_run(path.read_bytes(), self.run))
            path.unlink()

    def _content(self) -> bytes:
        self.rates.restore()
        try:
            return to_bytes(self.model)
        finally:
            self.rates.scale()


class Rates:
    """The learning rate: in training that of one process times the number of ranks, in files that of one process."""

    def __init__(self, keras: Any, optimizer: Any, factor: int) -> None:
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # that of a LossScaleOptimizer
        self._factor = factor
        schedule = getattr(self._optimizer, "_learning_rate", None)
        self._schedule = schedule if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule) else None
        self._scaled = _scaled_schedule(keras, self._schedule, factor) if self._schedule is not None else None
        self._of_file: tuple[float, float] | None = None  # the rate that restore() has set, and the one before

    def scale(self) -> None:
        """For training."""
        if self._schedule is not None:
            self._optimizer._learning_rate = self._scaled
            return
        rate = float(self._optimizer.learning_rate)
        # The rate that was, and not a multiple that may be rounded to another one than the other ranks have.
        given, training = self._of_file or (rate, rate * self._factor)
        self._optimizer.learning_rate = training if rate == given else rate * self._factor

    def restore(self) -> None:
        """For a file."""
        if self._schedule is not None:
            self._optimizer._learning_rate = self._schedule
            return
        rate = float(self._optimizer.learning_rate)
        self._optimizer.learning_rate = rate / self._factor
        self._of_file = float(self._optimizer.learning_rate), rate


def _scaled_schedule(keras: Any, schedule: Any, factor: int) -> Any:
    class Scaled(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return schedule(step) * factor

        def get_config(self) -> dict[str, Any]:
            raise NotImplementedError("files have the schedule of one process")

    return Scaled()


def _epochs(keras: Any, seed: int, rank: int) -> Any:
    """A callback for fit(), to be called before those of the user."""

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            """Random numbers depend on seed, epoch and rank alone. Keras saves no generators of layers with a model."""
            generators = [one for layer in self.model._flatten_layers() for one in _generators(layer)]
            words = np.random.SeedSequence((seed % 2**32, epoch, rank)).generate_state(1 + len(generators))
            keras.utils.set_random_seed(int(words[0]))
            for generator, word in zip(generators, words[1:], strict=True):
                generator.state.assign(np.array([word, 0], np.uint32))

        def on_test_begin(self, logs: Any = None) -> None:
            """As running means of a BatchNormalization are those of a rank's own batches, all validate with rank 0's,
            which are saved.
            """
            backend_of(keras).broadcast_variables(_statistics(self.model), 0, global_process_set)

    return Epochs()


def _generators(layer: Any) -> list[Any]:
    """The seed generators of Keras 3; tf_keras has none with a state that could be set."""
    return list(getattr(layer, "_seed_generators", ()))


def _statistics(model: Any) -> list[Any]:
    """Running means and variances, as of BatchNormalization, without those of frozen layers, which never change."""
    frozen = {id(one) for layer in model._flatten_layers() if not layer.trainable for one in layer.weights}
    return [one for one in model.non_trainable_weights if id(one) not in frozen]
