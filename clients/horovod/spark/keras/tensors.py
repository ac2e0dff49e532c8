"""Columns as a model of Keras takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.spark.common.shapes import Shape, of_row


def inputs_for(model: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The inputs, with the shapes and types that the model asks for; one input without a list."""
    wanted = getattr(model, "inputs", None)
    if wanted and len(wanted) == len(arrays):
        arrays = [_shaped(array, tuple(one.shape), type_of(one)) for array, one in zip(arrays, wanted, strict=True)]
    else:
        arrays = [_shaped(array, None, "float32") for array in arrays]
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def labels_for(model: Any, arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None) -> Any:
    """The labels, with the shapes that label_shapes says, or else those of the outputs."""
    given: Sequence[Shape | None] | None = shapes
    if given is None:
        outputs = getattr(model, "outputs", None) or ()
        given = [tuple(one.shape) for one in outputs] if len(outputs) == len(arrays) else [None] * len(arrays)
    found = [_shaped(array, shape, "float32") for array, shape in zip(arrays, given, strict=True)]
    return found[0] if len(found) == 1 else tuple(found)


def _shaped(array: np.ndarray, shape: Shape | None, dtype: str) -> np.ndarray:
    """Floating numbers get the type; whole ones only where a shape with numbers of that type is asked for."""
    if array.dtype.kind == "f" or (shape is not None and array.dtype.kind in "iub" and dtype.startswith("float")):
        array = array.astype(dtype)
    if shape is None:
        return array
    dimensions = of_row(shape)
    fits = len(dimensions) == len(shape) - 1 or None not in shape[1:]
    if fits and int(np.prod(dimensions)) == int(np.prod(array.shape[1:])):
        return array.reshape(len(array), *dimensions)
    return array


def type_of(tensor: Any) -> str:
    """The name of its dtype, in either Keras."""
    dtype = tensor.dtype
    return dtype if isinstance(dtype, str) else dtype.name


def as_list(outputs: Any) -> list[Any]:
    """What a model returns, as one array for each label."""
    if isinstance(outputs, dict):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
