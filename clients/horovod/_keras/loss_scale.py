"""Mixed precision with Keras 3: all ranks skip the same steps.

Under the policy mixed_float16, compile() puts a LossScaleOptimizer around the user's. It applies gradients only if they
are finite on this rank; one with an infinity would skip the step and its collectives, for which all others wait. So
gradients are reduced before it looks: then they are equal on all ranks, and infinite on all or none. The wrapper is
made by Keras where no hook of ours is called, hence its methods `apply` and, for JAX, `stateless_apply` are replaced,
once; for optimizers that are not distributed nothing changes (docs/adr/0051).
"""

from __future__ import annotations

from typing import Any

_MARK = "_hvd_reduces_before"


def install() -> None:
    """Replaces the two methods of LossScaleOptimizer in the Keras that is imported."""
    from keras.optimizers import LossScaleOptimizer

    original, original_stateless = LossScaleOptimizer.apply, LossScaleOptimizer.stateless_apply
    if hasattr(original, _MARK):
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

    setattr(apply, _MARK, True)
    LossScaleOptimizer.apply = apply
    LossScaleOptimizer.stateless_apply = stateless_apply
