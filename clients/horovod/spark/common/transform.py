"""Predictions as columns of a DataFrame, made in the executors, batch by batch, by way of Arrow.

A prediction of one number becomes a column of the label's type, if that has a fraction or the prediction has none, else
double; one of several numbers becomes a vector. A prediction that is NaN stays NaN. A row without a value in a feature
column is an error, as in training. A transformation_fn is applied as in training (transformation.py).
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import cloudpickle
import numpy as np
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors, VectorUDT
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FractionalType,
    IntegralType,
    StructField,
    StructType,
    TimestampType,
)

from horovod.base.errors import DataCode, TrainingCode, coded
from horovod.spark.common.columns import as_arrays, check_columns, different_lengths, missing
from horovod.spark.common.params import refused
from horovod.spark.common.preparation import without_nulls
from horovod.spark.common.transformation import TransformedPredictor

_BATCH_ROWS: Final = 256
_STRUCT: Final = "__horovod_output"


def transformed(df: DataFrame, model: Any) -> DataFrame:
    """`df` with a column for each label."""
    outputs: list[str] = model.getOutputCols()
    labels: list[str] = model.getOrDefault("label_columns")
    features: list[str] = model.getOrDefault("feature_columns")
    if len(outputs) != len(labels):
        raise refused(f"outputCols are {outputs}, for the labels {labels}: give one for each.")
    if taken := [name for name in outputs if name in df.columns]:
        raise refused(
            f"the DataFrame has a column {', '.join(map(repr, taken))} already: drop it, or call setOutputCols().",
            TrainingCode.CONTRADICTORY_ARGUMENTS,
        )
    if model._predicts_rows():
        return _row_by_row(df, model, outputs)
    check_columns(df.columns, features)
    predict, columns = model._predictor(), _with_values(df, features)
    if (transformation := model._transformation()) is not None:
        metadata = model._get_metadata() or {}
        looks = {name: described["batch"] for name, described in metadata.items() if "batch" in described}
        times = [name for name in features if isinstance(df.schema[name].dataType, TimestampType)]
        # UDFs get the time of a clock in Spark's time zone, and files have that of UTC.
        columns = [
            F.unix_micros(column) if name in times else column for name, column in zip(features, columns, strict=True)
        ]
        predict = TransformedPredictor(predict, transformation, features, looks, times)
    kinds = _kinds(df, model, columns, predict)
    fields = [
        StructField(f"_{place}", ArrayType(DoubleType()) if isinstance(kind, VectorUDT) else kind)
        for place, kind in enumerate(kinds)
    ]
    predictions = F.pandas_udf(_in_batches(predict, features, len(outputs)), StructType(fields))
    result = df.withColumn(_STRUCT, predictions(*columns))
    for place, (name, kind) in enumerate(zip(outputs, kinds, strict=True)):
        result = result.withColumn(name, _predicted(F.col(f"{_STRUCT}._{place}"), kind))
    return result.drop(_STRUCT)


def _predicted(value: Column, kind: DataType) -> Column:
    """The column of predictions, from that of the UDF. What pandas gives to Arrow has NULL for NaN, and a prediction is
    never missing: with NULL, aggregates would leave out the rows that the model can't predict.
    """
    if isinstance(kind, VectorUDT):
        return array_to_vector(F.transform(value, lambda one: F.coalesce(one, F.lit(math.nan))))
    return F.coalesce(value, F.lit(math.nan).cast(kind)) if isinstance(kind, FractionalType) else value


def _in_batches(predict: Callable[[list[np.ndarray]], list[np.ndarray]], features: Sequence[str], count: int) -> Any:
    import pandas as pd

    def udf(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            columns = batch if isinstance(batch, tuple) else (batch,)  # one column comes without a tuple
            rows = len(columns[0])
            arrays = [_stacked(name, column.to_numpy()) for name, column in zip(features, columns, strict=True)]
            parts: list[list[np.ndarray]] = [[] for _ in range(count)]
            for start in range(0, rows, _BATCH_ROWS):
                found = predict([array[start : start + _BATCH_ROWS] for array in arrays])
                for part, values in zip(parts, found, strict=True):
                    part.append(values.reshape(len(values), -1))
            frame = {}
            for place, part in enumerate(parts):
                values = np.concatenate(part) if part else np.zeros((0, 1))
                frame[f"_{place}"] = values[:, 0] if values.shape[1] == 1 else list(values.astype(np.float64))
            yield pd.DataFrame(frame)

    # Spark reads what kind of UDF it is off the annotations, which must be objects and not text.
    udf.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": Iterator[pd.DataFrame]}
    return udf


def _stacked(name: str, values: np.ndarray) -> np.ndarray:
    if not len(values) or not isinstance(values[0], (np.ndarray, list)):
        return np.asarray(values)
    if len(lengths := {len(value) for value in values}) > 1:
        raise different_lengths(name, min(lengths), max(lengths))
    if np.asarray(values[0]).dtype == object:  # lists of lists
        return np.stack([_stacked(name, np.asarray(value)) for value in values])
    return np.stack(list(values))


def _with_values(df: DataFrame, columns: Sequence[str]) -> list[Column]:
    """These columns as a UDF takes them. A row without a value is an error: pandas would make NaN of it."""
    kinds = {field.name: field.dataType for field in df.schema.fields}
    found = []
    for name, column in zip(columns, as_arrays(df, columns), strict=True):
        in_list = " (or a list with a null)" if isinstance(kinds[name], ArrayType) else ""
        sentence = f"A row has no value{in_list} in {name!r}, so nothing can be predicted. Fill such rows, or drop "
        sentence += f"them with {without_nulls({name: kinds[name]})}."
        error = F.raise_error(F.lit(coded(DataCode.NULL_VALUE, sentence)))
        found.append(F.when(missing(name, kinds[name]), error).otherwise(column))
    return found


def _kinds(
    df: DataFrame, model: Any, columns: Sequence[Column], predict: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> list[DataType]:
    """The type of each prediction."""
    metadata = model._get_metadata() or {}
    labels = model.getOrDefault("label_columns")
    if all(name in metadata and "prediction" in metadata[name] for name in labels):
        found = [metadata[name]["prediction"] for name in labels]
    else:  # trained by something else
        row = df.select(*columns).first()
        empty = [(1, True)] * len(labels)
        found = empty if row is None else [kind_of(values) for values in predict([np.asarray([one]) for one in row])]
    return [_kind(df, metadata, name, *one) for name, one in zip(labels, found, strict=True)]


def kind_of(predictions: np.ndarray) -> tuple[int, bool]:
    """Numbers in a row, and whether they may have a fraction: what metadata keeps of a label as "prediction"."""
    return int(np.prod(predictions.shape[1:], dtype=int)), bool(np.issubdtype(predictions.dtype, np.inexact))


def _kind(df: DataFrame, metadata: dict[str, Any], label: str, size: int, is_inexact: bool) -> DataType:
    known: Any = df.schema[label].dataType if label in df.columns else None
    if known is None and label in metadata:
        described = metadata[label]["spark_data_type"]
        known = VectorUDT() if described in (DenseVector, SparseVector) else described
        known = known if isinstance(known, DataType) else _made(known)
    if size != 1 or isinstance(known, VectorUDT):
        return VectorUDT()
    if isinstance(known, DecimalType):  # a network's numbers are no decimals
        return DoubleType()
    fits = isinstance(known, FractionalType) or (isinstance(known, IntegralType) and not is_inexact)
    return known if fits else DoubleType()


def _made(kind: type) -> DataType | None:
    try:
        return kind()
    except TypeError:  # a list's type needs that of its elements
        return None


def _row_by_row(df: DataFrame, model: Any, outputs: list[str]) -> DataFrame:
    """For models of others, whose get_prediction_fn looks at whole rows."""
    # Pickled here, because Spark's own pickling fails for some functions that cloudpickle can pickle.
    pickled = cloudpickle.dumps((model.get_prediction_fn(), model._row_model()))
    metadata, labels = model._get_metadata() or {}, model.getOrDefault("label_columns")

    def predicted(rows: Iterable[Row]) -> Iterator[list[np.ndarray]]:
        function, own_model = pickle.loads(pickled)  # noqa: S301 - the user's own model
        for row in rows:
            found = function(own_model, row)
            yield [_numpy(value) for value in (found if isinstance(found, (list, tuple)) else [found])]

    found = next(predicted(df.take(1)), [np.zeros(1)] * len(outputs))
    kinds = [
        _kind(df, metadata, label, values.size, bool(np.issubdtype(values.dtype, np.inexact)))
        for label, values in zip(labels, found, strict=True)
    ]

    def rows(partition: Iterator[Row]) -> Iterator[tuple[Any, ...]]:
        of_partition, copies = itertools.tee(partition)
        for row, predictions in zip(of_partition, predicted(copies), strict=True):
            values = []
            for kind, prediction in zip(kinds, predictions, strict=True):
                numbers = prediction.reshape(-1)
                values.append(Vectors.dense(numbers) if isinstance(kind, VectorUDT) else numbers[0].item())
            yield (*row, *values)

    added = [StructField(name, kind) for name, kind in zip(outputs, kinds, strict=True)]
    return df.sparkSession.createDataFrame(df.rdd.mapPartitions(rows), StructType([*df.schema.fields, *added]))


def _numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)
