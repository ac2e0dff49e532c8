"""Gradients of several backward passes, summed up on this rank before they are reduced (backward_passes_per_step).

    pass 1 ... N-1    sums += gradients
    pass N            sums += gradients; reduce and use the sums; sums = 0

Works eagerly and in functions, whose variables live outside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.tensorflow.autograph import as_it_is

__all__ = ["LocalGradientAggregation"]


class LocalGradientAggregation:
    """The sums of one optimizer. average: divide them by the number of passes when they are used."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = passes
        self._average = average
        self._sparse_as_dense = sparse_as_dense
        self._counter: Any = None  # passes since the sums were used
        self._sums: dict[int, Any] = {}  # by the place of the gradient

    def add(self, gradients: Sequence[Any]) -> Any:
        """Adds the gradients of a pass. Returns whether it was the last one before a step, a scalar bool."""
        dense = [self._as_dense(gradient) for gradient in gradients]
        self._make(dense)
        added = [self._sums[place].assign_add(gradient) for place, gradient in enumerate(dense) if gradient is not None]
        with tf.control_dependencies([] if tf.executing_eagerly() else added):
            return tf.greater_equal(self._counter.assign_add(1), self._passes)

    def take(self, gradients: Sequence[Any]) -> list[Any]:
        """The sums, in place of the gradients of the last pass, and begins anew."""
        factor = 1.0 / self._passes if self._average else 1.0
        taken: list[Any] = [None] * len(gradients)
        for place, total in self._sums.items():
            if gradients[place] is not None:
                value = total.read_value()
                taken[place] = value * tf.cast(factor, value.dtype) if self._average else tf.identity(value)
        in_graph = not tf.executing_eagerly()
        with tf.control_dependencies([one for one in taken if one is not None] if in_graph else []):
            zeroed = [self._counter.assign(0), *(total.assign(tf.zeros_like(total)) for total in self._sums.values())]
        with tf.control_dependencies(zeroed if in_graph else []):  # v1 graphs run only what a result depends on
            return [None if one is None else tf.identity(one) for one in taken]

    def step(self, gradients: Sequence[Any], use: Callable[[list[Any]], object], skip: Callable[[], object]) -> None:
        """Adds the gradients of a pass; then uses the sums, or skips."""

        def last() -> tf.Tensor:
            use(self.take(gradients))
            return tf.constant(0)

        def not_yet() -> tf.Tensor:
            skip()
            return tf.constant(0)

        as_it_is(last, not_yet)
        tf.cond(self.add(gradients), last, not_yet)

    def _as_dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                coded(
                    TrainingCode.SPARSE_GRADIENT,
                    "A gradient is tf.IndexedSlices, as embeddings have, and backward_passes_per_step > 1 sums up "
                    "dense gradients only. Pass sparse_as_dense=True to hvd.DistributedOptimizer.",
                )
            )
        return tf.convert_to_tensor(gradient)

    def _make(self, gradients: Sequence[Any]) -> None:
        with tf.init_scope():
            if self._counter is None:
                self._counter = tf.Variable(0, trainable=False, name="hvd_passes")
            for place, gradient in enumerate(gradients):
                if gradient is not None and place not in self._sums:
                    zeros = tf.zeros(gradient.shape, gradient.dtype)
                    self._sums[place] = tf.Variable(zeros, trainable=False, name=f"hvd_sum_{place}")


as_it_is(LocalGradientAggregation.add, LocalGradientAggregation.take, LocalGradientAggregation.step)
