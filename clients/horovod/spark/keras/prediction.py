"""What predicts in the executors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from horovod.spark.keras.files import SavedModel, import_keras
from horovod.spark.keras.tensors import inputs_for, predictions_of


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
