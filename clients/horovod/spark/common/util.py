"""Prepared data, by the names that programs know: `with util.prepare_data(...) as dataset_idx:`.

Each fit has a number of its own while it runs, so that fits beside each other do not write into the same folders. Its
data stay when it is over: the next fit with the same DataFrame uses them again, and any other one may overwrite them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from horovod.runner.common.util.host_hash import host_hash as host_hash
from horovod.spark.common.columns import Metadata, Properties, col_info, metadata_of, read_metadata
from horovod.spark.common.columns import check_shape_compatibility as check_shape_compatibility
from horovod.spark.common.data_files import count_rows
from horovod.spark.common.params import refused
from horovod.spark.common.preparation import Request, prepare


class Key(NamedTuple):
    """Data are the same if the DataFrame, which can't change, is the same object, and store and share are equal."""

    df: Any
    train_path: str
    val_path: str
    validation: Any

    def __hash__(self) -> int:
        return hash((id(self.df), *self[1:]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.df is other.df and self[1:] == other[1:]

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass
class Dataset:
    """The data of a number. settings: all else that decides how they look; users: fits that run with them now."""

    key: Key
    settings: Mapping[str, Any]
    properties: Properties | None = None
    users: int = 0


class TrainingCache:
    """Numbers for prepared data, from 0 on; thread-safe."""

    def __init__(self) -> None:
        self._key_to_dataset: dict[Key, int] = {}
        self._datasets: dict[int, Dataset] = {}
        self._changed = threading.Condition()  # guards all of it

    def create_key(self, df: Any, store: Any, validation: Any) -> Key:
        """The key that tells these data from others."""
        return Key(df, store.get_train_data_path(), store.get_val_data_path(), validation)

    def is_cached(self, key: Key, store: Any) -> bool:
        """Whether the data were prepared and are in the store."""
        with self._changed:
            number = self._key_to_dataset.get(key)
            ready = number is not None and self._datasets[number].properties is not None
        if not ready or not store.is_parquet_dataset(store.get_train_data_path(number)):
            return False
        return not key.validation or bool(store.is_parquet_dataset(store.get_val_data_path(number)))

    def properties(self, number: int) -> Properties:
        """KeyError for a number under which nothing was prepared."""
        with self._changed:
            found = self._datasets[number].properties
        if found is None:
            raise KeyError(number)
        return found

    @contextmanager
    def use(
        self, key: Key, settings: Mapping[str, Any], store: Any, make: Callable[[int], Properties]
    ) -> Iterator[int]:
        """The number of these data while the block runs; `make` prepares them where they are not there yet.

        A second fit with the same data waits until the first has made them.
        """
        number, is_maker = self._take(key, settings, store)
        try:
            if is_maker:
                properties = make(number)
                with self._changed:
                    self._datasets[number].properties = properties
                    self._changed.notify_all()
            yield number
        finally:
            with self._changed:
                dataset = self._datasets[number]
                dataset.users -= 1
                if dataset.properties is None:  # making them failed: the next one tries again
                    self._forget(number)
                self._changed.notify_all()

    def _take(self, key: Key, settings: Mapping[str, Any], store: Any) -> tuple[int, bool]:
        is_there = self.is_cached(key, store)
        with self._changed:
            while (number := self._key_to_dataset.get(key)) is not None:
                dataset = self._datasets[number]
                if dataset.settings == settings and (dataset.users or is_there):
                    if dataset.properties is not None:
                        dataset.users += 1
                        return number, False
                    self._changed.wait()  # for the fit that makes them; ends with properties or without the entry
                elif dataset.users:
                    break  # the same DataFrame is being used with other columns: beside it
                else:
                    self._forget(number)
            number = next(one for one in range(len(self._datasets) + 1) if not self._is_used(one))
            self._forget(number)
            self._datasets[number] = Dataset(key, settings, users=1)
            self._key_to_dataset[key] = number
            return number, True

    def _is_used(self, number: int) -> bool:
        return number in self._datasets and self._datasets[number].users > 0

    def _forget(self, number: int) -> None:
        dataset = self._datasets.pop(number, None)
        if dataset is not None and self._key_to_dataset.get(dataset.key) == number:
            del self._key_to_dataset[dataset.key]

    def clear(self) -> None:
        """Forgets all data that no fit uses now."""
        with self._changed:
            for number in [one for one in self._datasets if not self._is_used(one)]:
                self._forget(number)


_training_cache = TrainingCache()
_get_col_info = col_info
_get_metadata = metadata_of


@contextmanager
def prepare_data(
    num_processes: int,
    store: Any,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int | None = 10,
    verbose: int = 0,
    random_seed: int | None = None,
    finite_columns: Sequence[str] = (),
) -> Iterator[int]:
    """The number under which the data lie in the store while the block runs: store.get_train_data_path(number).

    The same DataFrame is written once, and then found again (clear_training_cache forgets it). Each process that trains
    gets `partitions_per_process` files; None: as many as the DataFrame has partitions.
    finite_columns: those in which neither NaN nor an infinity may be.

    Raises:
        ValueError: a column is missing, has rows without a value or of unlike lengths, or there are too few rows.
    """
    columns = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    request = Request(
        tuple(dict.fromkeys(columns)),
        validation,
        compress_sparse,
        num_processes,
        partitions_per_process,
        random_seed,
        tuple(dict.fromkeys(finite_columns)),
    )
    request.check(df)

    def make(number: int) -> Properties:
        paths = store.get_train_data_path(number), store.get_val_data_path(number)
        return prepare(df, request, *paths, store, verbose)

    key = _training_cache.create_key(df, store, validation)
    settings = {"columns": set(columns), "compress_sparse": compress_sparse, "seed": random_seed}
    settings["finite"] = set(finite_columns)
    with _training_cache.use(key, settings, store, make) as number:
        yield number


def get_dataset_properties(dataset_idx: int) -> tuple[int, int, Metadata, float]:
    """Rows to train and to validate with, what the columns are, and bytes of a row, of data that were prepared."""
    return _training_cache.properties(dataset_idx)


def get_simple_meta_from_parquet(
    store: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
) -> tuple[int, int, Metadata, float]:
    """As get_dataset_properties, for Parquet files that something else has written where the store expects them."""
    train_path, val_path = store.get_train_data_path(dataset_idx), store.get_val_data_path(dataset_idx)
    columns = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    metadata = read_metadata(store, train_path, list(dict.fromkeys(columns)))
    train = count_rows(store, train_path)
    val_rows = count_rows(store, val_path).rows if store.is_parquet_dataset(val_path) else 0
    return Properties(train.rows, val_rows, metadata, train.row_bytes)


def clear_training_cache() -> None:
    """Forgets prepared data, so that the next fit writes its own."""
    _training_cache.clear()


def to_list(value: Any, length: int) -> list[Any] | None:
    """A loss for each of `length` labels, where only one is given; None stays None.

    Raises:
        ValueError: a list of another length.
    """
    if value is None:
        return None
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(values) == length:
        return values
    if len(values) == 1:
        return values * length
    raise refused(f"there are {len(values)} losses for {length} label columns: give one, or one for each.")
