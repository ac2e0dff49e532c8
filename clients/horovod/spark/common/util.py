"""Prepared data, by the names that programs know: `with util.prepare_data(...) as dataset_idx:`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame

from horovod.runner.common.util.host_hash import host_hash as host_hash
from horovod.spark.common.cache import Properties, TrainingCache
from horovod.spark.common.columns import Metadata, col_info, metadata_of, read_metadata
from horovod.spark.common.columns import check_shape_compatibility as check_shape_compatibility
from horovod.spark.common.data_files import count_rows
from horovod.spark.common.params import refused
from horovod.spark.common.preparation import Request, prepare

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
