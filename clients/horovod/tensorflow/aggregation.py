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
from horovod.common.gradients import identity
from horovod.tensorflow.autograph import as_it_is

__all__ = ["LocalGradientAggregation"]


class LocalGradientAggregation:
    """The sums of one optimizer. average: divide them by the number of passes when they are used."""

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = passes
        self._average = average
        self._sparse_as_dense = sparse_as_dense
        self._counter: Any = None  # passes since the sums were used
        self._sums: dict[int, tuple[Any, Any]] = {}  # by identity of the variable, which is kept

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Adds the gradients of a pass. Returns whether it was the last one before a step, a scalar bool."""
        dense = [self._as_dense(gradient) for gradient in gradients]
        self._make(dense, variables)
        added = [
            self._sums[identity(variable)][1].assign_add(gradient)
            for gradient, variable in zip(dense, variables, strict=True)
            if gradient is not None
        ]
        with tf.control_dependencies([] if tf.executing_eagerly() else added):
            return tf.greater_equal(self._counter.assign_add(1), self._passes)

    def has_sum(self, variable: Any) -> bool:
        """Whether a pass has made a gradient of it, this one or an earlier one; in a function, whether one may."""
        return identity(variable) in self._sums

    def take(self, variables: Sequence[Any]) -> list[Any]:
        """The sums of the gradients of `variables`, None where there is none; begins anew.

        The last pass need not have made a gradient of a variable of which an earlier one did.
        """
        sums = [self._sums[identity(one)][1] if self.has_sum(one) else None for one in variables]
        taken = [None if total is None else self._of_passes(total.read_value()) for total in sums]
        in_graph = not tf.executing_eagerly()
        with tf.control_dependencies([one for one in taken if one is not None] if in_graph else []):
            used = [total for total in sums if total is not None]
            zeroed = [self._counter.assign(0), *(total.assign(tf.zeros_like(total)) for total in used)]
        with tf.control_dependencies(zeroed if in_graph else []):  # v1 graphs run only what a result depends on
            return [None if one is None else tf.identity(one) for one in taken]

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        use: Callable[[list[Any]], object],
        skip: Callable[[], object],
    ) -> None:
        """Adds the gradients of a pass; then uses the sums, or skips."""

        def last() -> tf.Tensor:
            use(self.take(variables))
            return tf.constant(0)

        def not_yet() -> tf.Tensor:
            skip()
            return tf.constant(0)

        as_it_is(last, not_yet)
        tf.cond(self.add(gradients, variables), last, not_yet)

    def _of_passes(self, total: Any) -> Any:
        return total / tf.constant(self._passes, total.dtype) if self._average else tf.identity(total)

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

    def _make(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        # A function makes variables in its first trace only, and another trace may have gradients of others.
        in_function = not tf.executing_eagerly() and tf.compat.v1.get_default_graph().building_function
        with tf.init_scope():
            if self._counter is None:
                self._counter = tf.Variable(0, trainable=False, name="hvd_passes")
            for gradient, variable in zip(gradients, variables, strict=True):
                if self.has_sum(variable) or (gradient is None and not in_function):
                    continue
                like = variable if gradient is None else gradient
                zeros = tf.zeros(like.shape, like.dtype)
                total = tf.Variable(zeros, trainable=False, name=f"hvd_sum_{len(self._sums)}")
                self._sums[identity(variable)] = (variable, total)


as_it_is(LocalGradientAggregation.add, LocalGradientAggregation.take, LocalGradientAggregation.step)
