"""The batches that one rank trains or validates with, read from the store, and how many steps an epoch has.

Steps are pure arithmetic that every rank does alike (`Epoch`). Ranks differ by one row at most, so all have the same
number of batches, but for one case: the rows of some fill their last batch exactly, and the others have a row more.
Then the former repeat a row that counts nothing. In the last step of an epoch ranks may have unlike numbers of rows;
`scale` makes the average of their gradients that of all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod.base.errors import DataCode, coded
from horovod.data.parquet.reader import ParquetReader
from horovod.spark.common.columns import CUSTOM_SPARSE
from horovod.spark.common.params import refused
from horovod.spark.common.transformation import Batch, Look, Transformation


@dataclass(frozen=True)
class Epoch:
    """An epoch over `total` rows on `size` ranks.

    >>> epoch = Epoch(total=11, size=2, batch_size=3)
    >>> epoch.steps, [epoch.rows(rank, step) for rank in (0, 1) for step in (0, 1)]
    (2, [3, 2, 3, 3])
    """

    total: int
    size: int
    batch_size: int

    @property
    def steps(self) -> int:
        """The steps in which each row is used once."""
        return -(-self.total // (self.size * self.batch_size))

    def rows(self, rank: int, step: int) -> int:
        """Rows in the batch of a rank; 0 where it has none left."""
        own = self.total * (rank + 1) // self.size - self.total * rank // self.size
        return max(min(self.batch_size, own - step * self.batch_size), 0)

    def scale(self, rank: int, step: int) -> float:
        """The factor for the mean loss of a rank that makes the mean over ranks the mean over rows."""
        if step < self.steps - 1:
            return 1.0
        everywhere = sum(self.rows(one, step) for one in range(self.size))
        return self.rows(rank, step) * self.size / everywhere

    @property
    def even(self) -> bool:
        """Whether the scale is 1 on all ranks in all steps."""
        return self.total % self.size == 0


@dataclass(frozen=True)
class FiniteColumns:
    """Columns of batches that may have neither NaN nor an infinity. columns: None for all but those of `others`."""

    columns: tuple[str, ...] | None
    others: tuple[str, ...]

    def check(self, batch: Batch, rank: int) -> None:
        """ValueError for a batch, as the model gets it, in which such a column has one."""
        for name, array in batch.items():
            is_meant = name not in self.others if self.columns is None else name in self.columns
            if is_meant and array.dtype.kind == "f" and not (is_finite := np.isfinite(array)).all():
                rows = int((~is_finite.reshape(len(array), -1).all(1)).sum())
                raise refused(
                    f"rank {rank} has read a batch in which {rows} of {len(array)} rows have NaN or an infinity in the "
                    f"column {name!r}. Replace them, or drop such rows before. If the model is made for such values, "
                    f"allow them with transformation_edit_fields=[({name!r}, None, None, True)].",
                    DataCode.NOT_FINITE,
                )


@dataclass(frozen=True)
class Source:
    """Data in a store, and how they are read; sent to the ranks.

    steps: of an epoch; None: until each row was used. sparse: sizes of the columns that are stored as sparse ones.
    finite: the columns to look at in each batch; None: Spark has looked at all rows.
    """

    path: str
    columns: tuple[str, ...]
    total: int
    batch_size: int
    steps: int | None
    shuffle: bool
    seed: int
    workers: int
    cache: bool
    sparse: dict[str, int]
    transformation: Transformation | None
    finite: FiniteColumns | None = None
    storage_options: dict[str, Any] | None = None

    @property
    def looks(self) -> dict[str, Look]:
        """How columns looked before a transformation_fn has changed them; {} without one, or before the first batch."""
        return self.transformation.seen if self.transformation is not None else {}

    def steps_in_epoch(self, size: int) -> int:
        return self.steps or Epoch(self.total, size, self.batch_size).steps


class Batches:
    """A rank's batches, epoch by epoch."""

    def __init__(self, source: Source, rank: int, size: int) -> None:
        self.steps = source.steps_in_epoch(size)
        self._source = source
        self._rank = rank
        self._epoch = Epoch(source.total, size, source.batch_size)
        self._reader = ParquetReader(
            source.path,
            source.columns,
            batch_size=source.batch_size,
            rank=rank,
            size=size,
            shuffle=source.shuffle,
            seed=source.seed,
            epochs=1 if source.steps is None else None,
            transformation_fn=source.transformation,
            workers=source.workers,
            cache=source.cache,
            sparse=source.sparse,
            storage_options=source.storage_options,
        )
        if self._reader.total_rows != source.total:
            said = f"{source.path} has {self._reader.total_rows} rows on this host, and {source.total} were prepared: "
            said += "is the store's folder the same one everywhere, and does nothing else write to it?"
            raise OSError(coded(DataCode.UNREADABLE_DATA, said))
        self._rest: tuple[int, Iterator[Batch]] | None = None  # an endless stream, and which batch comes next

    @property
    def weighted(self) -> bool:
        """Whether some step's scale is not 1."""
        return self._source.steps is None and not self._epoch.even

    def scale(self, step: int) -> float:
        """The factor for the mean loss of this step of an epoch."""
        return 1.0 if self._source.steps is not None else self._epoch.scale(self._rank, step)

    def of_epoch(self, epoch: int) -> Iterator[tuple[Batch, int, float]]:
        """Batches of an epoch, with the number of rows that count, those that a transformation_fn has left, and what
        their mean loss is multiplied by, which knows nothing of that function.

        With a given number of steps, an epoch goes on in the data where the one before has ended. Either way its
        batches depend on its number alone: an epoch that is read again, or first by a run that is resumed, is the same.
        """
        for batch, rows, scale in self._of_epoch(epoch):
            if self._source.finite is not None:
                self._source.finite.check(batch, self._rank)
            yield batch, rows, scale

    def _of_epoch(self, epoch: int) -> Iterator[tuple[Batch, int, float]]:
        if self._source.steps is not None:
            first = epoch * self.steps
            stream = self._from(first)
            for batch in itertools.islice(stream, self.steps):
                yield batch, _rows(batch), 1.0
            self._rest = first + self.steps, stream
            return
        self._reader.set_epoch(epoch)
        last: Batch = {}
        step = 0
        for step, last in enumerate(self._reader, 1):
            yield last, _rows(last), self._epoch.scale(self._rank, step - 1)
        if step < self.steps and last:
            yield {name: array[:1] for name, array in last.items()}, 0, 0.0

    def _from(self, first: int) -> Iterator[Batch]:
        """The endless stream of batches from batch `first` on: the stream of the epoch before, if that has ended there,
        else a new one. Only the caller refers to it, so its threads end with an epoch that is given up half way.
        """
        rest, self._rest = self._rest, None
        if rest is not None and rest[0] == first:
            return rest[1]
        self._reader.set_epoch(0, batches=first)
        return iter(self._reader)


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values()), ()))


