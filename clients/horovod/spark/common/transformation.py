"""transformation_fn: a program's own change of each batch, or of each row, before a model sees it, in training and for
predictions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from horovod.base.errors import DataCode, code_of, without_code
from horovod.spark.common.params import refused

Batch = dict[str, np.ndarray]
# How a column of a batch looks: its NumPy type, "str" or "bytes", and the shape of a row.
Look = tuple[str, tuple[int, ...]]


class Transformation:
    """The user's transformation_fn, and the types and shapes that the user declares for the columns of its results.

    The function makes of a batch, a pandas DataFrame, another one; or of a row, a dict, another one: programs have both
    kinds. The first batch tells: a function that can't take it, or makes no DataFrame of it, is called with its rows.

    function: None: only columns are removed. edited: (name, NumPy type, shape of a row, whether nullable) for columns
    that are to have this type and shape. removed: columns that are left out.
    """

    def __init__(
        self,
        function: Callable[[Any], Any] | None,
        edited: Sequence[tuple[Any, ...]] | None,
        removed: Sequence[str] | None,
    ) -> None:
        self._function = function
        self._types = {field[0]: (field[1], field[2]) for field in edited or ()}
        self._removed = set(removed or ())
        self._takes_rows: bool | None = None
        self.seen: dict[str, Look] = {}  # how the columns of the first batch looked, before they were changed

    def __call__(self, batch: Batch) -> Batch:
        self.seen = self.seen or {name: _look(array) for name, array in batch.items()}
        arrays = self._arrays(self._changed(batch))
        if arrays and not len(next(iter(arrays.values()))):
            raise refused(
                f"transformation_fn has left none of the {len(next(iter(batch.values())))} rows of a batch, and the "
                "mean loss of no row is NaN: filter the DataFrame before fit().",
                DataCode.INVALID_BATCH,
            )
        return arrays

    def row_by_row(self, batch: Batch) -> Batch:
        """Transforms a batch to predict, in which each row of the result belongs to the row of `batch` in its place.

        Raises:
            ValueError: the function has dropped or added rows.
        """
        rows = len(next(iter(batch.values())))
        arrays = self._arrays(self._changed(batch, in_order=True))
        if unlike := next((name for name, array in arrays.items() if len(array) != rows), None):
            raise refused(
                f"transformation_fn has made {len(arrays[unlike])} rows of {rows}: transform() predicts each row of "
                "the DataFrame, so there the function may drop and add none.",
                DataCode.INVALID_BATCH,
            )
        return arrays

    def _arrays(self, changed: Mapping[Any, Any]) -> Batch:
        kept = [name for name in changed if name not in self._removed]
        return {str(name): _array(name, changed[name], *self._types.get(name, (None, None))) for name in kept}

    def _changed(self, batch: Batch, in_order: bool = False) -> dict[Any, Any]:
        if self._function is None:
            return dict(batch)
        if self._takes_rows:
            return self._of_rows(self._function, batch)
        if self._takes_rows is None:
            return self._of_first(self._function, batch, in_order)
        return _columns(self._function(_frame(batch)), in_order)

    def _of_first(self, function: Callable[[Any], Any], batch: Batch, in_order: bool) -> dict[Any, Any]:
        """Finds out whether the function takes batches or rows. If it takes neither, raises its error for the batch."""
        try:
            changed = _columns(function(_frame(batch)), in_order)
            self._takes_rows = False
        except Exception as of_batch:
            try:
                changed = self._of_rows(function, batch)
            except Exception as of_row:
                raise of_batch from of_row
            self._takes_rows = True
        return changed

    def _of_rows(self, function: Callable[[Any], Any], batch: Batch) -> dict[Any, Any]:
        rows = []
        for place in range(len(next(iter(batch.values())))):
            row = function({name: array[place] for name, array in batch.items()})
            if not isinstance(row, Mapping):
                raise _unusable(row)
            rows.append(row)
        return {name: [row[name] for row in rows] for name in rows[0]}


class TransformedPredictor:
    """Predicts batches by a model that was trained with a transformation_fn: the function first, and then the model.

    Labels and weights, which the function has got in training, are not there to predict with, and a prediction must not
    depend on them. So it gets columns of ones, or of "" for text, in their place, and their results are left out.
    """

    def __init__(
        self,
        predict: Callable[[list[np.ndarray]], list[np.ndarray]],
        transformation: Transformation,
        features: Sequence[str],
        looks: Mapping[str, Look],
        times: Sequence[str] = (),
    ) -> None:
        """looks: how columns looked in training, `Transformation.seen`; those that are no features are made up.
        times: features that come as microseconds since 1970.
        """
        self._predict = predict
        self._pickled = cloudpickle.dumps(transformation)  # for the reason that KerasPredictor gives
        self._features = list(features)
        self._looks = dict(looks)
        self._times = set(times)
        self._transformation: Transformation | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_transformation": None}

    def __call__(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        if self._transformation is None:
            self._transformation = pickle.loads(self._pickled)  # noqa: S301 - the user's own function
        batch = {name: self._as_in_training(name, array) for name, array in zip(self._features, arrays, strict=True)}
        others = {name: look for name, look in self._looks.items() if name not in batch}
        rows = len(arrays[0])
        batch |= {name: _made_up(rows, look) for name, look in others.items()}
        try:
            changed = self._transformation.row_by_row(batch)
        except Exception as error:
            raise refused(self._failed(error, list(others)), code_of(error) or DataCode.INVALID_BATCH) from error
        return self._predict(columns_of(changed, self._features))

    def _as_in_training(self, name: str, array: np.ndarray) -> np.ndarray:
        if name in self._times:
            array = array.astype("M8[us]")
        look, _ = self._looks.get(name, (array.dtype.str, ()))
        if look in ("str", "bytes") or look == array.dtype.str:
            return array
        fits = np.dtype(look).kind == "M" or np.can_cast(array.dtype, look, "safe")
        return array.astype(look) if fits else array

    def _failed(self, error: Exception, made_up: list[str]) -> str:
        said = f"transformation_fn fails in transform(): {type(error).__name__}: {without_code(error).rstrip('.')}."
        if made_up:
            said += f" There {', '.join(map(repr, made_up))} have ones in them, or empty texts, as nobody knows labels."
        return said + " model.setTransformationFn() sets a function for predictions, or None for rows that are changed."


def nullable_of(edited: Sequence[tuple[Any, ...]] | None) -> set[str]:
    """The columns that transformation_edit_fields, (name, type, shape, whether nullable), says to be nullable."""
    return {field[0] for field in edited or () if len(field) > 3 and field[3]}


def columns_of(batch: Batch, names: Sequence[str]) -> list[np.ndarray]:
    """These columns of a batch. ValueError if a transformation_fn has not left one of them."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise refused(
            f"transformation_fn has left no column {', '.join(map(repr, missing))} in a batch, but {list(batch)}.",
            DataCode.MISSING_COLUMN,
        )
    return [batch[name] for name in names]


