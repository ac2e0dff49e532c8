"""The columns of a data set: their types and sizes, and whether these fit the shapes of a model.

Spark counts the types and sizes of a DataFrame's columns in one pass. The metadata of a column also say how its values
are stored on disk ("intermediate format"):

nochange               numbers and lists as they are, and dense vectors in metadata read from Parquet
array                  a vector as a list of all its values
custom_sparse_format   a vector as [n, n indices, n values, zeros], 1 + 2 * max_size numbers for all rows
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    FractionalType,
    IntegerType,
    IntegralType,
    LongType,
    NumericType,
    ShortType,
    StringType,
    TimestampType,
)

from horovod.base.errors import DataCode
from horovod.spark.common.params import refused

NOCHANGE: Final = "nochange"
ARRAY: Final = "array"
CUSTOM_SPARSE: Final = "custom_sparse_format"

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


class Properties(NamedTuple):
    """The facts about prepared data that get_dataset_properties returns."""

    train_rows: int
    val_rows: int
    metadata: dict[str, dict[str, Any]]
    avg_row_size: float


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that one pass over a DataFrame has found about its columns. The first three are those of `col_info`.

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
    """How each column is stored if sparse vectors stay sparse. facts: those of `df`, if they are known."""
    facts = facts or facts_of(df)
    types, shapes, max_sizes = facts.types, facts.shapes, facts.max_sizes
    metadata: Metadata = {}
    for field in df.schema.fields:
        found = types[field.name] - {type(None)}
        is_sparse = found == {SparseVector}
        spark_type: type = type(field.dataType)
        stored = NOCHANGE
        if isinstance(field.dataType, VectorUDT):
            spark_type = SparseVector if is_sparse else DenseVector
            stored = CUSTOM_SPARSE if is_sparse else ARRAY
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
            if metadata[field.name]["intermediate_format"] == CUSTOM_SPARSE:
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


def check_columns(there: Sequence[str], wanted: Sequence[str]) -> None:
    """ValueError if one of `wanted` is not `there`."""
    missing = [name for name in wanted if name not in there]
    if missing:
        raise refused(
            f"there is no column {', '.join(map(repr, missing))}; there are {list(there)}.", DataCode.MISSING_COLUMN
        )


# -- by Parquet files alone, for data that no fit has prepared ---------------------------------------------------------

_BATCH_ROWS: Final = 65536


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
            "intermediate_format": NOCHANGE,
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
        (pt.is_boolean, BooleanType),
        (pt.is_int8, ByteType),
        (pt.is_int16, ShortType),
        (pt.is_int32, IntegerType),
        (pt.is_integer, LongType),
        (pt.is_float32, FloatType),
        (pt.is_floating, DoubleType),
        (pt.is_decimal, DecimalType),
        (pt.is_binary, BinaryType),
        (pt.is_date, DateType),
        (pt.is_timestamp, TimestampType),
    ]
    return next((spark_type for holds, spark_type in known if holds(kind)), StringType)


# -- and the shapes that a model takes and gives -----------------------------------------------------------------------

Shape = Sequence[int | None]


def check_shape_compatibility(
    metadata: Mapping[str, Mapping[str, Any]],
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Shape] | None = None,
    output_shapes: Sequence[Shape] | None = None,
    label_shapes: Sequence[Shape] | None = None,
) -> None:
    """ValueError unless each column has as many numbers as its shape; the dimension of the batch counts as one.

    label_shapes, where given, say what labels look like, and not the shapes of the model's outputs.
    """
    _check(metadata, feature_columns, input_shapes, "feature", "input")
    _check(metadata, label_columns, label_shapes or output_shapes, "label", "label" if label_shapes else "output")


def _check(
    metadata: Mapping[str, Mapping[str, Any]],
    columns: Sequence[str],
    shapes: Sequence[Shape] | None,
    what: str,
    of: str,
) -> None:
    if shapes is None:
        return
    if len(shapes) != len(columns):
        raise refused(
            f"there are {len(columns)} {what} columns {list(columns)} for {len(shapes)} {of} shapes {list(shapes)}.",
            DataCode.DIFFERENT_SHAPES,
        )
    for column, shape in zip(columns, shapes, strict=True):
        size = metadata[column]["shape"]
        if size is not None and numbers_in(shape) != size:
            hint = " If a label has another shape than its output, pass label_shapes." if of == "output" else ""
            raise refused(
                f"the {what} column {column!r} has {size} numbers in each row, and the {of} shape {tuple(shape)} "
                f"has {numbers_in(shape)}.{hint}",
                DataCode.DIFFERENT_SHAPES,
            )


def numbers_in(shape: Shape) -> int:
    """How many numbers a row has; None and -1 are the batch.

    >>> numbers_in([-1, 28, 28])
    784
    """
    return math.prod(abs(dimension) for dimension in shape if dimension is not None)


def of_row(shape: Shape) -> tuple[int, ...]:
    """The dimensions of one row: those behind that of the batch, if it is named.

    >>> of_row([-1, 28, 28]), of_row([1, 28, 28])
    ((28, 28), (1, 28, 28))
    """
    first, *others = shape
    dimensions = others if first is None or first < 0 else shape
    return tuple(abs(dimension) for dimension in dimensions if dimension is not None)
