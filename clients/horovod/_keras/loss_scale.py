"""Mixed precision with Keras 3: all ranks skip the same steps.

Under the policy mixed_float16, compile() puts a LossScaleOptimizer around the user's. It applies gradients only if they
are finite on this rank; one with an infinity would skip the step and its collectives, for which all others wait. So
gradients are reduced before it looks: then they are equal on all ranks, and infinite on all or none. The wrapper is
made by Keras where no hook of ours is called, hence its method `apply` is replaced, once; for optimizers that are not
distributed nothing changes (docs/adr/0051).
"""

from __future__ import annotations

from typing import Any

_MARK = "_hvd_reduces_before"


def install() -> None:
    """Replaces LossScaleOptimizer.apply in the Keras that is imported."""
    from keras.optimizers import LossScaleOptimizer

    original = LossScaleOptimizer.apply
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

    setattr(apply, _MARK, True)
    LossScaleOptimizer.apply = apply
