"""Rows that can't be trained on, as they have nulls, NaN or infinities: refused with Python that drops them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Final

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DataType

from horovod.base.errors import DataCode
from horovod.spark.common.columns import Facts, missing, quoted
from horovod.spark.common.params import refused

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
        f"Replace them, or drop such rows with {drop}{with_imports}. If the model is made for such values, say so with "
        f"transformation_edit_fields={[(name, None, None, True) for name in columns]}."
    )


def _flat(name: str, kind: ArrayType) -> str:
    """The SQL of all values in a list, or a list of lists."""
    found = quoted(name)
    while isinstance(kind.elementType, ArrayType):
        found, kind = f"flatten({found})", kind.elementType
    return found
