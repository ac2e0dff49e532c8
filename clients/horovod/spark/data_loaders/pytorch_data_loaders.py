"""Batches of a reader as dicts of torch tensors, by the names that data modules of older programs import.

>>> from horovod.data import ParquetReader
>>> from horovod.spark.data_loaders.pytorch_data_loaders import PytorchAsyncDataLoader
>>> reader = ParquetReader("s3://bucket/train", ["x", "y"], rank=hvd.rank(), size=hvd.size())
>>> for batch in PytorchAsyncDataLoader(reader=reader, batch_size=64):
...     step(batch["x"], batch["y"])

    PytorchDataLoader          an iteration is one of the reader
    PytorchInfiniteDataLoader  the reader has no end, and an iteration goes on where the one before has ended
    PytorchInmemDataLoader     the rows are read once and stay in memory
    Pytorch...AsyncDataLoader  the same, made ahead by a thread; they take their arguments by name, since
                               those of horovod.data.AsyncDataLoaderMixin come first

A reader is a ParquetReader. Without len() it may be anything that can be iterated over for dicts of NumPy arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from horovod.base.errors import DataCode, TrainingCode, coded
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.data.parquet.columns import Batches, Columns, joined, rows_in
from horovod.spark.torch.tensors import as_tensor

__all__ = [
    "PytorchAsyncDataLoader",
    "PytorchDataLoader",
    "PytorchInfiniteAsyncDataLoader",
    "PytorchInfiniteDataLoader",
    "PytorchInmemAsyncDataLoader",
    "PytorchInmemDataLoader",
]


class PytorchDataLoader(BaseDataLoader):
    """An iteration is one of the reader. Text stays a list.

    Args:
        reader: gives the rows.
        batch_size: rows of a batch, independent of the reader's batches. The last batch may have fewer.
        shuffling_queue_capacity: rows among which a row is shuffled, in addition to the reader's shuffling. 0: none.
        name: the name of this loader in the lines of `verbose`.
        limit_step_per_epoch: how many batches an iteration has at most. -1: as many as there are.
        verbose: say at the end of each iteration how many batches it had.

    Raises:
        ValueError: a batch size below 1, a capacity below 0, or a limit below 1 that is not -1.
    """

    def __init__(
        self,
        reader: Iterable[Columns],
        batch_size: int,
        shuffling_queue_capacity: int = 0,
        name: str = "",
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if batch_size < 1:
            raise _invalid(f"batch_size must be 1 or more, not {batch_size}")
        if shuffling_queue_capacity < 0:
            raise _invalid(f"shuffling_queue_capacity must be 0 or more, not {shuffling_queue_capacity}")
        if limit_step_per_epoch != -1 and limit_step_per_epoch < 1:
            raise _invalid(f"limit_step_per_epoch must be -1, or 1 or more, not {limit_step_per_epoch}")
        self.reader = reader
        self.batch_size = batch_size
        self.shuffling_queue_capacity = shuffling_queue_capacity
        self.name = name or type(self).__name__
        self.limit_step_per_epoch = limit_step_per_epoch
        self.verbose = verbose
        self._iteration = 0

    def __len__(self) -> int:
        """How many batches an iteration has. TypeError where the reader has no end."""
        reader: Any = self.reader
        steps = -(-min(len(reader) * reader.batch_size, reader.rows * reader.epochs) // self.batch_size)
        return int(steps if self.limit_step_per_epoch == -1 else min(steps, self.limit_step_per_epoch))

    def _iterate(self) -> Iterator[Columns]:
        number, self._iteration = self._iteration, self._iteration + 1
        count = 0
        limit = None if self.limit_step_per_epoch == -1 else self.limit_step_per_epoch
        for batch in itertools.islice(self._rows(number), limit):
            count += 1
            yield batch
        if self.verbose:
            print(f"{self.name}: {count} batches in iteration {number}", flush=True)

    def _rows(self, number: int) -> Iterator[Columns]:
        """The batches of iteration `number`."""
        batches = Batches(self.batch_size)
        for window in self._windows(np.random.default_rng((self.shuffling_queue_capacity, number))):
            yield from batches.of(window)
        yield from batches.rest()

    def _windows(self, generator: np.random.Generator) -> Iterator[Columns]:
        """Rows that are shuffled together."""
        gathered: list[Columns] = []
        rows = 0
        for batch in self.reader:
            if not self.shuffling_queue_capacity:
                yield batch
                continue
            gathered.append(batch)
            rows += rows_in(batch)
            if rows >= self.shuffling_queue_capacity:
                yield joined(gathered, generator.permutation(rows))
                gathered, rows = [], 0
        if gathered:
            yield joined(gathered, generator.permutation(rows))

    def _process_batch(self, batch: Columns) -> dict[str, Any]:
        return {name: list(array) if array.dtype == object else as_tensor(array) for name, array in batch.items()}


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """An iteration has `limit_step_per_epoch` batches, and continues after the last batch of the iteration before.

    The arguments are the same as for PytorchDataLoader. When a reader ends, it starts again from the beginning. A
    reader without end, ParquetReader(..., epochs=None), gives only full batches.

    Raises:
        ValueError: no limit; in an iteration, a reader without rows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.limit_step_per_epoch == -1:
            raise _invalid(f"{type(self).__name__} needs limit_step_per_epoch, since it has no end by itself")
        self._stream: Iterator[Columns] | None = None

    def __len__(self) -> int:
        return self.limit_step_per_epoch

    def _rows(self, number: int) -> Iterator[Columns]:
        came = True
        while True:
            stream, self._stream = self._stream or super()._rows(number), None  # kept only where it can go on
            for batch in stream:
                came = True
                self._stream = stream
                yield batch
                self._stream = None
            if not came:
                said = f"{self.name} has nothing to repeat: its reader has no rows."
                raise ValueError(coded(DataCode.NOTHING_TO_REPEAT, said))
            came = False


class PytorchInmemDataLoader(PytorchDataLoader):
    """The first iteration reads the rows, the others have them from memory.

    Args:
        num_epochs: for programs that give it. There may be any number of iterations.
        shuffle: each iteration has a different order. The other arguments are as for PytorchDataLoader. The
            reader must have an end.
    """

    def __init__(
        self,
        reader: Iterable[Columns],
        batch_size: int,
        num_epochs: int | None = None,
        name: str = "",
        shuffle: bool = False,
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        super().__init__(reader, batch_size, 0, name, limit_step_per_epoch, verbose)
        if getattr(reader, "epochs", 1) is None:
            raise _invalid(f"{type(self).__name__} needs a reader with an end, such as ParquetReader(..., epochs=1)")
        self.num_epochs = num_epochs
        self.shuffle = shuffle
        self._held: Columns | None = None

    def _rows(self, number: int) -> Iterator[Columns]:
        if self._held is None:
            read = list(self.reader)
            self._held = joined(read) if read else {}
        count = rows_in(self._held)
        order = np.random.default_rng((count, number)).permutation(count) if self.shuffle else np.arange(count)
        for start in range(0, count, self.batch_size):
            yield joined([self._held], order[start : start + self.batch_size])


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """PytorchDataLoader, made ahead by a thread."""


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """PytorchInfiniteDataLoader, made ahead by a thread."""


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """PytorchInmemDataLoader, made ahead by a thread."""


def _invalid(sentence: str) -> ValueError:
    return ValueError(coded(TrainingCode.INVALID_ARGUMENT, f"{sentence}."))
