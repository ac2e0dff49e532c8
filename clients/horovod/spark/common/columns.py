"""How the columns of a DataFrame look: types and sizes, counted by Spark in one pass, and what is stored for them.

on disk ("intermediate format")
nochange               numbers and lists as they are, and dense vectors in metadata read from Parquet
array                  a vector as a list of all its values
custom_sparse_format   a vector as [n, n indices, n values, zeros], 1 + 2 * max_size numbers for all rows
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Final

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    FractionalType,
    IntegralType,
    NumericType,
    StringType,
    TimestampType,
)

from horovod.base.errors import DataCode
from horovod.spark.common import constants
from horovod.spark.common.params import refused

Metadata = dict[str, dict[str, Any]]

_PYTHON_TYPES: Final[tuple[tuple[type[DataType], type], ...]] = (
    (BooleanType, bool),
    (IntegralType, int),
    (FractionalType, float),
    (StringType, str),
    (BinaryType, bytearray),
    (ArrayType, list),
    (DateType, object),
    (TimestampType, object),
)
_SPARSE, _DENSE = 0, 1  # the first field of a VectorUDT


def col_info(df: DataFrame) -> tuple[dict[str, set[type]], dict[str, int], dict[str, int]]:
    """For each column: the Python types of its values, how many numbers a value has, and how many must be stored.

    Numbers have one. A list or a dense vector has as many as it is long (a list of lists, as all of them are together),
    all of which are stored; of sparse vectors as many as the fullest one has entries that are not zero. type(None) is
    among the types where a value is missing.

    Raises:
        ValueError: lists or vectors of one column have different lengths, or a type is none that can be trained on.
    """
    found = facts_of(df)
    return found.types, found.shapes, found.max_sizes


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one pass over a DataFrame has found of its columns. The first three are those of `col_info`.

    not_finite: how many rows have NaN or an infinity, of the columns that have such rows.
    """

    types: dict[str, set[type]] = dataclasses.field(default_factory=dict)
    shapes: dict[str, int] = dataclasses.field(default_factory=dict)
    max_sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    not_finite: dict[str, int] = dataclasses.field(default_factory=dict)


def facts_of(df: DataFrame) -> Facts:
    """ValueError as `col_info`."""
    if not df.columns:
        return Facts()
    fields = {field.name: field.dataType for field in df.schema.fields}
    questions: list[Column] = []
    for place, (name, kind) in enumerate(fields.items()):
        questions += [answer.alias(f"{place}_{what}") for what, answer in _questions(name, kind).items()]
    row = df.agg(*questions).first()
    assert row is not None
    facts = Facts()
    types, shapes, max_sizes = facts.types, facts.shapes, facts.max_sizes
    for place, (name, kind) in enumerate(fields.items()):
        answers = {what: row[f"{place}_{what}"] or 0 for what in _questions(name, kind)}
        types[name] = {type(None)} if answers["missing"] else set()
        if answers.get("not_finite"):
            facts.not_finite[name] = answers["not_finite"]
        if answers.get("least", 0) != answers.get("most", 0):
            raise different_lengths(name, answers["least"], answers["most"])
        shapes[name] = max_sizes[name] = answers.get("most", 1)
        if not isinstance(kind, VectorUDT):
            types[name] |= {_python_type(name, kind)} if answers["present"] else set()
            continue
        types[name] |= {DenseVector} if answers["dense"] else set()
        types[name] |= {SparseVector} if answers["sparse"] else set()
        if not answers["dense"] and answers["sparse"]:
            max_sizes[name] = answers["entries"]
    return facts


def _questions(name: str, kind: DataType) -> dict[str, Column]:
    column = F.col(quoted(name))
    found = {"missing": F.count(F.when(missing(name, kind), 1)), "present": F.count(column)}
    if (is_not_finite := _not_finite(name, kind)) is not None:
        found["not_finite"] = F.count(F.when(is_not_finite, 1))
    if isinstance(kind, VectorUDT):
        vector = F.unwrap_udt(column)
        length = F.when(vector["type"] == _SPARSE, vector["size"]).otherwise(F.size(vector["values"]))
        found |= {
            "dense": F.count(F.when(vector["type"] == _DENSE, 1)),
            "sparse": F.count(F.when(vector["type"] == _SPARSE, 1)),
            "entries": F.max(F.size(vector["indices"])),
        }
    elif isinstance(kind, ArrayType):
        flat = column
        while isinstance(kind.elementType, ArrayType):
            flat, kind = F.flatten(flat), kind.elementType
        length = F.size(flat)
    else:
        return found
    length = F.when(column.isNotNull(), length)  # the size of NULL is -1 where Spark is told so
    return found | {"least": F.min(length), "most": F.max(length)}


def missing(name: str, kind: DataType) -> Column:
    """Whether a row has no value in this column, or a list in which one is missing."""
    column = F.col(quoted(name))
    found = column.isNull()
    while isinstance(kind, ArrayType):
        found = found | F.exists(column, lambda element: element.isNull())
        kind = kind.elementType
        column = F.flatten(column) if isinstance(kind, ArrayType) else column
    return found


