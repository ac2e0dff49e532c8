"""An optimizer of Keras 2 (the package tf_keras, or tf.keras with TF_USE_LEGACY_KERAS=1) that reduces gradients.

Its hook is `aggregate_gradients`, `_aggregate_gradients` in tf_keras.optimizers.legacy: tf.distribute sums up there. A
LossScaleOptimizer calls it before it looks whether gradients are finite, so all ranks skip the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._keras.optimizer import Distribution, _of, distribute
from horovod.base.errors import TrainingCode, coded
from horovod.common.gradients import Reduction
from horovod.tensorflow.autograph import as_it_is


class _Reducing:
    """What the subclass of an optimizer adds. Comes before it in the method resolution order."""

    _hvd: Distribution | None = None

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays that of this rank, divided by the number of ranks."""
        _of(self).register_local_var(var)

    @property
    def gradient_aggregation(self) -> Any:
        """The sums of several backward passes, or None where each is a step."""
        return _of(self).aggregation

    def _hvd_reduced(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        distribution = _of(self)
        pairs = list(grads_and_vars)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if distribution.aggregation is None:
            return list(zip(distribution.reduce(gradients, variables, loss_scaled=True), variables, strict=True))
        aggregation: Any = distribution.aggregation
        if all(gradient is None for gradient in gradients) and not any(map(aggregation.has_sum, variables)):
            return pairs  # which the optimizer refuses
        is_last = aggregation.add(gradients, variables)
        present = [aggregation.has_sum(variable) for variable in variables]

        def last() -> list[Any]:
            reduced = distribution.reduce(aggregation.take(variables), variables, loss_scaled=True)
            return [tf.convert_to_tensor(one) for one in reduced if one is not None]

        def not_yet() -> list[Any]:  # finite, so that no loss scaling decides on it
            return [
                tf.zeros(variable.shape, variable.dtype)
                for there, variable in zip(present, variables, strict=True)
                if there
            ]

        as_it_is(last, not_yet)
        self.__dict__["_hvd_is_last"] = is_last
        results = iter(tf.nest.flatten(tf.cond(is_last, last, not_yet)))
        return [
            (next(results) if there else None, variable) for there, variable in zip(present, variables, strict=True)
        ]

    def _hvd_step(self, variables: Sequence[Any], apply: Any) -> Any:
        """Runs `apply` when the pass was the last one before a step; else only counts."""
        with tf.init_scope():
            self._hvd_build(list(variables))
        iterations: Any = self.iterations  # type: ignore[attr-defined]

        def use() -> tf.Tensor:
            apply()
            return tf.constant(0)

        def skip() -> tf.Tensor:
            iterations.assign_add(1)
            return tf.constant(0)

        as_it_is(use, skip)
        tf.cond(self.__dict__.pop("_hvd_is_last"), use, skip)
        return iterations

    def _hvd_build(self, variables: list[Any]) -> None:
        raise NotImplementedError


class _DistributedOptimizer(_Reducing):
    """Of tf_keras.optimizers.Optimizer."""

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """The gradients reduced over the ranks."""
        return self._hvd_reduced(grads_and_vars)

    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        """Reduces the gradients over the ranks and applies them."""
        apply = super().apply_gradients  # type: ignore[misc]
        skips = skip_gradients_aggregation or not kwargs.pop("experimental_aggregate_gradients", True)
        pairs = list(grads_and_vars)
        if not skips:
            pairs = self.aggregate_gradients(pairs)
        if "_hvd_is_last" not in self.__dict__:
            return apply(pairs, name=name, skip_gradients_aggregation=True)
        return self._hvd_step(
            [variable for _, variable in pairs], lambda: apply(pairs, name=name, skip_gradients_aggregation=True)
        )

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """Pairs of this rank's gradients and variables, as optimizers of Keras 2 had it; `apply_gradients` reduces."""
        if grad_loss is not None:
            raise ValueError(
                coded(
                    TrainingCode.INVALID_ARGUMENT,
                    "tf_keras.optimizers.Optimizer takes no grad_loss; multiply the loss by it.",
                )
            )
        return self.compute_gradients(loss, var_list, tape)  # type: ignore[attr-defined]

    def _hvd_build(self, variables: list[Any]) -> None:
        self.build(variables)  # type: ignore[attr-defined]


class _DistributedLegacyOptimizer(_Reducing):
    """Of tf_keras.optimizers.legacy.Optimizer."""

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        return self._hvd_reduced(grads_and_vars)

    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """Reduces the gradients over the ranks and applies them."""
        apply = super().apply_gradients  # type: ignore[misc]
        if _of(self).aggregation is None:
            pairs = [pair for pair in grads_and_vars if pair[0] is not None]
            return apply(pairs, name=name, experimental_aggregate_gradients=experimental_aggregate_gradients)
        pairs = list(grads_and_vars)
        if experimental_aggregate_gradients:
            pairs = self._hvd_reduced(pairs)
        if "_hvd_is_last" not in self.__dict__:
            return apply(pairs, name=name, experimental_aggregate_gradients=False)
        return self._hvd_step(
            [variable for _, variable in pairs],
            lambda: apply(pairs, name=name, experimental_aggregate_gradients=False),
        )

    def _hvd_build(self, variables: list[Any]) -> None:
        self._create_all_weights(variables)  # type: ignore[attr-defined]


as_it_is(
    _DistributedOptimizer.aggregate_gradients,
    _DistributedOptimizer.apply_gradients,
    _DistributedLegacyOptimizer._aggregate_gradients,
    _DistributedLegacyOptimizer.apply_gradients,
)


def distribute_tf_keras(
    optimizer: Any, reduction: Reduction, passes: int, average: bool, backend: Any, name: str | None
) -> Any:
    """The optimizer, distributed; of a LossScaleOptimizer the one in it. Raises ValueError, or as a Reduction."""
    if hasattr(optimizer, "inner_optimizer"):
        distribute_tf_keras(optimizer.inner_optimizer, reduction, passes, average, backend, name)
        return optimizer
    from horovod._keras import copies

    copies.install_tf_keras()
    mixin = _DistributedOptimizer if hasattr(optimizer, "aggregate_gradients") else _DistributedLegacyOptimizer
    return distribute(optimizer, Distribution(reduction, passes, average, backend), mixin, name)
