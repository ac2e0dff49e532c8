"""ParquetReader: a rank's rows of a Parquet data set, as batches of NumPy arrays."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from horovod.base.errors import DataCode, TrainingCode, coded
from horovod.data.data_loader_base import BaseDataLoader
from horovod.data.parquet.columns import Batches, Columns, Shapes, check_types, cut, joined, to_columns
from horovod.data.parquet.plan import Order, Piece, pieces_of
from horovod.data.parquet.row_groups import RowGroup, RowGroups, threads


class ParquetReader(BaseDataLoader):
    """The rows of a Parquet data set that belong to one rank, in batches: dicts of NumPy arrays by column name.

        >>> reader = ParquetReader("s3://bucket/train", ["x", "y"], batch_size=64, rank=hvd.rank(), size=hvd.size())
        >>> for epoch in range(10):
        ...     for batch in reader:  # each epoch in another order
        ...         step(torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"]))

    Of N rows rank r of n owns those from N*r//n to N*(r+1)//n: each row has one rank, and ranks differ by one row at
    most, whatever files and row groups there are. A rank reads the row groups that it owns rows of, and no others.
    A rank without rows has no batches. It needs pyarrow and fsspec, and neither Spark nor a world.

    A batch has arrays of shape (rows,) for numbers, booleans, dates and text (objects of str or bytes), (rows, length)
    for lists of one length, (rows, size) for vectors of Spark ML, and (rows, height, width) for lists of lists. Types
    are those of the file; decimals become float64. The arrays are the caller's, to write to and to keep.

    Order: row groups, then the rows of a window, are shuffled by `seed` and the epoch. Each iteration is an epoch,
    counted from 0; `set_epoch(epoch)` says which one comes next, so that a training that is resumed gets the batches
    that it would have got. Iterations may run at the same time.

    Args:
        path: a file, a folder of files, or a list of files; paths or URLs of fsspec (s3, gs, abfs, hdfs, memory, ...).
        columns: the columns to read. None: all.
        batch_size: rows of a batch. The last one of an iteration may have fewer.
        rank, size: read the share of rank `rank` out of `size` ranks.
        shuffle: False: the rows come in the order in which they are stored.
        shuffle_rows: the least number of rows among which a row is shuffled, if there are so many; row groups stay
            whole. The reader holds these rows in memory, plus up to two row groups for each of its threads.
        seed: determines the order; give the same seed on all ranks.
        epochs: how often an iteration goes over the rows; None: without end, in full batches. Passes after the
            first have different orders, and a batch may have the last rows of one pass and the first of the next.
        drop_last: leave out the last batch of an iteration if it is not full.
        transformation_fn: called with each batch, returns the one to use instead: a dict of arrays, too.
        workers: threads that read and decode ahead. 0: the iteration does it by itself.
        cache: keep the decoded rows of this rank in memory, so that they are read once.
        sparse: for each column that holds lists [n, n indices, n values, zeros], the size of the dense rows to make.
        filesystem: an fsspec file system to find `path` on, in place of the one that its URL names.
        storage_options: arguments for the file system, such as credentials.

    Raises:
        ValueError: a column that is not there or has a type without arrays; in an iteration a null, or lists of unlike
            lengths. The sentence names the column, the file and the row.
        OSError: files that are not there or can't be read, or whose service is silent: by a thread that reads ahead one
            row group is awaited for five minutes, and a second for each MB of it.
        ImportError: the package of a file system is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str],
        columns: Sequence[str] | None = None,
        *,
        batch_size: int = 32,
        rank: int = 0,
        size: int = 1,
        shuffle: bool = True,
        shuffle_rows: int = 10_000,
        seed: int = 0,
        epochs: int | None = 1,
        drop_last: bool = False,
        transformation_fn: Callable[[Columns], Columns] | None = None,
        workers: int = 2,
        cache: bool = False,
        sparse: Mapping[str, int] | None = None,
        filesystem: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("size", size, 1), ("workers", workers, 0)):
            _check_number(name, value, least)
        for name, value in (("rank", rank), ("seed", seed), ("shuffle_rows", shuffle_rows)):
            _check_number(name, value, 0)
        if epochs is not None:
            _check_number("epochs", epochs, 0)
        if isinstance(columns, str):
            raise _invalid(f"columns must be a list of names, such as [{columns!r}], not a name")
        if rank >= size:
            raise _invalid(f"rank must be below size, which is {size}, not {rank}")
        self.batch_size = batch_size
        self.epochs = epochs
        self.epoch = 0
        self._skip = 0  # batches of that epoch to leave out
        self._shuffle, self._shuffle_rows, self._seed = shuffle, shuffle_rows, seed
        self._drop_last = drop_last or epochs is None
        self._transform = transformation_fn
        self._workers = workers
        self._sparse = dict(sparse or {})
        self._row_groups = RowGroups(path, columns, filesystem, storage_options)
        self.schema = self._row_groups.schema
        check_types(self.schema, self._sparse, self._row_groups.name)
        group_rows = [group.rows for group in self._row_groups.groups]
        self.total_rows = sum(group_rows)
        self._pieces = pieces_of(group_rows, rank, size)
        self.rows = sum(piece.rows for piece in self._pieces)
        self._shapes = Shapes()
        self._cached: dict[Piece, Columns] | None = {} if cache else None
        if epochs is None and not self.rows:
            said = f"Rank {rank} of {size} has no rows of {self._row_groups.name}, which has {self.total_rows}."
            raise ValueError(coded(DataCode.NOTHING_TO_REPEAT, said))

    def __len__(self) -> int:
        """How many batches an iteration has. TypeError where it has no end."""
        if self.epochs is None:
            raise TypeError("This reader has no length: it repeats its rows without end (epochs=None).")
        rows = self.rows * self.epochs
        return rows // self.batch_size if self._drop_last else -(-rows // self.batch_size)

    def __getstate__(self) -> dict[str, Any]:
        # Without the cache: the other process reads by itself.
        return {**self.__dict__, "_cached": None if self._cached is None else {}}

    def set_epoch(self, epoch: int, batches: int = 0) -> None:
        """The next iteration is this epoch, the one after it the following epoch.

        With `batches` the iteration skips that many batches of the epoch without reading them: the batches that the
        training used before it stopped in the middle of the epoch.
        """
        _check_number("epoch", epoch, 0)
        _check_number("batches", batches, 0)
        self.epoch = epoch
        self._skip = batches

    def _iterate(self) -> Iterator[Columns]:
        self._row_groups.open_in_this_process()
        # Not less than a batch, so that small row groups are joined once and not batch by batch.
        window_rows = max(self._shuffle_rows if self._shuffle else 0, self.batch_size)
        order = Order(self._pieces, window_rows, self._seed, self.epoch, self._shuffle)
        skip = self._skip * self.batch_size
        self.epoch, self._skip = self.epoch + 1, 0
        return self._batches(order, skip)

    def _batches(self, order: Order, skip: int) -> Iterator[Columns]:
        def of_worker(number: int) -> Iterator[Piece]:
            pieces = (piece for window, _ in order.windows(self.epochs, skip) for piece in window.pieces)
            return itertools.islice(pieces, number, None, self._workers or 1)

        batches = Batches(self.batch_size)
        with self._decoded([of_worker(number) for number in range(self._workers or 1)]) as pieces:
            for window, skipped in order.windows(self.epochs, skip):
                of_window = list(itertools.islice(pieces, len(window.pieces)))
                if len(of_window) < len(window.pieces):
                    return  # the interpreter exits, and has ended the threads
                rows = joined(of_window, order.rows(window))
                for batch in batches.of(cut(rows, skipped, window.rows)):
                    yield self._transformed(batch)
            if not self._drop_last:
                for batch in batches.rest():
                    yield self._transformed(batch)

    @contextmanager
    def _decoded(self, workers: Sequence[Iterator[Piece]]) -> Iterator[Iterator[Columns]]:
        """The pieces of the workers in turn, decoded. An error of decoding one is raised when its turn comes."""
        if not self._workers:
            yield map(self._decode, workers[0])
            return
        now: list[RowGroup | None] = [None] * len(workers)

        def outcomes(number: int) -> Iterator[Columns | Exception]:
            for piece in workers[number]:
                now[number] = self._row_groups.groups[piece.group]
                try:
                    outcome: Columns | Exception = self._decode(piece)
                except Exception as error:
                    outcome = error
                yield outcome

        def size_bytes(number: int) -> int:
            group = now[number]
            return group.size_bytes if group is not None else 0

        makers = [partial(outcomes, number) for number in range(len(workers))]
        with threads(makers, lambda number: str(now[number] or self._row_groups.name), size_bytes) as running:
            yield map(_raised, running)

    def _decode(self, piece: Piece) -> Columns:
        if self._cached is not None and piece in self._cached:
            return self._cached[piece]
        group = self._row_groups.groups[piece.group]
        table = self._row_groups.read(*piece)
        columns = to_columns(table, group.path, group.first_row + piece.start, self._sparse)
        self._shapes.check(columns, group.path, group.first_row + piece.start)
        if self._cached is not None:
            self._cached[piece] = columns
        return columns

    def _transformed(self, batch: Columns) -> Columns:
        if self._transform is None:
            return batch
        changed: Any = self._transform(batch)
        if not isinstance(changed, dict):
            said = f"transformation_fn must return a dict of arrays by column name, not {type(changed).__name__}."
            raise ValueError(coded(DataCode.INVALID_BATCH, said))
        return changed


def _raised(outcome: Columns | Exception) -> Columns:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise _invalid(f"{name} must be a number from {least} on, not {value!r}")


def _invalid(sentence: str) -> ValueError:
    return ValueError(coded(TrainingCode.INVALID_ARGUMENT, f"{sentence}."))
