"""Which rows a rank reads, and in which order. Pure: it knows only how many rows each row group has.

All rows of the data set are counted through, row group after row group. Of N rows, rank r of n owns those from
N*r//n to N*(r+1)//n: every row belongs to one rank, and no two ranks differ by more than one row, whatever the row
groups are. A rank decodes each row group that it owns rows of once in a pass, and at most two of them (the first and
the last) for only a part of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """The rows from `start` to `stop` of a row group; `group` is its index in the data set."""

    group: int
    start: int
    stop: int


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


class Order:
    """The order of a rank's pieces and rows in passes over them, a function of seed, epoch and the pass alone.

    An epoch has one pass, or several where the reader repeats its rows. So a run that begins again at an epoch gets the
    batches that it would have got without the interruption.
    """

    def __init__(self, pieces: Sequence[Piece], seed: int, epoch: int, shuffles: bool) -> None:
        self._pieces = pieces
        self._key = (seed, epoch)
        self._shuffles = shuffles

    def pieces(self, number: int) -> Iterator[Piece]:
        """The pieces in the order of pass `number`."""
        if not self._shuffles:
            return iter(self._pieces)
        return (self._pieces[place] for place in self._generator(number, 0).permutation(len(self._pieces)))

    def rows(self, number: int, window: int, rows: int) -> np.ndarray | None:
        """A permutation of the `rows` of a window of pass `number`; None where they keep their order."""
        return self._generator(number, 1, window).permutation(rows) if self._shuffles else None

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng((*self._key, *key))
