"""hvd.SyncBatchNormalization: batch normalization with the mean and variance of the batches of all ranks together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Sum, is_initialized, size
from horovod.tensorflow.library import as_it_is
from horovod.tensorflow.model_order import Owner, in_order
from horovod.tensorflow.ops.allreduce import allreduce

_NAME = "sync_batch_norm"


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """tf.keras.layers.BatchNormalization over the batches of all ranks; their sizes may differ. Example:

        >>> model = tf.keras.Sequential([tf.keras.layers.Conv2D(8, 3), hvd.SyncBatchNormalization()])

    Args:
        fused: must be False, the default: ValueError for True and None.
        kwargs: those of tf.keras.layers.BatchNormalization.

    Raises tf.errors.UnknownError in a step in which a rank was lost.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError(
                coded(TrainingCode.INVALID_ARGUMENT, "SyncBatchNormalization does not support fused=True.")
            )
        if not hasattr(tf.keras, "ops"):  # Keras 2
            kwargs["fused"] = False
        kwargs.setdefault("name", None)
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if not is_initialized() or size() == 1:
            return mean, variance
        # Sums of squares are large against their difference: it is taken in double precision.
        wide_mean, wide_variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        count = tf.cast(_count(inputs, args, kwargs), tf.float64) / tf.cast(tf.size(mean), tf.float64)
        there = tf.fill(tf.shape(wide_mean), count)
        own = tf.stack([there, wide_mean * count, (wide_variance + tf.square(wide_mean)) * count])
        own = tf.where(there > 0, own, tf.zeros_like(own))  # a rank may have no rows, whose mean is no number
        # A layer's own name counts the layers that its process has made, which may be more on one rank.
        with in_order([Owner(_NAME, self.name)]) as names:
            name = None if tf.executing_eagerly() else names[0]
            counts, sums, squares = tf.unstack(allreduce(own, op=Sum, name=name, ignore_name_scope=True))
        mean_of_all = sums / counts
        variance_of_all = squares / counts - tf.square(mean_of_all)
        return tf.cast(mean_of_all, mean.dtype), tf.cast(variance_of_all, variance.dtype)


def _count(inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tf.Tensor:
    """Values that took part, of all channels."""
    mask = kwargs.get("mask", args[-1] if args and _is_mask(args[-1]) else None)
    if mask is None:
        return tf.size(inputs)
    return tf.reduce_sum(tf.cast(mask, tf.int32)) * tf.size(inputs) // tf.size(mask)


def _is_mask(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype == tf.bool


as_it_is(SyncBatchNormalization._moments)
