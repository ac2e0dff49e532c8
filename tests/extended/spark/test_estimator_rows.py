"""Rows that estimators refuse, and what models predict of rows. Nothing is trained here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from error_codes import ends_with

from horovod.base.errors import DataCode, TrainingCode

pytest.importorskip("pyspark")
import torch
import torch.nn.functional as F
from estimator_site import spark  # noqa: F401 - a fixture
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.sql import functions
from pyspark.sql.types import DoubleType, FloatType, LongType

from horovod.spark.common.backend import LocalBackend
from horovod.spark.common.batches import FiniteColumns
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(__import__(__name__))


class Sums(torch.nn.Module):
    def forward(self, lists: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert lists.ndim == 3
        return lists.sum((1, 2)).to(number.dtype) + number


def test_predictions_have_the_types_of_labels_and_no_rows_without_values(spark: Any) -> None:  # noqa: F811
    rows = spark.range(0, 6, 1, 4).filter("id < 2")  # some partitions are empty
    labels = {"integer": "1", "single": "1f", "decimal": "1.5BD", "text": "'a'", "list": "array(1f)"}
    columns = {"lists": "array(array(1BD, 2BD), array(3BD, 4BD))", "number": "id", **labels}

    def select(**changed: str) -> Any:
        return rows.selectExpr(*(f"{value} AS {name}" for name, value in {**columns, **changed}.items()))

    def model(label: str) -> TorchModel:
        known = {label: {"prediction": (1, False)}}  # one whole number, as training has seen
        return TorchModel(model=Sums(), feature_columns=["lists", "number"], label_columns=[label], _metadata=known)

    frame = select()
    for label in labels:
        frame = model(label).transform(frame)
    found = {name: frame.schema[f"{name}__output"].dataType.simpleString() for name in labels}
    assert found == {"integer": "int", "single": "float", "decimal": "double", "text": "double", "list": "double"}
    assert sorted(row.integer__output for row in frame.collect()) == [10, 11]

    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "number")):
        model("text").setOutputCols(["number"]).transform(select())
    without, unlike = "IF(id = 1, NULL, id)", "IF(id = 1, array(array(1f)), array(array(1f), array(2f)))"
    without_one = "array(array(1f), array(IF(id = 1, NULL, 1f)))"
    for frame, code in (
        (select(number=without), DataCode.NULL_VALUE),
        (select(lists=without_one), DataCode.NULL_VALUE),
        (select(lists=unlike), DataCode.DIFFERENT_SHAPES),
    ):
        with pytest.raises(Exception, match=re.escape(f"[{code}]")):
            model("text").transform(frame.coalesce(1)).collect()


class Logarithms(torch.nn.Module):
    """One number, and two, of each row: NaN for negative ones."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.log(), torch.stack([x.log(), x], 1)


class LogarithmsByRow(TorchModel):
    def get_prediction_fn(self) -> Any:
        return lambda model, row: model(torch.tensor([row.x]))


@pytest.mark.parametrize("cls", [TorchModel, LogarithmsByRow])
def test_a_prediction_that_is_nan_is_no_missing_value(cls: type[TorchModel], spark: Any) -> None:  # noqa: F811
    """A mean over the rows would leave out those that a model can't predict."""
    df = spark.createDataFrame([(1.0,), (-1.0,), (math.inf,)], ["x"]).selectExpr("cast(x AS float) AS x")
    labels = {"number": {"spark_data_type": FloatType}, "pair": {"spark_data_type": DenseVector}}
    for known in (labels, {}):
        model = cls(model=Logarithms(), feature_columns=["x"], label_columns=["number", "pair"], _metadata=known)
        found = model.transform(df)
        assert found.schema["number__output"].dataType == (FloatType() if known else DoubleType())
        one, negative, infinite = found.collect()
        assert (one.number__output, infinite.number__output) == (0.0, math.inf)
        assert math.isnan(negative.number__output)
        np.testing.assert_equal(negative.pair__output.toArray(), [math.nan, -1.0])
        assert math.isnan(found.agg({"number__output": "avg"}).first()[0])