def _not_finite(name: str, kind: DataType) -> Column | None:
    """Whether a row has NaN or an infinity in this column; None for a column that can't."""
    column = F.col(quoted(name))
    if isinstance(kind, VectorUDT):
        return F.exists(F.unwrap_udt(column)["values"], _is_not_finite)
    if not isinstance(kind, ArrayType):
        return _is_not_finite(column) if isinstance(kind, (FloatType, DoubleType)) else None
    while isinstance(kind.elementType, ArrayType):
        column, kind = F.flatten(column), kind.elementType
    return F.exists(column, _is_not_finite) if isinstance(kind.elementType, (FloatType, DoubleType)) else None


def _is_not_finite(number: Column) -> Column:
    return F.abs(number) >= F.lit(math.inf)  # NaN is above all other numbers for Spark


def different_lengths(name: str, least: int, most: int) -> ValueError:
    """For a column of lists or vectors that are not all of one length."""
    return refused(
        f"column {name!r} has values of different lengths, from {least} to {most}: "
        "rows of a batch must have one shape. Pad or cut them.",
        DataCode.DIFFERENT_SHAPES,
    )


def _python_type(name: str, kind: DataType) -> type:
    element = kind
    while isinstance(element, ArrayType):
        element = element.elementType
    if element is kind or isinstance(element, (NumericType, BooleanType)):
        for known, python_type in _PYTHON_TYPES:
            if isinstance(kind, known):
                return python_type
    raise refused(
        f"column {name!r} is of type {kind.simpleString()}: numbers, lists of numbers and vectors can be trained on.",
        DataCode.UNSUPPORTED_COLUMN,
    )


def metadata_of(df: DataFrame, facts: Facts | None = None) -> Metadata:
    """What is stored of each column, where sparse vectors stay sparse. facts: those of `df`, where they are known."""
    facts = facts or facts_of(df)
    types, shapes, max_sizes = facts.types, facts.shapes, facts.max_sizes
    metadata: Metadata = {}
    for field in df.schema.fields:
        found = types[field.name] - {type(None)}
        is_sparse = found == {SparseVector}
        spark_type: type = type(field.dataType)
        stored = constants.NOCHANGE
        if isinstance(field.dataType, VectorUDT):
            spark_type = SparseVector if is_sparse else DenseVector
            stored = constants.CUSTOM_SPARSE if is_sparse else constants.ARRAY
        metadata[field.name] = {
            "spark_data_type": spark_type,
            "is_sparse_vector_only": is_sparse,
            "shape": shapes[field.name],
            "intermediate_format": stored,
            "max_size": max_sizes[field.name],
        }
    return metadata


def without_text(metadata: Metadata, columns: Iterable[str]) -> None:
    """ValueError if one of these columns has text or dates, of which a model can't take a batch as it is."""
    texts = {StringType: "text", BinaryType: "bytes", DateType: "dates", TimestampType: "times"}
    for name in columns:
        if (kind := texts.get(metadata[name]["spark_data_type"])) is not None:
            raise refused(
                f"column {name!r} has {kind}, and the model takes numbers: let transformation_fn make some of them, or "
                "a stage of a Pipeline before the estimator.",
                DataCode.UNSUPPORTED_COLUMN,
            )


def stored(df: DataFrame, metadata: Metadata) -> DataFrame:
    """The columns as they are written to Parquet. Beside a vector, single precision becomes double, as vectors have."""
    has_vectors = any(isinstance(field.dataType, VectorUDT) for field in df.schema.fields)
    columns = []
    for field in df.schema.fields:
        column = F.col(quoted(field.name))
        if isinstance(field.dataType, VectorUDT):
            if metadata[field.name]["intermediate_format"] == constants.CUSTOM_SPARSE:
                column = _compressed(column, metadata[field.name]["max_size"])
            else:
                column = vector_to_array(column)
        elif has_vectors and isinstance(field.dataType, FloatType):
            column = column.cast(DoubleType())
        columns.append(column.alias(field.name))
    return df.select(*columns)


def _compressed(column: Column, max_size: int) -> Column:
    vector = F.unwrap_udt(column)
    count = F.size(vector["indices"])
    zeros = F.array_repeat(F.lit(0.0), 2 * (F.lit(max_size) - count))
    indices = F.transform(vector["indices"], lambda index: index.cast("double"))
    return F.concat(F.array(count.cast("double")), indices, vector["values"], zeros)


def as_arrays(df: DataFrame, columns: Iterable[str]) -> list[Column]:
    """These columns as a UDF can take them: vectors as lists, decimals as the doubles that training has read."""
    kinds = {field.name: field.dataType for field in df.schema.fields}
    found = []
    for name in columns:
        column, kind = F.col(quoted(name)), kinds[name]
        found.append(vector_to_array(column) if isinstance(kind, VectorUDT) else column.cast(_without_decimals(kind)))
    return found


def _without_decimals(kind: DataType) -> DataType:
    if isinstance(kind, ArrayType):
        return ArrayType(_without_decimals(kind.elementType), kind.containsNull)
    return DoubleType() if isinstance(kind, DecimalType) else kind


def quoted(name: str) -> str:
    """The name of a column as Spark parses it: dots in it are part of the name."""
    return "`" + name.replace("`", "``") + "`"
