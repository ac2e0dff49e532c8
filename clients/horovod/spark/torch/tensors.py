"""Columns as tensors, and what predicts with them in the executors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from horovod.base.errors import DataCode, TrainingCode
from horovod.spark.common.columns import Shape, of_row
from horovod.spark.common.params import refused


def inputs_of(
    arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None, dtype: torch.dtype, device: Any = "cpu"
) -> list[torch.Tensor]:
    """Floating numbers get `dtype`; others stay as they are."""
    tensors = []
    for place, array in enumerate(arrays):
        tensor = as_tensor(array)
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if shapes is not None:
            tensor = tensor.reshape(len(tensor), *of_row(shapes[place]))
        tensors.append(tensor.to(device))
    return tensors


def labels_of(
    arrays: Sequence[np.ndarray], shapes: Sequence[Shape] | None, dtype: torch.dtype, device: Any
) -> list[torch.Tensor]:
    """As inputs_of, but whole numbers are int64, which losses of classes ask for."""
    labels = inputs_of(arrays, shapes, dtype, device)
    return [label if label.is_floating_point() or label.dtype == torch.bool else label.long() for label in labels]


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor. ValueError if it holds no numbers."""
    if array.dtype.kind not in "biufc":
        raise refused(
            f"a column has values of the type {array.dtype}, of which no tensor can be made: let transformation_fn "
            "make numbers of them.",
            DataCode.UNSUPPORTED_COLUMN,
        )
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())


def floating_type(model: torch.nn.Module) -> torch.dtype:
    """The type of the model's parameters."""
    found = (one.dtype for one in model.parameters() if one.is_floating_point())
    return next(found, torch.get_default_dtype())


def as_list(outputs: Any) -> list[torch.Tensor]:
    """The outputs of a model as a list of tensors. ValueError for a dict: its entries have no known order of labels."""
    found = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    for one in found:
        if not isinstance(one, torch.Tensor):
            raise refused(
                f"the model returns {type(one).__name__}, of which no prediction can be made: its forward() must "
                "return a tensor for each label, in the order of label_cols.",
                TrainingCode.CONTRADICTORY_ARGUMENTS,
            )
    return found


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """On the CPU, with a type that NumPy has and Arrow casts."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


def number(value: Any, what: str) -> float:
    """The value of a tensor with one number, or of a number. ValueError for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, (bool, int, float, np.number)) or (isinstance(value, np.ndarray) and value.size == 1):
        return float(value.item() if isinstance(value, np.ndarray) else value)
    found = f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise refused(f"{what} must return one number for a batch, such as the mean over its rows, not {found}.")


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
