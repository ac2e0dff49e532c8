"""Layers whose weights are each rank's own."""

from __future__ import annotations

from typing import Any

from horovod.base.errors import TrainingCode, coded


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
