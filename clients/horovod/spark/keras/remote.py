"""The training of a model of Keras on one rank: what KerasEstimator sends to all of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod.data.prefetch import Prefetch
from horovod.spark.common.batches import Batches, share_of_validation
from horovod.spark.common.devices import gpu_of_rank, same_devices
from horovod.spark.common.training import CommonTraining
from horovod.spark.common.transform import kind_of
from horovod.spark.common.transformation import columns_of
from horovod.spark.keras.checkpoints import Keeper, Rates
from horovod.spark.keras.epochs import epochs_callback
from horovod.spark.keras.files import SavedModel, SavedOptimizer, from_bytes, import_keras
from horovod.spark.keras.tensors import inputs_for, labels_for, predictions_of, weights_for


@dataclass(kw_only=True)
class Training(CommonTraining):
    """All that a rank needs to know; it is pickled. Names are those of the estimator's parameters.

    run: how many epochs are done, the history so far, and the seed.
    """

    package: str
    keras_backend: str
    model: SavedModel
    resumed: bool
    optimizer: SavedOptimizer
    loss: Any
    checkpoint_callback: Any
    run: dict[str, Any]
    backward_passes_per_step: int
    prefetched: int


def train(training: Training) -> dict[str, Any]:
    """Runs on all ranks. On rank 0 returns the model, as its checkpoint is, and how predictions look."""
    os.environ.setdefault("KERAS_BACKEND", training.keras_backend)
    if training.package == "tf_keras":
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # tf.keras is that one, then
    hvd: Any = importlib.import_module(
        "horovod.tensorflow.keras" if training.package == "tf_keras" else "horovod.keras"
    )
    hvd.init()
    keras = import_keras(training.package)
    same_devices(_choose_device(training), _gather)
    keras.utils.set_random_seed(training.run["seed"] % 2**32)  # for weights of layers that are not built yet
    custom_objects = training.model.custom_objects
    model = from_bytes(keras, training.model.content, custom_objects, compiled=training.resumed)
    optimizer = model.optimizer if training.resumed else training.optimizer.load()
    rates = Rates(keras, optimizer, hvd.size())
    rates.scale()
    arguments = {"compression": training.gradient_compression} if training.gradient_compression else {}
    distributed = hvd.DistributedOptimizer(
        optimizer, backward_passes_per_step=training.backward_passes_per_step, **arguments
    )
    model.compile(
        optimizer=distributed, loss=training.loss, loss_weights=training.loss_weights, metrics=training.metrics or None
    )
    module = training.data_module()
    train_batches = module.batches(training.train, hvd.rank(), hvd.size())
    keeper = Keeper(keras, training.store, dict(training.run), rates, training.checkpoint_callback)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    callbacks.append(epochs_callback(keras, training.run["seed"], hvd.rank()))
    callbacks += training.callbacks
    callbacks += keeper.callbacks(hvd.rank())
    done = training.run["epochs"]
    options: dict[str, Any] = {}
    if training.val is not None:
        val_batches = module.batches(training.val, *share_of_validation(training.val, hvd.rank(), hvd.size()))
        options = {
            "validation_data": _endless(training, model, val_batches, done),
            "validation_steps": val_batches.steps,
        }
    if done < training.epochs:
        model.fit(
            _endless(training, model, train_batches, done),
            shuffle=False,  # the reader does
            steps_per_epoch=train_batches.steps,
            initial_epoch=done,
            epochs=training.epochs,
            callbacks=callbacks,
            verbose=training.verbose and (2 if hvd.rank() == 0 else 0),
            **options,
        )
    if hvd.rank() != 0:
        return {}
    predictions = [kind_of(one) for one in _predicted(training, model, train_batches)]
    return {"model": keeper.result(model), "predictions": predictions, "columns": training.train.looks}


def _endless(training: Training, model: Any, batches: Batches, epoch: int) -> Iterator[Any]:
    """The batches of this epoch and all that follow: Keras takes as many as an epoch has steps."""
    if training.prefetched:
        yield from Prefetch(lambda: _all_epochs(training, model, batches, epoch), training.prefetched)
    else:
        yield from _all_epochs(training, model, batches, epoch)


def _all_epochs(training: Training, model: Any, batches: Batches, epoch: int) -> Iterator[Any]:
    weighted = training.weight_column is not None or batches.weighted
    while True:
        for batch, _, scale in batches.of_epoch(epoch):
            features, columns = training.feature_columns, training.label_columns
            inputs = inputs_for(model, columns_of(batch, features), features)
            labels = labels_for(model, columns_of(batch, columns), columns, training.label_shapes)
            if not weighted:
                yield inputs, labels
                continue
            rows = len(batch[columns[0]])
            weights = np.ones(rows)
            if training.weight_column is not None:
                (weights,) = columns_of(batch, [training.weight_column])
            weights = (weights * scale).astype(np.float32)
            yield inputs, labels, weights_for(model, weights, columns)
        epoch += 1


def _predicted(training: Training, model: Any, batches: Batches) -> list[np.ndarray]:
    features = training.feature_columns
    for batch, _, _ in batches.of_epoch(0):
        found = model.predict_on_batch(inputs_for(model, columns_of(batch, features), features))
        return predictions_of(found, training.label_columns)
    return []


def _choose_device(training: Training) -> str:
    """Makes the rank's GPU the only one that is used, and returns what kind of device it trains on."""
    if training.keras_backend == "torch":
        import torch

        if not (training.use_gpu and torch.cuda.is_available()):
            return "cpu"
        torch.cuda.set_device(gpu_of_rank())
        return "cuda"
    if training.keras_backend == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            return "cpu"
        tf.config.set_visible_devices([gpus[gpu_of_rank()]] if training.use_gpu else [], "GPU")
        for gpu in tf.config.get_visible_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
        return "gpu" if training.use_gpu else "cpu"
    return "any"  # JAX has chosen already


def _gather(kind: str) -> list[Any]:
    from horovod.common.ops.objects import allgather_object
    from horovod.common.process_sets import global_process_set

    return allgather_object(kind, "spark.devices", global_process_set)
