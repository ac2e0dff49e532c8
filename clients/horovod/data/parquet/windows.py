"""From decoded pieces to batches: pieces are gathered into windows, whose rows are shuffled, and cut into batches.

A window holds whole pieces, as many as it takes to have the rows that were asked for, and has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from horovod.data.parquet.columns import Columns


def rows_in(columns: Columns) -> int:
    """How many rows the arrays have."""
    return len(next(iter(columns.values()), ()))


def windows(pieces: Iterable[Columns], rows: int) -> Iterator[list[Columns]]:
    """The pieces in groups that have `rows` rows or more each, the last perhaps fewer."""
    gathered: list[Columns] = []
    count = 0
    for piece in pieces:
        gathered.append(piece)
        count += rows_in(piece)
        if count >= rows:
            yield gathered
            gathered, count = [], 0
    if gathered:
        yield gathered


def joined(pieces: list[Columns], order: np.ndarray | None = None) -> Columns:
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
            self._left = joined([self._left, _cut(window, 0, first)])
            if rows_in(self._left) < self._size:
                return
            yield self._left
            self._left = {}
        last = rows_in(window) - (rows_in(window) - first) % self._size
        for start in range(first, last, self._size):
            yield _cut(window, start, start + self._size)
        self._left = _cut(window, last, rows_in(window))

    def rest(self) -> Iterator[Columns]:
        """The rows that are left, as one smaller batch, if there are any."""
        if rows_in(self._left):
            yield self._left


def _cut(columns: Columns, start: int, stop: int) -> Columns:
    return {name: array[start:stop] for name, array in columns.items()}
