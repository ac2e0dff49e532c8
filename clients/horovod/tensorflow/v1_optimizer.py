"""Optimizers of tf.compat.v1.train that reduce gradients in `compute_gradients`, or, for Adasum, changes of variables.

They delegate to the user's optimizer, whose slots and variables they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.base.errors import TrainingCode, coded
from horovod.common.basics import Adasum
from horovod.common.gradients import Reduction, identity
from horovod.tensorflow.aggregation import LocalGradientAggregation
from horovod.tensorflow.gradients import compared_before, reduced, reduced_but_local
from horovod.tensorflow.once import check_reduced, hand_out

_COMPUTE = (
    "Take gradients from this optimizer's compute_gradients() or minimize(), or from an hvd.DistributedGradientTape; "
    "they may be changed before they are applied."
)


def distributed_v1(
    optimizer: Any, reduction: Reduction, passes: int, average: bool, name: str | None, use_locking: bool
) -> Any:
    """A distributed optimizer around `optimizer`. Raises ValueError for what does not go together."""
    if passes > 1 and tf.executing_eagerly():
        raise ValueError(
            coded(
                TrainingCode.UNSUPPORTED_OPTIMIZER,
                "backward_passes_per_step > 1 is not supported for an optimizer of tf.compat.v1.train that is used "
                "eagerly. Use an optimizer of Keras.",
            )
        )
    if reduction.op == Adasum and average:
        raise ValueError(
            coded(TrainingCode.CONTRADICTORY_ARGUMENTS, "Adasum does not support average_aggregated_gradients.")
        )
    kind = _AdasumOptimizer if reduction.op == Adasum else _DistributedOptimizer
    return kind(optimizer, reduction, passes, average, name, use_locking)


class _Around(tf.compat.v1.train.Optimizer):
    """Delegates what does not concern gradients."""

    def __init__(
        self, optimizer: Any, reduction: Reduction, passes: int, average: bool, name: str | None, use_locking: bool
    ) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._local: dict[int, Any] = {}
        self._aggregation = LocalGradientAggregation(passes, average, reduction.sparse_as_dense) if passes > 1 else None

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays that of this rank, divided by the number of ranks."""
        self._local[identity(var)] = var

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)

    def _after_passes(self, gradients: Sequence[Any], variables: Sequence[Any], use: Any, global_step: Any) -> Any:
        """use(gradients), at once or with the sums of several passes; the operation to run."""
        if self._aggregation is None:
            return use(list(gradients))
        is_last = self._aggregation.add(gradients, variables)

        def last() -> tf.Tensor:
            with tf.control_dependencies([use(self._aggregation.take(variables))]):  # type: ignore[union-attr]
                return tf.constant(0)

        def not_yet() -> tf.Tensor:
            counted = [] if global_step is None else [global_step.assign_add(1)]
            with tf.control_dependencies(counted):
                return tf.constant(0)

        with tf.control_dependencies([is_last]):
            return tf.group(tf.cond(is_last, last, not_yet))


class _DistributedOptimizer(_Around):
    """Average and Sum."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Pairs (gradient, variable): reduced, if there is one pass for each step."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if self._aggregation is not None or not pairs:
            return list(pairs)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        results = self._reduced(gradients, variables)
        hand_out(results, variables, self._reduction, self)
        return list(zip(results, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Applies what `compute_gradients` returned; with several passes for each step it reduces before.

        Raises ValueError for gradients that nobody has reduced.
        """
        pairs = list(grads_and_vars)
        if self._aggregation is None:
            check_reduced([pair[0] for pair in pairs], [pair[1] for pair in pairs], self._reduction, _COMPUTE)
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        _make_slots(self._optimizer, variables)

        def use(taken: list[Any]) -> Any:
            together = list(zip(self._reduced(taken, variables), variables, strict=True))
            return self._optimizer.apply_gradients(together, global_step=global_step, name=name)

        return self._after_passes(gradients, variables, use, global_step)

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return reduced_but_local(gradients, variables, set(self._local), self._reduction, optimizer=self)


class _AdasumOptimizer(_Around):
    """Each rank takes its own step; Adasum combines the changes of the variables."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The user's optimizer's: nothing is reduced yet."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Applies the gradients, and then what all ranks have changed."""
        pairs = [pair for pair in grads_and_vars if pair[0] is not None]
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        _make_slots(self._optimizer, variables)

        def use(taken: list[Any]) -> Any:
            with compared_before(taken, variables, self._reduction, self):
                before = [tf.identity(one.read_value()) for one in variables]
            with tf.control_dependencies(before):
                stepped = self._optimizer.apply_gradients(
                    list(zip(taken, variables, strict=True)), global_step=global_step, name=name
                )
            with tf.control_dependencies([] if stepped is None else [stepped]):
                changes = [one.read_value() - old for one, old in zip(variables, before, strict=True)]
            combined = reduced(changes, variables, self._reduction, are_changes=True)
            return tf.group(
                *(one.assign(old + change) for one, old, change in zip(variables, before, combined, strict=True))
            )

        return self._after_passes(gradients, variables, use, global_step)


def _make_slots(optimizer: Any, variables: Sequence[Any]) -> None:
    """Before a branch in which they could not be made, so that they are initialized with all other variables."""
    with tf.init_scope():
        optimizer._create_slots(list(variables))
