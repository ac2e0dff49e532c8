"""From a DataFrame to Parquet files in a store, which ranks read (horovod.data.parquet).

The DataFrame is computed once and kept by Spark until both parts are written, so that a source that answers differently
each time can't lose a row or give it to both parts. What was written is counted by its footers (data_files.py).
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType, DataType, DoubleType, FloatType, NumericType

from horovod.base.errors import DataCode
from horovod.spark.common.columns import (
    NOCHANGE,
    Facts,
    Metadata,
    Properties,
    check_columns,
    facts_of,
    metadata_of,
    missing,
    quoted,
    stored,
)
from horovod.spark.common.data_files import write
from horovod.spark.common.params import check_validation, refused

_MARK: Final = "__horovod_validation"


@dataclass(frozen=True)
class Request:
    """The data that are to be prepared. Columns are those that the training reads; `validation` may name another."""

    columns: tuple[str, ...]
    validation: float | str | None
    compress_sparse: bool
    num_processes: int
    partitions_per_process: int | None
    random_seed: int | None = None
    finite: tuple[str, ...] = ()  # columns that may have neither NaN nor an infinity

    def check(self, df: DataFrame) -> None:
        """ValueError if the DataFrame lacks a column, or can't be split so."""
        check_columns(df.columns, self.columns)
        check_validation(self.validation, df.columns)
        if isinstance(self.validation, str):
            kind = df.schema[self.validation].dataType
            if not isinstance(kind, (BooleanType, NumericType)):
                raise refused(
                    f"the validation column {self.validation!r} is of type {kind.simpleString()}: "
                    "it must be a boolean, or a number that is above 0 for rows to validate with."
                )


def prepare(df: DataFrame, request: Request, train_path: str, val_path: str, store: Any, verbose: int) -> Properties:
    """Writes the rows to train and those to validate with, each to its path.

    Raises:
        ValueError: a row lacks a value, values of a column differ in shape, a column of `request.finite` has NaN or an
            infinity, or a part would be empty.
    """
    request.check(df)
    marked = _marked(df, request).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        data = marked.drop(_MARK)
        facts = facts_of(data)
        without_missing(marked, facts.types, request.columns)
        finite(data, facts, request.finite)
        metadata = _metadata(data, facts, request.compress_sparse)
        parts = [(train_path, "training", F.lit(True))]
        if request.validation:
            parts = [(train_path, "training", ~F.col(_MARK)), (val_path, "validation", F.col(_MARK))]
        rows, row_bytes = [], 0.0
        for path, purpose, belongs in parts:
            if verbose:
                print(f"horovod.spark: writing {purpose} data to {path}", flush=True)
            part = _partitioned(stored(marked.filter(belongs).drop(_MARK), metadata), request)
            written = write(part, path, store, verbose)
            rows.append(written.rows)
            row_bytes = row_bytes or written.row_bytes
            _check_part(written.rows, purpose, request)
        if verbose:
            print(f"horovod.spark: {' + '.join(map(str, rows))} rows", flush=True)
    finally:
        marked.unpersist()
    return Properties(rows[0], rows[1] if len(rows) > 1 else 0, metadata, row_bytes)


def _marked(df: DataFrame, request: Request) -> DataFrame:
    """The columns, and a boolean that marks the rows to validate with."""
    columns: list[Column] = [F.col(quoted(name)) for name in dict.fromkeys(request.columns)]
    mark = F.lit(False)
    if isinstance(request.validation, str):
        given = F.col(quoted(request.validation))
        is_boolean = isinstance(df.schema[request.validation].dataType, BooleanType)
        mark = F.coalesce(given if is_boolean else given > 0, F.lit(False))
    elif request.validation:
        seed = request.random_seed if request.random_seed is not None else secrets.randbits(31)
        mark = F.rand(seed) < request.validation
    return df.select(*columns, mark.alias(_MARK))


def _metadata(df: DataFrame, facts: Facts, compress_sparse: bool) -> Metadata:
    metadata = metadata_of(df, facts)
    if not compress_sparse:
        uncompressed(metadata)
    for name, column in metadata.items():
        column["is_finite"] = name not in facts.not_finite
    return metadata


def uncompressed(metadata: Metadata) -> None:
    """Changes the metadata of a data set in which no vector is stored as a sparse one: vectors are dense, and a column
    of floats beside a vector holds doubles.
    """
    has_vectors = any(column["intermediate_format"] != NOCHANGE for column in metadata.values())
    for column in metadata.values():
        if has_vectors and column["spark_data_type"] is FloatType:
            column["spark_data_type"] = DoubleType
        if column["intermediate_format"] != NOCHANGE:
            column.update(
                spark_data_type=_dense(),
                is_sparse_vector_only=False,
                intermediate_format=NOCHANGE,
                max_size=None,
            )


