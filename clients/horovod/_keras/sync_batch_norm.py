"""hvd.SyncBatchNormalization for Keras on PyTorch and JAX: batch normalization over the batches of all ranks together.

On TensorFlow it is the layer of horovod.tensorflow.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from horovod._keras.backends import backend_of
from horovod.common.basics import is_initialized, size


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """keras.layers.BatchNormalization over the batches of all ranks; their sizes may differ, and may be 0. Example:

        >>> model = keras.Sequential([keras.layers.Conv2D(8, 3), hvd.SyncBatchNormalization()])

    Takes the arguments of keras.layers.BatchNormalization. Two allreduces of a number or two for each channel forward,
    and two backward. All ranks must call it equally often in training; in evaluation it calls nobody.

    Raises, in a step in which a rank was lost, what the operations of the backend raise.
    """

    def _moments(self, inputs: Any, mask: Any = None) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        # Keras asks for the shapes of outputs with tensors of PyTorch that have no data.
        if not is_initialized() or size() == 1 or getattr(inputs, "is_meta", False):
            return mean, variance
        counts = self._counts(inputs, mask, mean)
        # The mean of no values is no number, which would get into the other ranks' gradients.
        mean, variance = (ops.where(counts > 0, one, 0.0) for one in (mean, variance))
        # The variance is taken around the mean of all: the difference of the mean square and the squared mean would
        # lose the digits that single precision has.
        total, total_sums = ops.unstack(_sum(ops.stack([counts, mean * counts]), "mean"), 2)
        mean_of_all = total_sums / total
        squares = (variance + ops.square(mean - mean_of_all)) * counts
        return mean_of_all, _sum(squares, "variance") / total

    def _counts(self, inputs: Any, mask: Any, mean: Any) -> Any:
        """How many values take part, of each channel."""
        if mask is None:
            return ops.ones_like(mean) * (ops.size(inputs) // inputs.shape[self.axis])
        taken = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs))
        return ops.reshape(ops.sum(ops.cast(taken, mean.dtype), self._reduction_axes), ops.shape(mean))


def _sum(values: Any, what: str) -> Any:
    # One name for each number of channels, as what a name means stays the same on all ranks then.
    name = f"sync_batch_norm.{what}.{values.shape[-1] if values.shape else 1}"
    return backend_of(keras).differentiable_sum(values, name)
