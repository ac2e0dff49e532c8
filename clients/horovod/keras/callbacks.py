"""Callbacks for `fit`: hvd.callbacks.BroadcastGlobalVariablesCallback(0) and so on."""

from __future__ import annotations

import keras

from horovod._keras import best_model
from horovod._keras import callbacks as shared

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(shared.BroadcastGlobalVariablesCallback, keras.callbacks.Callback):
    __doc__ = shared.BroadcastGlobalVariablesCallback.__doc__
    _hvd_keras = keras


class MetricAverageCallback(shared.MetricAverageCallback, keras.callbacks.Callback):
    __doc__ = shared.MetricAverageCallback.__doc__
    _hvd_keras = keras


class LearningRateScheduleCallback(shared.LearningRateScheduleCallback, keras.callbacks.Callback):
    __doc__ = shared.LearningRateScheduleCallback.__doc__
    _hvd_keras = keras


class LearningRateWarmupCallback(shared.LearningRateWarmupCallback, keras.callbacks.Callback):
    __doc__ = shared.LearningRateWarmupCallback.__doc__
    _hvd_keras = keras


class BestModelCheckpoint(best_model.BestModel, keras.callbacks.ModelCheckpoint):
    """Saves the best model so far to `filepath`, an attribute to be set before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(monitor, verbose, save_weights_only, mode, save_freq)