def _dense() -> type:
    from pyspark.ml.linalg import DenseVector

    return DenseVector


def _partitioned(df: DataFrame, request: Request) -> DataFrame:
    if request.partitions_per_process is None:
        return df
    # Round robin, so that ranks, which get neighbouring rows, do not get unlike ones where the source is sorted.
    return df.repartition(request.num_processes * request.partitions_per_process)


def _check_part(rows: int, purpose: str, request: Request) -> None:
    if not rows:
        said = f" (validation={request.validation!r})" if request.validation else ""
        raise refused(f"there are no rows for {purpose}{said}.", DataCode.TOO_FEW_ROWS)
    if purpose == "training":
        check_rows(rows, request.num_processes)


def check_rows(rows: int, processes: int) -> None:
    """ValueError if some process would have no row to train with: the others would wait for its gradients."""
    if rows < processes:
        raise refused(
            f"there are {rows} rows to train with, fewer than the {processes} processes. Ask for fewer: num_proc.",
            DataCode.TOO_FEW_ROWS,
        )


# -- rows that can't be trained on, with the Python that drops them ----------------------------------------------------

_INFINITY: Final = '"infinity"'  # in SQL


def without_missing(df: DataFrame, types: dict[str, set[type]], columns: Iterable[str]) -> None:
    """ValueError if one of these columns has a row without a value."""
    without = [name for name in columns if type(None) in types[name]]
    if without:
        kinds = {field.name: field.dataType for field in df.schema.fields}
        count = df.filter(reduce(operator.or_, (missing(name, kinds[name]) for name in without))).count()
        in_lists = " (or a list with a null)" if any(isinstance(kinds[name], ArrayType) for name in without) else ""
        raise refused(
            f"{count} rows have no value{in_lists} in {' or '.join(map(repr, without))}. Fill them, or drop them with "
            f"{without_nulls({name: kinds[name] for name in without})}.",
            DataCode.NULL_VALUE,
        )


def without_nulls(kinds: Mapping[str, DataType]) -> str:
    """The Python that drops rows of `df` without a value in these columns, or with a null in a list, for an error."""
    plain = [quoted(name) for name, kind in kinds.items() if not isinstance(kind, ArrayType)]
    found = f"df.dropna(subset={plain})" if plain else "df"
    for name, kind in kinds.items():
        if isinstance(kind, ArrayType):  # dropna() takes a list with a null for a value
            found += f".filter({f'not exists({_flat(name, kind)}, x -> x is null)'!r})"
    return found


def finite(df: DataFrame, facts: Facts, columns: Iterable[str]) -> None:
    """ValueError if one of these columns has NaN or an infinity in a row. A loss of it is NaN, and so are all weights
    after one step.
    """
    if not (found := {name: facts.not_finite[name] for name in columns if name in facts.not_finite}):
        return
    kinds = {field.name: field.dataType for field in df.schema.fields}
    counts = ", ".join(f"{count} rows of column {name!r}" for name, count in found.items())
    raise refused(f"there is NaN or an infinity in {counts}. {_without_not_finite(kinds, found)}", DataCode.NOT_FINITE)


def _without_not_finite(kinds: Mapping[str, DataType], columns: Iterable[str]) -> str:
    drop, imports = "df", ""
    for name in columns:
        kind = kinds[name]
        if isinstance(kind, VectorUDT):
            imports = "from pyspark.sql import functions as F; from pyspark.ml.functions import vector_to_array"
            drop += f".filter(F.forall(vector_to_array({quoted(name)!r}), lambda x: F.abs(x) < float('inf')))"
        elif isinstance(kind, ArrayType):
            drop += f".filter({f'forall({_flat(name, kind)}, x -> abs(x) < double({_INFINITY}))'!r})"
        else:
            drop += f".filter({f'abs({quoted(name)}) < double({_INFINITY})'!r})"
    with_imports = f" ({imports})" if imports else ""
    return (
        f"Replace them, or drop such rows with {drop}{with_imports}. If the model is made for such values, allow them "
        f"with transformation_edit_fields={[(name, None, None, True) for name in columns]}."
    )


def _flat(name: str, kind: ArrayType) -> str:
    """The SQL of all values in a list, or a list of lists."""
    found = quoted(name)
    while isinstance(kind.elementType, ArrayType):
        found, kind = f"flatten({found})", kind.elementType
    return found
