"""A Keras 3 optimizer that reduces gradients over the ranks before it applies them.

Keras's trainers, whatever the backend and however they run a step, end in `optimizer.apply(gradients, variables)`, or
on JAX in `stateless_apply`. The subclass of the user's optimizer (optimizer.py) reduces there (docs/adr/0051).
"""

from __future__ import annotations

from typing import Any

from horovod._keras import jit, loss_scale
from horovod._keras.optimizer import Distribution, distribute, distribution_of
from horovod.common.gradients import Reduction
from horovod.common.optimizer_numbers import Made


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
    loss_scale.install()
    jit.install()
    distribution = Distribution(reduction, passes, average, backend, made)
    found = distribute(optimizer, distribution, _DistributedOptimizer, name)
    if getattr(found, "_hvd", None) is distribution and (inner := getattr(found, "inner_optimizer", None)) is not None:
        # A training step of the script's own may use the inner one. What the outer one has reduced, it takes as it is.
        distribute(inner, distribution, _DistributedOptimizer, None)
    return found