def _look(array: np.ndarray) -> Look:
    if array.dtype == object:
        return "bytes" if len(array) and isinstance(array[0], bytes) else "str", array.shape[1:]
    return array.dtype.str, array.shape[1:]


def _made_up(rows: int, look: Look) -> np.ndarray:
    kind, shape = look
    if kind in ("str", "bytes"):
        return np.full((rows, *shape), "" if kind == "str" else b"", dtype=object)
    return np.ones((rows, *shape), dtype=kind)


def _frame(batch: Batch) -> Any:
    import pandas as pd

    # Copies, so that a function that fails in the middle has changed nothing.
    return pd.DataFrame(
        {name: array.copy() if array.ndim == 1 else list(array.copy()) for name, array in batch.items()}
    )


def _columns(changed: Any, in_order: bool) -> dict[Any, Any]:
    """in_order: rows that the function has sorted come back to the places that the index of the frame tells."""
    import pandas as pd

    if not isinstance(changed, pd.DataFrame):
        raise _unusable(changed)
    places = range(len(changed))
    if in_order and list(changed.index) != list(places) and set(changed.index) == set(places):
        changed = changed.loc[list(places)]
    return {name: changed[name].to_numpy() for name in changed.columns}


def _unusable(found: Any) -> ValueError:
    return refused(
        f"transformation_fn must make a DataFrame of a batch, or a dict of a row, not {type(found).__name__}.",
        DataCode.INVALID_BATCH,
    )


def _array(name: Any, values: Any, dtype: Any, shape: Sequence[int | None] | None) -> np.ndarray:
    if not isinstance(values, np.ndarray) or values.dtype == object:
        arrays = [np.asarray(value) for value in values]
        if len(shapes := {array.shape for array in arrays}) > 1:
            raise refused(
                f"transformation_fn made values of the shapes {sorted(shapes)} in the column {name!r}: rows of a batch "
                "must have one shape.",
                DataCode.DIFFERENT_SHAPES,
            )
        is_text = bool(arrays) and arrays[0].dtype.kind in "US"
        values = np.array(list(values), dtype=object) if is_text else np.stack(arrays) if arrays else np.empty(0)
    if dtype is not None:
        values = values.astype(dtype)
    if shape:
        values = values.reshape(len(values), *(-1 if dimension is None else dimension for dimension in shape))
    return values
