"""Columns as a model of Keras takes them, and what predicts with them in the executors.

A model may name its inputs or outputs: Model({"a": a, "b": b}, ...). Then a column belongs to the one of its name, and
the order of the columns says nothing: Keras sorts the names.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from horovod.base.errors import TrainingCode
from horovod.spark.common.columns import Shape, of_row
from horovod.spark.common.params import refused
from horovod.spark.keras.util import SavedModel, import_keras


def tensors_of(model: Any, which: str, columns: Sequence[str]) -> list[Any]:
    """The model's inputs or outputs, in the order of the columns; [] if it has none before it has seen data.

    which: "input" or "output".

    Raises:
        ValueError: they have names, and these are not those of the columns.
    """
    names = _names(model, which)
    if names is None:
        return list(getattr(model, f"{which}s", None) or ())
    tensors = getattr(model, which)
    return [tensors[name] for name in _in_order(names, columns, which)]


def _names(model: Any, which: str) -> list[str] | None:
    """None where they have an order instead."""
    try:
        found = getattr(model, which)
    except (AttributeError, ValueError, RuntimeError):  # a model that is not made of layers alone
        return None
    return list(found) if isinstance(found, Mapping) else None


def _in_order(names: Sequence[str], columns: Sequence[str], which: str) -> list[str]:
    """The names of the columns' inputs or outputs. A single one may have any name."""
    if len(names) == len(columns) == 1:
        return list(names)
    if set(names) != set(columns):
        raise refused(
            f"the model's {which}s are named {', '.join(sorted(names))}, and the columns {', '.join(columns)}: name "
            f"them as the columns, or make the model of a list of {which}s, in the order of the columns.",
            TrainingCode.CONTRADICTORY_ARGUMENTS,
        )
    return list(columns)


def inputs_for(model: Any, arrays: Sequence[np.ndarray], columns: Sequence[str]) -> Any:
    """The inputs, with the shapes and types that the model asks for; one input without a list."""
    wanted = tensors_of(model, "input", columns)
    if len(wanted) == len(arrays):
        arrays = [_shaped(array, tuple(one.shape), type_of(one)) for array, one in zip(arrays, wanted, strict=True)]
    else:
        arrays = [_shaped(array, None, "float32") for array in arrays]
    return _joined(model, "input", arrays, columns)


def labels_for(model: Any, arrays: Sequence[np.ndarray], columns: Sequence[str], shapes: Sequence[Shape] | None) -> Any:
    """The labels, with the shapes that label_shapes says, or else those of the outputs."""
    given: Sequence[Shape | None] | None = shapes
    if given is None:
        outputs = tensors_of(model, "output", columns)
        given = [tuple(one.shape) for one in outputs] if len(outputs) == len(arrays) else [None] * len(arrays)
    found = [_shaped(array, shape, "float32") for array, shape in zip(arrays, given, strict=True)]
    return _joined(model, "output", found, columns)


def weights_for(model: Any, weights: np.ndarray, columns: Sequence[str]) -> Any:
    """The weights of rows, once for each label."""
    return _joined(model, "output", [weights] * len(columns), columns)


def _joined(model: Any, which: str, arrays: Sequence[Any], columns: Sequence[str]) -> Any:
    names = _names(model, which)
    if names is not None:
        return dict(zip(_in_order(names, columns, which), arrays, strict=True))
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _shaped(array: np.ndarray, shape: Shape | None, dtype: str) -> Any:
    """Floating numbers get the type; whole ones only where a shape with numbers of that type is asked for. Text becomes
    a tensor of TensorFlow, the only backend that has text.
    """
    if dtype == "string" and array.dtype == object:
        return importlib.import_module("tensorflow").constant(array.tolist(), shape=array.shape)
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


def predictions_of(outputs: Any, columns: Sequence[str]) -> list[np.ndarray]:
    """The outputs of a model, as one array for each label."""
    if isinstance(outputs, Mapping):
        outputs = [outputs[name] for name in _in_order(list(outputs), columns, "output")]
    return [_known(np.asarray(one)) for one in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]


def _known(array: np.ndarray) -> np.ndarray:
    """The array with a type that Arrow casts, too. NumPy has no bfloat16, and sees no fraction in its numbers."""
    return array.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else array


class KerasPredictor:
    """Predicts batches; its model is made where it is first used."""

    def __init__(self, saved: SavedModel, features: Sequence[str], labels: Sequence[str]) -> None:
        self._features = features
        self._labels = labels
        self._pickled = cloudpickle.dumps(saved)  # Spark's own pickling knows less of classes that it is to take along
        self._keras_backend = import_keras(saved.package).backend.backend() if saved.package == "keras" else None
        self._model: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __call__(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        if self._model is None:
            if self._keras_backend is not None:
                os.environ.setdefault("KERAS_BACKEND", self._keras_backend)
            self._model = pickle.loads(self._pickled).load()  # noqa: S301 - the user's own model
        found = self._model.predict_on_batch(inputs_for(self._model, arrays, self._features))
        return predictions_of(found, self._labels)


def predict_row(features: Sequence[str], labels: Sequence[str]) -> Callable[[Any, Any], list[np.ndarray]]:
    """A function (model, row)."""

    def predict(model: Any, row: Any) -> list[np.ndarray]:
        values = [row[name] for name in features]
        arrays = [np.asarray([one.toArray() if hasattr(one, "toArray") else one]) for one in values]
        found = model.predict_on_batch(inputs_for(model, arrays, features))
        return [one[0] for one in predictions_of(found, labels)]

    return predict
