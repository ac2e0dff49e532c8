"""The variables of a model and its optimizer, of whichever Keras."""

from __future__ import annotations

from typing import Any

from horovod.common.gradients import identity


def build_optimizer(optimizer: Any, model: Any) -> None:
    """Makes the variables of the optimizer, if it has none yet; the model must have its own."""
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)
        optimizer.built = True


def state_of(model: Any, optimizer: Any) -> list[Any]:
    """All variables that training changes; the optimizer may be None."""
    if optimizer is None:
        return list(model.weights)
    of_optimizer = optimizer.variables
    variables = [*model.weights, *(of_optimizer() if callable(of_optimizer) else of_optimizer)]
    # Keras 3 has it among the optimizer's variables, unless it is a schedule.
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "learning_rate", None)
    if hasattr(rate, "assign") and identity(rate) not in {identity(one) for one in variables}:
        variables.append(rate)
    return variables
