"""What predicts in the executors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod.spark.common.shapes import Shape
from horovod.spark.torch.tensors import as_array, as_list, floating_type, inputs_of


class TorchPredictor:
    """Predicts batches; its model is made where it is first used."""

    def __init__(self, pickled: bytes, input_shapes: Sequence[Shape] | None) -> None:
        self._pickled = pickled
        self._input_shapes = input_shapes
        self._model: torch.nn.Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __call__(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        if self._model is None:
            self._model = pickle.loads(self._pickled).eval()  # noqa: S301 - the user's own model
        with torch.no_grad():
            outputs = self._model(*inputs_of(arrays, self._input_shapes, floating_type(self._model)))
        return [as_array(output) for output in as_list(outputs)]


def predict_row(
    features: Sequence[str], input_shapes: Sequence[Shape] | None
) -> Callable[[Any, Any], list[torch.Tensor]]:
    """A function (model, row)."""

    def predict(model: Any, row: Any) -> list[torch.Tensor]:
        arrays = [np.asarray([_plain(row[name])]) for name in features]
        with torch.no_grad():
            return as_list(model(*inputs_of(arrays, input_shapes, floating_type(model))))

    return predict


def _plain(value: Any) -> Any:
    return value.toArray() if hasattr(value, "toArray") else value
