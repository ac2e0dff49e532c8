"""From decoded pieces to batches: the pieces of a window are joined, in another order of rows, and cut into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from horovod.data.parquet.columns import Columns


def rows_in(columns: Columns) -> int:
    """How many rows the arrays have."""
    return len(next(iter(columns.values()), ()))


def joined(pieces: Sequence[Columns], order: np.ndarray | None = None) -> Columns:
    """The rows of all pieces, in this order, in new memory."""
    together = {}
    for name in pieces[0]:
        arrays = [piece[name] for piece in pieces]
        if order is None:
            together[name] = np.concatenate(arrays)
        else:
            together[name] = np.take(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), order, axis=0)
    return together


class Batches:
    """Cuts windows into batches of one size. Rows that are left of a window are the first of the next batch."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._left: Columns = {}

    def of(self, window: Columns) -> Iterator[Columns]:
        """The full batches that are there with the rows of `window`."""
        first = 0
        if rows_in(self._left):
            first = min(self._size - rows_in(self._left), rows_in(window))
            self._left = joined([self._left, cut(window, 0, first)])
            if rows_in(self._left) < self._size:
                return
            yield self._left
            self._left = {}
        last = rows_in(window) - (rows_in(window) - first) % self._size
        for start in range(first, last, self._size):
            yield cut(window, start, start + self._size)
        self._left = cut(window, last, rows_in(window))

    def rest(self) -> Iterator[Columns]:
        """The rows that are left, as one smaller batch, if there are any."""
        if rows_in(self._left):
            yield self._left


def cut(columns: Columns, start: int, stop: int) -> Columns:
    """The rows from `start` to `stop`, in the same memory."""
    return {name: array[start:stop] for name, array in columns.items()}