def share_of_validation(source: Source, rank: int, size: int) -> tuple[int, int]:
    """The rank and size whose rows of `source` a rank validates with.

    Of fewer rows than ranks each takes all: no framework validates with none, and the averages are the same.
    """
    return (rank, size) if source.total >= size else (0, 1)


def sparse_sizes(metadata: dict[str, dict[str, Any]], columns: Sequence[str]) -> dict[str, int]:
    """The sizes of those columns that are stored as sparse ones."""
    return {name: metadata[name]["shape"] for name in columns if metadata[name]["intermediate_format"] == CUSTOM_SPARSE}


class DataModule:
    """Makes the batches of an estimator. Subclasses may return different batches."""

    def batches(self, source: Source, rank: int, size: int) -> Batches:
        """The batches with which rank `rank` of `size` trains or validates."""
        return Batches(source, rank, size)


class PetastormDataModule(DataModule):
    """The default. The name is that of an earlier reader: horovod.data.parquet reads."""


class NVTabularDataModule(DataModule):
    """The name of a reader that needs NVTabular, which has no release for the Pythons and CUDA of today."""

    def __init__(self) -> None:
        sentence = "NVTabular is not supported: leave data_module out, the default reads the same files."
        raise NotImplementedError(coded(DataCode.MISSING_DATA_PACKAGE, sentence))
