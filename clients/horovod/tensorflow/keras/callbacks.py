"""Callbacks for `fit`: hvd.callbacks.BroadcastGlobalVariablesCallback(0) and so on.

They are for the Keras that tf.keras is: Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._keras import best_model
from horovod._keras import callbacks as shared

keras: Any = tf.keras

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
