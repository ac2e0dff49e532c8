"""An optimizer of Keras 2 (the package tf_keras, or tf.keras with TF_USE_LEGACY_KERAS=1) that reduces gradients.

Its hook is `aggregate_gradients`, `_aggregate_gradients` in tf_keras.optimizers.legacy: tf.distribute sums up there. A
LossScaleOptimizer calls it before it looks whether gradients are finite, so all ranks skip the same steps. Gradients
that the optimizer computes itself are reduced as well. What is reduced is known by a mark (horovod.tensorflow.once), so
that nothing is reduced twice, and nothing is applied that nobody has reduced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from horovod._keras.optimizer import Distribution, distribute, distribution_of
from horovod.base.errors import TrainingCode, coded
from horovod.common.gradients import Reduction
from horovod.common.optimizer_numbers import Made
from horovod.tensorflow.library import as_it_is
from horovod.tensorflow.once import check_reduced, check_sums, forget, forget_own, hand_out, is_owned, mark

_MARK: Final = "_hvd_unscales_first"


class _Reducing:
    """What the subclass of an optimizer adds. Comes before it in the method resolution order."""

    _hvd: Distribution | None = None

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays that of this rank, divided by the number of ranks."""
        distribution_of(self).register_local_var(var)

    @property
    def gradient_aggregation(self) -> Any:
        """The sums of several backward passes, or None where each is a step."""
        return distribution_of(self).aggregation

    def _hvd_handed_out(self, grads_and_vars: Any, is_new: bool) -> list[tuple[Any, Any]]:
        """The pairs with reduced gradients, for the script, which may change them before it applies them.

        is_new: the optimizer has made them now. Others may come from a LossScaleOptimizer that applies them.
        """
        distribution = distribution_of(self)
        pairs = list(grads_and_vars)
        if distribution.defers:
            return pairs
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False) and not is_new:
            return self._hvd_reduced(pairs)
        forget_own([pair[1] for pair in pairs], distribution)
        pairs = self._hvd_reduced(pairs)
        hand_out([pair[0] for pair in pairs], [pair[1] for pair in pairs], distribution.reduction, distribution)
        return pairs

    def _hvd_to_apply(self, grads_and_vars: Any, aggregates: bool) -> list[tuple[Any, Any]]:
        """The pairs with gradients that are reduced, here or before."""
        distribution = distribution_of(self)
        pairs = list(grads_and_vars)
        if aggregates:
            return self._hvd_reduced(pairs)
        check_reduced([pair[0] for pair in pairs], [pair[1] for pair in pairs], distribution.reduction, _AGGREGATE)
        return pairs

    def _hvd_reduced(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        distribution = distribution_of(self)
        pairs = list(grads_and_vars)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if is_owned(gradients, distribution):
            forget(variables)
            return pairs
        if distribution.aggregation is None:
            reduced = distribution.reduce(self, gradients, variables, loss_scaled=True)
            mark(reduced, distribution.reduction.op, distribution.reduction.process_set, distribution)
            return list(zip(reduced, variables, strict=True))
        check_sums(gradients, variables, distribution.reduction)
        aggregation: Any = distribution.aggregation
        if all(gradient is None for gradient in gradients) and not any(map(aggregation.has_sum, variables)):
            return pairs  # which the optimizer refuses
        is_last = aggregation.add(gradients, variables)
        present = [aggregation.has_sum(variable) for variable in variables]

        def last() -> list[Any]:
            reduced = distribution.reduce(self, aggregation.take(variables), variables, loss_scaled=True)
            return [tf.convert_to_tensor(one) for one in reduced if one is not None]

        def not_yet() -> list[Any]:  # finite, so that no loss scaling decides on it
            return [
                tf.zeros(variable.shape, variable.dtype)
                for there, variable in zip(present, variables, strict=True)
                if there
            ]

        as_it_is(last, not_yet)
        results = iter(tf.nest.flatten(tf.cond(is_last, last, not_yet)))
        self.__dict__["_hvd_is_last"] = is_last
        reduced = [next(results) if there else None for there in present]
        mark(reduced, distribution.reduction.op, distribution.reduction.process_set, distribution)
        return list(zip(reduced, variables, strict=True))

    def _hvd_was_last(self) -> Any:
        """Whether the pass whose gradients are applied was the last one before a step, a scalar bool."""
        is_last = self.__dict__.pop("_hvd_is_last", None)
        where = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if is_last is not None and getattr(is_last, "graph", None) is where:
            return is_last
        aggregation: Any = distribution_of(self).aggregation
        return aggregation.was_last()  # another function has added it

    def _hvd_apply(self, pairs: list[tuple[Any, Any]], apply: Any) -> Any:
        """Runs `apply`; with several passes for a step, when there are all of them."""
        with distribution_of(self).done():
            if distribution_of(self).aggregation is None or all(gradient is None for gradient, _ in pairs):
                return apply()
            return self._hvd_step([variable for _, variable in pairs], apply)

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
        done = tf.cond(self._hvd_was_last(), use, skip)
        is_new = hasattr(self, "aggregate_gradients")
        return iterations if is_new or tf.executing_eagerly() else tf.group(done)  # what each kind returns

    def _hvd_build(self, variables: list[Any]) -> None:
        raise NotImplementedError


class _DistributedOptimizer(_Reducing):
    """Of tf_keras.optimizers.Optimizer."""

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """The gradients reduced over the ranks."""
        return self._hvd_handed_out(grads_and_vars, is_new=False)

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Pairs of gradients, reduced over the ranks, and variables."""
        return self._hvd_handed_out(
            super().compute_gradients(loss, var_list, tape),  # type: ignore[misc]
            is_new=True,
        )

    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        """Reduces the gradients over the ranks, unless they are reduced, and applies them.

        Raises ValueError where aggregation is to be skipped and nobody has reduced them.
        """
        apply = super().apply_gradients  # type: ignore[misc]
        skips = skip_gradients_aggregation or not kwargs.pop("experimental_aggregate_gradients", True)
        pairs = self._hvd_to_apply(grads_and_vars, not skips)
        return self._hvd_apply(pairs, lambda: apply(pairs, name=name, skip_gradients_aggregation=True))

    def update_step(self, gradient: Any, variable: Any) -> Any:
        """One variable's part of a step, for `apply_gradients`; ValueError for others."""
        distribution_of(self).check_update(variable)
        return super().update_step(gradient, variable)  # type: ignore[misc]

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """`compute_gradients`, as optimizers of Keras 2 called it."""
        if grad_loss is not None:
            raise ValueError(
                coded(
                    TrainingCode.INVALID_ARGUMENT,
                    "tf_keras.optimizers.Optimizer takes no grad_loss; multiply the loss by it.",
                )
            )
        return self.compute_gradients(loss, var_list, tape)

    def _hvd_build(self, variables: list[Any]) -> None:
        self.build(variables)  # type: ignore[attr-defined]


class _DistributedLegacyOptimizer(_Reducing):
    """Of tf_keras.optimizers.legacy.Optimizer."""

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        return self._hvd_handed_out(grads_and_vars, is_new=False)

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """Pairs of gradients, reduced over the ranks, and variables."""
        pairs = super()._compute_gradients(loss, var_list, grad_loss, tape)  # type: ignore[misc]
        return self._hvd_handed_out(pairs, is_new=True)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Gradients, reduced over the ranks, in a v1 graph."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        pairs = zip(gradients, tf.nest.flatten(params), strict=True)
        return [gradient for gradient, _ in self._hvd_handed_out(pairs, is_new=True)]

    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """Reduces the gradients over the ranks, unless they are reduced, and applies them.

        Raises ValueError where aggregation is to be skipped and nobody has reduced them.
        """
        apply = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        if distribution_of(self).aggregation is None:
            pairs = [pair for pair in pairs if pair[0] is not None]
        pairs = self._hvd_to_apply(pairs, experimental_aggregate_gradients)
        return self._hvd_apply(pairs, lambda: apply(pairs, name=name, experimental_aggregate_gradients=False))

    def _hvd_build(self, variables: list[Any]) -> None:
        self._create_all_weights(variables)  # type: ignore[attr-defined]


_AGGREGATE: Final = (
    "Leave out skip_gradients_aggregation=True and experimental_aggregate_gradients=False, or take the gradients from "
    "compute_gradients() or aggregate_gradients() of this optimizer, or from an hvd.DistributedGradientTape."
)

as_it_is(
    _DistributedOptimizer.aggregate_gradients,
    _DistributedOptimizer.compute_gradients,
    _DistributedOptimizer._compute_gradients,
    _DistributedOptimizer.apply_gradients,
    _DistributedOptimizer.update_step,
    _DistributedLegacyOptimizer._aggregate_gradients,
    _DistributedLegacyOptimizer._compute_gradients,
    _DistributedLegacyOptimizer.get_gradients,
    _DistributedLegacyOptimizer.apply_gradients,
)


def _install_loss_scaling(kind: Any) -> None:
    """Of a LossScaleOptimizer around a distributed optimizer, gradients are reduced once they are unscaled.

    Its methods ask the inner optimizer for gradients of the scaled loss, and the scale may change between two passes of
    which the gradients are summed up.
    """
    for method in ("compute_gradients", "_compute_gradients", "get_gradients"):
        original = getattr(kind, method, None)
        if original is None or hasattr(original, _MARK):
            continue
        wrapper = _unscaled_first(original, only_gradients=method == "get_gradients")
        setattr(wrapper, _MARK, True)
        setattr(kind, method, wrapper)


def _unscaled_first(original: Any, only_gradients: bool) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_optimizer
        distribution = getattr(inner, "_hvd", None)
        if distribution is None:
            return original(self, *args, **kwargs)
        distribution.defers, before = True, distribution.defers
        try:
            found = original(self, *args, **kwargs)
        finally:
            distribution.defers = before
        if only_gradients:
            variables = tf.nest.flatten(kwargs["params"] if "params" in kwargs else args[1])
            pairs = inner._hvd_handed_out(zip(found, variables, strict=True), is_new=True)
            return [gradient for gradient, _ in pairs]
        return inner._hvd_handed_out(found, is_new=True)

    as_it_is(call)
    return call


def distribute_tf_keras(
    optimizer: Any,
    reduction: Reduction,
    passes: int,
    average: bool,
    backend: Any,
    name: str | None,
    made: Made | None = None,
) -> Any:
    """The optimizer, distributed; of a LossScaleOptimizer the one in it. Raises ValueError, or as a Reduction."""
    if hasattr(optimizer, "inner_optimizer"):
        distribute_tf_keras(optimizer.inner_optimizer, reduction, passes, average, backend, name, made)
        return optimizer
    keras: Any = sys.modules.get("tf_keras") or sys.modules["keras"]
    scaled: Any = keras.mixed_precision.LossScaleOptimizer
    for kind in (scaled, *scaled.__subclasses__()):
        _install_loss_scaling(kind)
    mixin = _DistributedOptimizer if hasattr(optimizer, "aggregate_gradients") else _DistributedLegacyOptimizer
    return distribute(optimizer, Distribution(reduction, passes, average, backend, made), mixin, name)
