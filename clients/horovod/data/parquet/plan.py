"""Which rows a rank reads, and in which order. Pure: it knows only how many rows each row group has.

All rows of the data set are counted through, row group after row group. Of N rows, rank r of n owns those from
N*r//n to N*(r+1)//n: every row belongs to one rank, and no two ranks differ by more than one row, whatever the row
groups are. A rank decodes each row group that it owns rows of once in a pass, and at most two of them (the first and
the last) for only a part of their rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """The rows from `start` to `stop` of a row group; `group` is its index in the data set."""

    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def rows_of(total: int, rank: int, size: int) -> range:
    """The rows that `rank` of `size` owns.

    >>> [rows_of(10, rank, 3) for rank in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    return range(total * rank // size, total * (rank + 1) // size)


def pieces_of(group_rows: Sequence[int], rank: int, size: int) -> list[Piece]:
    """The pieces of the row groups, which have so many rows each, that `rank` of `size` owns; none is empty.

    >>> pieces_of([4, 0, 6], rank=0, size=2)
    [Piece(group=0, start=0, stop=4), Piece(group=2, start=0, stop=1)]
    """
    owned = rows_of(sum(group_rows), rank, size)
    pieces, first = [], 0
    for group, rows in enumerate(group_rows):
        start, stop = max(owned.start - first, 0), min(owned.stop - first, rows)
        if start < stop:
            pieces.append(Piece(group, start, stop))
        first += rows
    return pieces


class Window(NamedTuple):
    """Pieces whose rows are joined, and shuffled together: window `place` of pass `number` over a rank's rows."""

    number: int
    place: int
    pieces: tuple[Piece, ...]
    rows: int


class Order:
    """The order of a rank's pieces and rows, a function of seed, epoch and the place in the epoch alone.

    An epoch has one pass over the rows, or several where the reader repeats them. So a run that begins again somewhere
    gets the batches that it would have got without the interruption, and what it skips need not be read.

    Args:
        pieces: those of the rank.
        window_rows: how many rows a window has at least, unless its pass has no more.
    """

    def __init__(self, pieces: Sequence[Piece], window_rows: int, seed: int, epoch: int, shuffles: bool) -> None:
        self._pieces = pieces
        self._window_rows = window_rows
        self._key = (seed, epoch)
        self._shuffles = shuffles

    def windows(self, passes: int | None, skip: int) -> Iterator[tuple[Window, int]]:
        """The windows of so many passes (None: without end), without the first `skip` rows; with each the number of its
        rows that are still to be skipped.
        """
        if not self._pieces:
            return
        first, skip = divmod(skip, sum(piece.rows for piece in self._pieces))
        for number in itertools.count(first) if passes is None else range(first, passes):
            for window in self._of_pass(number):
                if skip < window.rows:
                    yield window, skip
                skip = max(0, skip - window.rows)

    def _of_pass(self, number: int) -> Iterator[Window]:
        places: Iterable[int] = range(len(self._pieces))
        if self._shuffles:
            places = self._generator(number, 0).permutation(len(self._pieces))
        gathered: list[Piece] = []
        rows = window = 0
        for left, place in zip(range(len(self._pieces) - 1, -1, -1), places, strict=True):
            gathered.append(self._pieces[place])
            rows += gathered[-1].rows
            if rows >= self._window_rows or not left:
                yield Window(number, window, tuple(gathered), rows)
                gathered, rows, window = [], 0, window + 1

    def rows(self, window: Window) -> np.ndarray | None:
        """A permutation of the rows of a window; None where they keep their order."""
        return self._generator(window.number, 1, window.place).permutation(window.rows) if self._shuffles else None

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng((*self._key, *key))
