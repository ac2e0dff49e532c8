"""transformation_fn: what a program does to each batch, or to each row, before a model sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from horovod.base.errors import DataCode
from horovod.spark.common.params import refused

Batch = dict[str, np.ndarray]


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

    def __call__(self, batch: Batch) -> Batch:
        changed = self._changed(batch)
        kept = [name for name in changed if name not in self._removed]
        arrays = {str(name): _array(name, changed[name], *self._types.get(name, (None, None))) for name in kept}
        if arrays and not len(next(iter(arrays.values()))):
            raise refused(
                f"transformation_fn has left none of the {len(next(iter(batch.values())))} rows of a batch, and the "
                "mean loss of no row is NaN: filter the DataFrame before fit().",
                DataCode.INVALID_BATCH,
            )
        return arrays

    def _changed(self, batch: Batch) -> dict[Any, Any]:
        if self._function is None:
            return dict(batch)
        if self._takes_rows:
            return self._of_rows(self._function, batch)
        if self._takes_rows is None:
            return self._of_first(self._function, batch)
        return _columns(self._function(_frame(batch)))

    def _of_first(self, function: Callable[[Any], Any], batch: Batch) -> dict[Any, Any]:
        """Finds out what the function takes. If it takes neither, what it raises for the DataFrame is raised."""
        try:
            changed = _columns(function(_frame(batch)))
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


def _frame(batch: Batch) -> Any:
    import pandas as pd

    # Copies, so that a function that fails in the middle has changed nothing.
    return pd.DataFrame(
        {name: array.copy() if array.ndim == 1 else list(array.copy()) for name, array in batch.items()}
    )


def _columns(changed: Any) -> dict[Any, Any]:
    import pandas as pd

    if not isinstance(changed, pd.DataFrame):
        raise _unusable(changed)
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
