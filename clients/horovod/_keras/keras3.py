"""A Keras 3 optimizer that reduces gradients over the ranks before it applies them.

Keras's trainers, whatever the backend and however they run a step, end in `optimizer.apply(gradients, variables)`, or
on JAX in `stateless_apply`. The subclass of the user's optimizer (optimizer.py) reduces there (docs/adr/0051).
"""

from __future__ import annotations

from typing import Any

from horovod._keras.optimizer import Distribution, distribute, distribution_of, is_distributed
from horovod.common.gradients import Reduction
from horovod.common.optimizer_numbers import Made

_REDUCES_BEFORE = "_hvd_reduces_before"  # marks of what is replaced already
_ASKS_THE_OPTIMIZER = "_hvd_asks_the_optimizer"


class CallableList(list[Any]):
    """Scripts write optimizer.variables(), as it was in Keras 2, and optimizer.variables."""

    def __call__(self) -> CallableList:
        return self


class _DistributedOptimizer:
    """What the subclass adds. Comes first in the method resolution order."""

    _hvd: Distribution | None = None

    @property
    def variables(self) -> Any:
        """The optimizer's variables."""
        return CallableList(super().variables)  # type: ignore[misc]

    @property
    def lr(self) -> Any:
        """`learning_rate`, by the name that Keras 2 also knew. In Keras 3 alone, assigning to it changes nothing."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays that of this rank, divided by the number of ranks."""
        distribution_of(self).register_local_var(var)

    @property
    def iterations(self) -> Any:
        """The number of calls of `apply`; for the update itself, as Adam needs it, that of steps before."""
        calls = super().iterations  # type: ignore[misc]
        if self._hvd is None or not self._hvd.applies or self._hvd.passes == 1 or hasattr(self, "inner_optimizer"):
            return calls
        from keras import ops

        return ops.floor_divide(calls, self._hvd.passes)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces the gradients over the ranks and applies them."""
        apply = super().apply  # type: ignore[misc]
        distribution_of(self).apply(self, grads, trainable_variables, apply, loss_scaled=hasattr(self, "dynamic_scale"))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One variable's part of a step, for `apply`; ValueError for others."""
        distribution_of(self).check_update(variable)
        super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """`apply` without side effects, for Keras's trainer on JAX; LossScaleOptimizer's does not call `apply`."""
        original = super().stateless_apply  # type: ignore[misc]

        def apply(reduced: list[Any]) -> Any:
            return original(optimizer_variables, reduced, trainable_variables)

        return distribution_of(self).stateless_apply(
            self, optimizer_variables, grads, trainable_variables, apply, loss_scaled=hasattr(self, "dynamic_scale")
        )


def distribute_keras3(
    optimizer: Any,
    reduction: Reduction,
    passes: int,
    average: bool,
    backend: Any,
    name: str | None,
    made: Made | None = None,
) -> Any:
    """The optimizer, distributed, and the one in a LossScaleOptimizer. Raises ValueError and what a Reduction does."""
    _install_loss_scale()
    _install_jit()
    distribution = Distribution(reduction, passes, average, backend, made)
    found = distribute(optimizer, distribution, _DistributedOptimizer, name)
    if getattr(found, "_hvd", None) is distribution and (inner := getattr(found, "inner_optimizer", None)) is not None:
        # A training step of the script's own may use the inner one. What the outer one has reduced, it takes as it is.
        distribute(inner, distribution, _DistributedOptimizer, None)
    return found


def _install_loss_scale() -> None:
    """Mixed precision: all ranks skip the same steps. Replaces two methods of LossScaleOptimizer, once.

    Under the policy mixed_float16, compile() puts a LossScaleOptimizer around the user's. It applies gradients only if
    they are finite on this rank; one with an infinity would skip the step and its collectives, for which all others
    wait. So gradients are reduced before it looks: then they are equal on all ranks, and infinite on all or none. The
    wrapper is made by Keras where no hook of ours is called, hence its methods `apply` and, for JAX, `stateless_apply`
    are replaced; for optimizers that are not distributed nothing changes (docs/adr/0051).
    """
    from keras.optimizers import LossScaleOptimizer

    original, original_stateless = LossScaleOptimizer.apply, LossScaleOptimizer.stateless_apply
    if hasattr(original, _REDUCES_BEFORE):
        return

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        distribution = getattr(self.inner_optimizer, "_hvd", None)
        if distribution is None:
            original(self, grads, trainable_variables)
            return

        def apply_reduced(reduced: Any, trainable_variables: Any = None) -> None:
            original(self, reduced, trainable_variables)

        distribution.apply(self, grads, trainable_variables, apply_reduced, loss_scaled=True)

    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        distribution = getattr(self.inner_optimizer, "_hvd", None)
        if distribution is None:
            return original_stateless(self, optimizer_variables, grads, trainable_variables)

        def apply_reduced(reduced: Any) -> Any:
            return original_stateless(self, optimizer_variables, reduced, trainable_variables)

        return distribution.stateless_apply(
            self, optimizer_variables, grads, trainable_variables, apply_reduced, loss_scaled=True
        )

    setattr(apply, _REDUCES_BEFORE, True)
    LossScaleOptimizer.apply = apply
    LossScaleOptimizer.stateless_apply = stateless_apply


def _install_jit() -> None:
    """jit_compile="auto" with a GPU: not for models whose gradients we reduce. Replaces model_supports_jit, once.

    With a GPU "auto" means XLA, which compiles the step for the GPU, where our operations are not (docs/adr/0049).
    Keras decides in compile() by `model_supports_jit`, which no optimizer is asked by; hence it is replaced, on
    TensorFlow. On machines without a GPU, and for optimizers that are not distributed, its answer stays what it was.
    """
    import keras
    from keras.src.trainers import trainer

    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    original = getattr(trainer, "model_supports_jit", None)
    if original is None or hasattr(original, _ASKS_THE_OPTIMIZER):
        return  # a Keras without it may choose XLA, which says which operation it can't compile

    def model_supports_jit(model: Any) -> bool:
        if is_distributed(getattr(model, "optimizer", None)) and tf.config.list_physical_devices("GPU"):
            return False
        return bool(original(model))

    setattr(model_supports_jit, _ASKS_THE_OPTIMIZER, True)
    trainer.model_supports_jit = model_supports_jit