class Plus(torch.nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + other


def of_batches(frame: Any) -> Any:
    """Makes numbers of text and times, changes the label, and sorts."""
    frame["x"] = frame["x"] * 10
    frame["text"] = frame["text"].str.len().astype(float)
    frame["label"] = frame["label"] / 2
    return frame.sort_values("x", ascending=False)


def of_rows(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"] * 10, "text": float(len(row["text"])), "label": row["label"] / 2}


def hours(frame: Any) -> Any:
    frame["x"] = frame["x"].dt.hour.astype(float)
    frame["text"] = 0.0
    return frame


LOOKS: dict[str, Any] = {
    "x": {"batch": ("<f8", ())},
    "text": {"batch": ("str", ())},
    "label": {"batch": ("<i8", ()), "spark_data_type": LongType},
}


@pytest.fixture
def changing(spark: Any) -> Callable[..., TorchModel]:  # noqa: F811
    """A model that was trained with a transformation_fn."""

    def make(function: Any, **looks: Any) -> TorchModel:
        known = {name: {**described, **looks.get(name, {})} for name, described in LOOKS.items()}
        model = TorchModel(model=Plus(), feature_columns=["x", "text"], label_columns=["label"], _metadata=known)
        known["label"]["prediction"] = (1, True)
        return model.setTransformationFn(function)  # type: ignore[no-any-return]

    return make


@pytest.mark.parametrize("function", [of_batches, of_rows])
def test_predictions_are_of_changed_features(
    function: Any,
    changing: Callable[..., TorchModel],
    spark: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """As the training had them, with labels in the DataFrame or without, also when the model was saved in between."""
    model = changing(function)
    df = spark.createDataFrame([(float(place), "a" * place, -1) for place in range(600)], ["x", "text", "label"])
    model.write().overwrite().save(str(tmp_path))
    expected = [11.0 * place for place in range(600)]
    assert [row.label__output for row in model.transform(df).collect()] == expected
    loaded = TorchModel.load(str(tmp_path))
    assert [row.label__output for row in loaded.transform(df.drop("label")).collect()] == expected


def test_features_that_can_not_be_changed_as_in_the_training(
    changing: Callable[..., TorchModel],
    spark: Any,  # noqa: F811
) -> None:
    df = spark.createDataFrame([(float(place), "a") for place in range(3)], ["x", "text"]).coalesce(1)
    for function, code, facts in (
        (lambda frame: frame[frame["x"] > 1], DataCode.INVALID_BATCH, "made 1 rows of 3"),
        (lambda frame: frame.drop(columns="x"), DataCode.MISSING_COLUMN, "no column 'x'"),
        (lambda frame: frame.merge(None), DataCode.INVALID_BATCH, "'label' have ones"),
    ):
        with pytest.raises(Exception, match=f"(?s){facts}.*{re.escape(f'[{code}]')}"):
            changing(function).transform(df).collect()
    raw = changing(of_batches).setTransformationFn(None)
    assert raw.transform(df.selectExpr("x", "x + 1 AS text")).first().label__output == 1.0


def test_times_are_those_of_the_files(changing: Callable[..., TorchModel], spark: Any) -> None:  # noqa: F811
    """Which have UTC, wherever Spark believes to be."""
    spark.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    try:
        df = spark.sql("SELECT timestamp'2026-03-08 10:30:00 UTC' AS x, 'a' AS text")
        model = changing(hours, x={"batch": ("<M8[ns]", ())})
        assert model.transform(df).first().label__output == 10.0
    finally:
        spark.conf.unset("spark.sql.session.timeZone")


def estimator(store: Any, **changed: Any) -> TorchEstimator:
    model = torch.nn.Linear(2, 1)
    arguments: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": F.mse_loss,
        "backend": LocalBackend(1),
        "store": store,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "verbose": 0,
    }
    return TorchEstimator(**{**arguments, **changed})


def advice(text: str, df: Any) -> Any:
    """The DataFrame that the sentence says to use instead."""
    (code,) = re.findall(r"drop \S+(?: \S+)? with (df\..*?)(?: \(from|\. If|\. \[)", text)
    return eval(code, {"df": df, "F": functions, "vector_to_array": vector_to_array})


def test_rows_without_values_are_dropped_as_the_error_says(spark: Any, tmp_path: Path) -> None:  # noqa: F811
    rows = [([1.0], 1.0, [[1.0]]), ([None], 1.0, [[1.0]]), ([2.0], None, [[1.0]]), ([3.0], 1.0, [[None]])]
    rows += [(None, 1.0, [[1.0]]), ([4.0], 1.0, [None])]
    df = spark.createDataFrame(rows, "`a list` array<double>, `y` double, lists array<array<double>>")
    made = estimator(Store.create(str(tmp_path)), feature_cols=["a list", "lists"])
    facts = "5 rows", "'a list'", "'lists'", "'y'"
    with pytest.raises(ValueError, match=ends_with(DataCode.NULL_VALUE, *facts)) as raised:
        made.fit(df)
    assert [row["a list"] for row in advice(str(raised.value), df).collect()] == [[1.0]]

    known = {"y": {"prediction": (1, True), "spark_data_type": DoubleType}}
    model = TorchModel(model=Plus(), feature_columns=["a list"], label_columns=["y"], _metadata=known)
    with pytest.raises(Exception, match=re.escape(f"[{DataCode.NULL_VALUE}]")) as raised:
        model.transform(df.coalesce(1)).collect()
    (said,) = re.findall(r"A row has no value.*?\.(?= \[)", str(raised.value))[:1]
    assert advice(f"{said} [", df).count() == 4


def test_rows_with_nan_are_dropped_as_the_error_says(spark: Any, tmp_path: Path) -> None:  # noqa: F811
    kinds = {"a b": "double", "single": "float", "list": "array<float>", "lists": "array<array<double>>"}
    good = (1.0, 1.0, [1.0, 2.0], [[1.0], [2.0]], Vectors.dense([1.0, 2.0]), Vectors.sparse(2, [1], [2.0]))
    bad = (
        math.nan,
        -math.inf,
        [1.0, math.inf],
        [[1.0], [math.nan]],
        Vectors.dense([1.0, math.nan]),
        Vectors.sparse(2, [1], [math.inf]),
    )
    columns = [*kinds, "dense", "sparse"]
    rows = [good, *((*good[:place], value, *good[place + 1 :]) for place, value in enumerate(bad)), bad]
    df = spark.createDataFrame(rows, columns).select(
        *(functions.col(f"`{name}`").cast(kind).alias(name) for name, kind in kinds.items()), "dense", "sparse"
    )
    made = estimator(Store.create(str(tmp_path)), feature_cols=columns[:-1], label_cols=columns[-1:])
    facts = [f"2 rows of column {name!r}" for name in columns]
    with pytest.raises(ValueError, match=ends_with(DataCode.NOT_FINITE, *facts)) as raised:
        made.fit(df)
    assert [tuple(row) for row in advice(str(raised.value), df).collect()] == [good]
    (allowed,) = re.findall(r"transformation_edit_fields=(\[.*\])\.", str(raised.value))
    assert eval(allowed) == [(name, None, None, True) for name in columns]
    # What the user allows is looked for no more.
    made.setTransformationEditFields(eval(allowed)[:-1])
    with pytest.raises(ValueError, match=ends_with(DataCode.NOT_FINITE, "in 2 rows of column 'sparse'.")):
        made.fit(df)


def test_ranks_look_at_batches_that_spark_has_not_seen() -> None:
    """Those of fit_on_parquet(), and those that a transformation_fn has made."""
    batch = {
        "x": np.array([[1.0, math.nan], [2.0, 3.0]]),
        "other": np.array([math.inf]),
        "text": np.array(["a"], object),
    }
    for columns in (FiniteColumns(("x",), ()), FiniteColumns(None, ("other",))):
        with pytest.raises(ValueError, match=ends_with(DataCode.NOT_FINITE, "rank 3", "1 of 2 rows", "'x'")):
            columns.check(batch, 3)
    FiniteColumns(("text",), ()).check(batch, 3)
    FiniteColumns(None, ("x", "other")).check(batch, 3)
    made = estimator(None)
    prepared = {"x": {"is_finite": True}, "y": {"is_finite": True}}
    assert made._finite_for_ranks(prepared) is None
    assert made._finite_for_ranks({"x": {}, "y": {}}) == FiniteColumns(("x", "y"), ())
    made.setTransformationFn(of_rows).setTransformationEditFields([("x", None, None, True), ("y", None, None, False)])
    assert made._finite_for_ranks(prepared) == FiniteColumns(("y",), ("x",))
