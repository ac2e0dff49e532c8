"""What columns are, by Parquet files alone: for data that no fit has prepared."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyspark.ml.linalg import DenseVector
from pyspark.sql import types as T

from horovod.base.errors import DataCode
from horovod.spark.common import constants
from horovod.spark.common.columns import Metadata, different_lengths
from horovod.spark.common.params import refused
from horovod.spark.common.preparation import check_columns

_BATCH_ROWS = 65536


def read_metadata(store: Any, path: str, columns: list[str]) -> Metadata:
    """Lists count as vectors; their lengths are read, and must be one in each column."""
    if not store.is_parquet_dataset(path):
        raise refused(
            f"there is no Parquet data set at {path}: write it there, or call fit(df).", DataCode.UNREADABLE_DATA
        )
    dataset = store.get_parquet_dataset(path)
    check_columns(dataset.schema.names, columns)
    metadata: Metadata = {}
    for name in columns:
        kind = dataset.schema.field(name).type
        is_vector = _is_list(kind) or pt.is_struct(kind)
        metadata[name] = {
            "spark_data_type": DenseVector if is_vector else _spark_type(kind),
            "is_sparse_vector_only": False,
            "shape": _size(dataset, name, kind),
            "intermediate_format": constants.NOCHANGE,
            "max_size": None,
        }
    return metadata


def _size(dataset: Any, name: str, kind: pa.DataType) -> int | None:
    """How many numbers a value has; None for vectors and lists of lists, which only the reader opens."""
    if _is_list(kind):
        return None if _is_list(kind.value_type) else _length(dataset, name)
    return None if pt.is_struct(kind) else 1


def _length(dataset: Any, name: str) -> int:
    lengths: set[int] = set()
    for fragment in dataset.fragments:
        for batch in fragment.to_batches(columns=[name], batch_size=_BATCH_ROWS):
            extremes = pc.min_max(pc.list_value_length(batch.column(name))).as_py()
            lengths |= {length for length in extremes.values() if length is not None}
    if len(lengths) > 1:
        raise different_lengths(name, min(lengths), max(lengths))
    return lengths.pop() if lengths else 0


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def _spark_type(kind: pa.DataType) -> type:
    known: list[tuple[Any, type]] = [
        (pt.is_boolean, T.BooleanType),
        (pt.is_int8, T.ByteType),
        (pt.is_int16, T.ShortType),
        (pt.is_int32, T.IntegerType),
        (pt.is_integer, T.LongType),
        (pt.is_float32, T.FloatType),
        (pt.is_floating, T.DoubleType),
        (pt.is_decimal, T.DecimalType),
        (pt.is_binary, T.BinaryType),
        (pt.is_date, T.DateType),
        (pt.is_timestamp, T.TimestampType),
    ]
    return next((spark_type for holds, spark_type in known if holds(kind)), T.StringType)
