"""The variables of a model and its optimizer, of whichever Keras."""

from __future__ import annotations

import sys
from typing import Any, Final

from horovod.base.errors import TrainingCode, coded
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
    return [*model.weights, *([] if optimizer is None else _state_of_optimizer(optimizer))]


def _state_of_optimizer(optimizer: Any) -> list[Any]:
    of_optimizer = optimizer.variables
    variables = list(of_optimizer() if callable(of_optimizer) else of_optimizer)
    # Keras 3 has it among the optimizer's variables, unless it is a schedule.
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "learning_rate", None)
    if hasattr(rate, "assign") and identity(rate) not in {identity(one) for one in variables}:
        variables.append(rate)
    return variables


_CLASSES: Final = {
    "layer": ("layers.Layer",),
    "optimizer": ("optimizers.Optimizer", "optimizers.legacy.Optimizer"),
    "metric": ("metrics.Metric",),
    "variable": ("Variable",),
    "module": ("Module",),
    "generator": ("random.SeedGenerator", "random.Generator"),
}


def kind_of(value: Any) -> str | None:
    """Which kind of part of a training a value is, of any Keras or TensorFlow that is imported; None if it is none."""
    return next((kind for kind in _CLASSES if isinstance(value, classes_of(kind))), None)


def classes_of(kind: str) -> tuple[type, ...]:
    """The classes of this kind of parts, of any Keras or TensorFlow that is imported."""
    found = (_found(module, path) for module in ("keras", "tf_keras", "tensorflow") for path in _CLASSES[kind])
    return tuple(one for one in found if isinstance(one, type))


def _found(module: str, path: str) -> Any:
    if module == "tensorflow" and path.startswith(("layers", "optimizers", "metrics")):
        return None  # the objects are of one of the two Keras packages, and a test of the other would import it
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def variables_of(part: Any, kind: str, path: str) -> list[Any]:
    """The variables of a part that training changes. ValueError where it has none yet but will; `path` names it."""
    if kind == "layer":
        optimizer = getattr(part, "optimizer", None)
        if hasattr(part, "fit"):  # a model
            _check_is_built(part.built, path, "model.build(input_shape), or it with a batch")
        if optimizer is not None:
            build_optimizer(optimizer, part)
        return state_of(part, optimizer)
    if kind == "optimizer":
        if not hasattr(part, "_create_all_weights"):
            is_built = getattr(part, "_built", False) or getattr(part, "built", False)
            _check_is_built(is_built, path, "optimizer.build(model.trainable_variables)")
        return _state_of_optimizer(part)
    if kind == "variable":
        return [part]
    return [part.state] if kind == "generator" else list(part.variables)


def _check_is_built(is_built: bool, path: str, remedy: str) -> None:
    if not is_built:
        sentence = f"{path} of an elastic state must be built first, so that it has variables to keep: call {remedy}."
        raise ValueError(coded(TrainingCode.NOT_BUILT, sentence))


def weights_of(local_layers: Any) -> list[Any]:
    """The trainable weights of a layer or several, or ValueError."""
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, list | tuple | set) else [layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(
                coded(
                    TrainingCode.INVALID_ARGUMENT,
                    f"local_layers must be a Keras layer or a list of them, not {type(layer).__name__}.",
                )
            )
    return [variable for layer in layers for variable in layer.trainable_weights]
