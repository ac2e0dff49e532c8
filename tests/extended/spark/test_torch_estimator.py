"""TorchEstimator: what it trains, on which rows, and what comes of it."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import object_stores
import pytest
from error_codes import ends_with
from event_words import NOTHING_IS_TRAINED
from worlds import Keeper

from horovod.base.errors import DataCode, TrainingCode

pytest.importorskip("pyspark")
import torch
import torch.nn.functional as F
from estimator_site import WorldBackend, spark  # noqa: F401 - a fixture
from pyspark import TaskContext
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.sql.types import DoubleType, FloatType

from horovod.spark.common import util
from horovod.spark.common.backend import LocalBackend
from horovod.spark.common.data_files import write
from horovod.spark.common.store import FilesystemStore, Store
from horovod.spark.torch import TorchEstimator, TorchModel

ROWS = 21
pytestmark = pytest.mark.timeout(300)
WEIGHTS = np.array([1.0, -2.0, 3.0])


@pytest.fixture(scope="module")
def backend() -> Iterator[WorldBackend]:
    with Keeper(2, "shm", {}) as keeper:
        yield WorldBackend(keeper)


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:  # noqa: F811
    features = np.random.default_rng(0).normal(size=(ROWS, 3))
    rows = [
        (
            Vectors.dense(row),
            float(row @ WEIGHTS),
            place,
            [float(value) for value in row[:2]],
            1.0 + place % 2,
            place < 16,
        )
        for place, row in enumerate(features)
    ]
    return spark.createDataFrame(rows, ["features", "label", "number", "pair", "weight", "isVal"]).cache()


def linear(inputs: int = 3, outputs: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, outputs)


@pytest.fixture
def estimator(backend: WorldBackend, tmp_path: Path) -> Callable[..., TorchEstimator]:
    """Makes estimators that share a store."""

    def make(**changed: Any) -> TorchEstimator:
        model = changed.pop("model", None) or linear()
        arguments: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            "loss": F.mse_loss,
            "backend": backend,
            "store": Store.create(str(tmp_path)),
            "feature_cols": ["features"],
            "label_cols": ["label"],
            "batch_size": 4,
            "epochs": 2,
            "verbose": 0,
            "partitions_per_process": 1,
            "random_seed": 7,
        }
        return TorchEstimator(**{**arguments, **changed})

    return make


def one_process(df: Any, store: Any, epochs: int, lr: float, momentum: float) -> torch.nn.Module:
    """The same training without Horovod: each step over the batches of both ranks together."""
    from horovod.data import ParquetReader

    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    path = store.get_train_data_path(0)
    readers = [ParquetReader(path, batch_size=4, rank=rank, size=2, seed=7) for rank in (0, 1)]
    seen: list[float] = []
    for _ in range(epochs):
        for batches in zip(*readers, strict=True):
            features, labels = (
                torch.from_numpy(np.concatenate([batch[name] for batch in batches])).float()
                for name in ("features", "label")
            )
            seen += labels.tolist()
            optimizer.zero_grad()
            F.mse_loss(model(features)[:, 0], labels).backward()
            optimizer.step()
    assert sorted(seen) == pytest.approx(sorted([row.label for row in df.collect()] * epochs), rel=1e-5)
    return model


def test_is_training_on_one_process_and_resumes_it(df: Any, estimator: Callable[..., TorchEstimator]) -> None:
    model = estimator(run_id="first").fit(df)
    store = estimator().getStore()
    expected = one_process(df, store, epochs=2, lr=0.1, momentum=0.9)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.getModel().state_dict()[name], value)
    assert model.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)  # that of one process
    assert [record["epoch"] for record in model.getHistory()] == [0, 1]
    assert store.exists(store.get_checkpoint_path("first"))
    assert model.getRunId() == "first"
    with pytest.raises(ValueError, match=ends_with(DataCode.TOO_FEW_ROWS, ROWS, 100)):  # though these data are there
        estimator(backend=LocalBackend(100)).fit(df)


def test_resumes_as_if_undisturbed(df: Any, estimator: Callable[..., TorchEstimator]) -> None:
    def made(run_id: str, epochs: int, **changed: Any) -> TorchEstimator:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        arguments = {"model": model, "optimizer": optimizer, "validation": 0.3, **changed}
        return estimator(run_id=run_id, epochs=epochs, random_seed=None, **arguments).setRandomSeed(7)

    made("first", 2).fit(df)
    undisturbed, resumed = made("second", 4).fit(df), made("first", 4).fit(df)
    assert resumed.getHistory() == undisturbed.getHistory()
    for name, value in undisturbed.getModel().state_dict().items():
        assert torch.equal(resumed.getModel().state_dict()[name], value)
    with pytest.warns(UserWarning, match=NOTHING_IS_TRAINED):
        assert made("first", 3).fit(df).getHistory() == resumed.getHistory()
    other = linear()
    for changed, facts in (
        ({"model": other, "optimizer": torch.optim.Adam(other.parameters())}, ["first", "model"]),
        ({"model": other, "optimizer": torch.optim.SGD(other.parameters())}, ["first", "Adam", "SGD"]),
    ):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, *facts)):
            made("first", 5, **changed).fit(df)


@pytest.fixture(scope="module")
def s3() -> Iterator[object_stores.Service]:
    with object_stores.service("s3") as service:
        yield service


class Unlucky(FilesystemStore):
    """On it, first attempts of tasks fail, or are killed, when they have written a file."""

    def write(self, path: str, content: bytes) -> None:
        super().write(path, content)
        task = TaskContext.get()
        if task is not None and task.attemptNumber() == 0:
            if task.partitionId() == 0:
                raise OSError("the connection is gone")
            if task.partitionId() == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def test_data_are_the_same_where_spark_has_no_file_system(
    s3: object_stores.Service,
    spark: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """On a disk Spark writes by itself, on S3 its tasks do."""
    cloudpickle.register_pickle_by_value(__import__(__name__))
    columns = ["byte", "smallint", "int", "bigint", "float", "double", "string", "decimal(7, 3)", "decimal(30, 2)"]
    frame = spark.range(0, 100, 1, 3).selectExpr(
        *(f"cast(id AS {kind}) AS `{kind}`" for kind in columns),
        "id % 2 = 0 AS boolean",
        "cast(cast(id AS string) AS binary) AS binary",
        "date_add(date'1960-01-01', cast(id * 500 AS int)) AS date",
        "timestamp_micros(id * 1000000000001) AS time",
        "IF(id % 3 = 0, NULL, id) AS nulls",
        "array(id, NULL) AS list",
        "array(array(1.5f, cast(id AS float)), array(2f)) AS lists",
        "array(timestamp'2020-01-01 12:00:00') AS times",
    )
    there = Unlucky(s3.url("frames").replace("s3:", "s3a:"), storage_options=s3.options())
    tables = []
    for store in (Store.create(str(tmp_path)), there):
        path = store.get_train_data_path()
        store.write(f"{path}/part-00000-of-an-earlier-fit.parquet", b"")
        assert write(frame, path, store).rows == 100
        tables.append(store.get_parquet_dataset(path).read())
    assert tables[1].schema.equals(tables[0].schema)
    assert tables[1].equals(tables[0])
    folder = there.get_localized_path(there.prefix_path)
    there.fs.invalidate_cache()
    found = [name.removeprefix(folder) for name in there.fs.find(folder)]
    assert [re.sub("-[0-9a-f]{32}-", "-", name) for name in sorted(found)] == [
        f"/intermediate_train_data/part-{partition:05d}-00000.snappy.parquet" for partition in range(3)
    ]
    assert write(spark.range(0), path, there).rows == 0
    assert not there.is_parquet_dataset(path)


def test_a_run_in_an_object_store_goes_on(
    s3: object_stores.Service, df: Any, estimator: Callable[..., TorchEstimator]
) -> None:
    """Data and runs are on S3, for which Spark has no file system: its tasks and the ranks read and write there."""
    store = FilesystemStore(s3.url("experiments"), storage_options=s3.options())

    def made(run_id: str, epochs: int, store: Store = store) -> TorchEstimator:
        return estimator(run_id=run_id, epochs=epochs, store=store, validation="isVal")

    def fit(*arguments: Any) -> TorchModel:
        return made(*arguments).fit_on_parquet(dataset_idx=0)  # type: ignore[no-any-return]

    undisturbed = made("undisturbed", 2).fit(df)
    first = fit("first", 1)
    assert first.getHistory() == undisturbed.getHistory()[:1]
    resumed = fit("first", 2)
    assert resumed.getHistory() == undisturbed.getHistory()
    assert "validation" in resumed.getHistory()[1]
    for name, value in undisturbed.getModel().state_dict().items():
        assert torch.equal(resumed.getModel().state_dict()[name], value)
    folder = store.get_localized_path(store.get_run_path("first"))
    store.fs.invalidate_cache()
    assert store.fs.find(folder) == [f"{folder}/checkpoint"]

    # What can't be seen is not taken for a run that is still to begin.
    data = {"train_path": store.get_train_data_path(), "val_path": store.get_val_data_path()}
    mistyped = FilesystemStore(s3.url("runs", bucket="mistyped"), **data, storage_options=s3.options())
    with pytest.raises(OSError, match=ends_with(DataCode.DATA_STORE_FAILED, "mistyped")):
        fit("first", 3, mistyped)
    with s3.refusing_keys(), pytest.raises(OSError, match=ends_with(DataCode.DATA_STORE_FAILED, "first/checkpoint")):
        estimator(store=store)._has_checkpoint("first")


def test_pipeline_is_saved_and_loaded(df: Any, estimator: Callable[..., TorchEstimator], tmp_path: Path) -> None:
    columns = df.selectExpr("pair[0] AS a", "pair[1] AS b", "cast(label AS float) AS label", "label AS other")
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="assembled")
    model = linear(2, 5)
    stage = estimator(model=model, feature_cols=["assembled"], loss=lambda output, label: output.pow(2).mean())
    stage.setLabelCols(["label"]).setEpochs(1)
    pipeline = Pipeline(stages=[assembler, stage])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    unfit = Pipeline.load(str(tmp_path / "pipeline")).getStages()[1]
    assert unfit.getStore() is None
    assert unfit.getBackend() is None
    assert (unfit.getBatchSize(), unfit.getFeatureCols()) == (4, ["assembled"])
    assert unfit.getOptimizer().param_groups[0]["params"][0] is unfit.getModel().weight

    fitted = pipeline.fit(columns)
    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    loaded = PipelineModel.load(str(tmp_path / "fitted"))
    assert isinstance(loaded.stages[1], TorchModel)
    rows = loaded.transform(columns).collect()
    features = torch.tensor([[row.a, row.b] for row in rows], dtype=torch.float32)
    expected = fitted.stages[1].getModel()(features).detach().numpy()
    assert all(isinstance(row.label__output, DenseVector) for row in rows)
    np.testing.assert_allclose([row.label__output.toArray() for row in rows], expected, rtol=1e-5)


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = torch.nn.Linear(3, 1), torch.nn.Linear(2, 2)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, features: torch.Tensor, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert pair.shape[1:] == (1, 2)
        return self.one(self.dropout(features)), self.two(pair[:, 0])


def double(frame: Any) -> Any:
    frame["label"] = frame["label"] * 2
    frame["number"] = [[value, value + 1] for value in frame["number"]]
    frame["features"] = frame["features"] * 10
    return frame


def test_several_inputs_labels_and_all_that_is_optional(df: Any, estimator: Callable[..., TorchEstimator]) -> None:
    import horovod.torch as hvd

    cloudpickle.register_pickle_by_value(__import__(__name__))
    seen: list[Any] = []
    made = estimator(
        model=TwoHeads(),
        loss=None,
        loss_constructors=[torch.nn.MSELoss, torch.nn.MSELoss],
        loss_weights=[1.0, 0.25],
        metrics=[F.l1_loss],
        callbacks=[seen.append],
        feature_cols=["features", "pair"],
        label_cols=["label", "number"],
        input_shapes=[[-1, 3], [-1, 1, 2]],
        sample_weight_col="weight",
        validation="isVal",
        val_batch_size=3,
        transformation_fn=double,
        transformation_edit_fields=[("number", np.int64, (2,), False)],
        gradient_compression=hvd.Compression.fp16,
        backward_passes_per_step=2,
        train_steps_per_epoch=3,
        inmemory_cache_all=True,
        epochs=1,
    )
    model = made.setOptimizer(torch.optim.Adam(made.getModel().parameters(), lr=0.01)).fit(df)
    (record,) = model.getHistory()
    assert set(record) == {"epoch", "train", "validation"}
    assert len(record["validation"]["all_metrics"]) == 1
    result = model.setOutputCols(["one", "two"]).transform(df.select("features", "pair"))  # without labels
    row = result.first()
    assert row.two.size == 2
    changed = torch.tensor([row.features.toArray() * 10], dtype=torch.float32)
    assert row.one == pytest.approx(model.getModel().one(changed).item(), rel=1e-5)


def test_fits_on_parquet_and_only_on_what_fits(
    spark: Any,  # noqa: F811
    df: Any,
    estimator: Callable[..., TorchEstimator],
) -> None:
    made = estimator(epochs=1, feature_cols=["pair"], model=linear(2))
    store = made.getStore()
    df.select("pair", "label").write.parquet(store.get_train_data_path())
    model = made.fit_on_parquet({made.run_id: "parquet"})
    assert model.getRunId() == "parquet"
    assert model.transform(df).schema["label__output"].dataType == DoubleType()
    with pytest.raises(ValueError, match=ends_with(DataCode.TOO_FEW_ROWS, "validation=0.5")):
        made.fit_on_parquet({made.validation: 0.5})

    unlike = spark.createDataFrame([([1.0], 1.0), ([1.0, 2.0], 2.0)], ["pair", "label"])
    with pytest.raises(ValueError, match=ends_with(DataCode.DIFFERENT_SHAPES, "pair", 1, 2)):
        made.fit(unlike)
    for row, column in ((([1.0], None), "label"), ((None, 1.0), "pair"), (([None], 1.0), "pair")):
        missing = spark.createDataFrame([([1.0], 1.0), row], ["pair", "label"])
        with pytest.raises(ValueError, match=ends_with(DataCode.NULL_VALUE, column, "1 rows")):
            made.fit(missing)
    with pytest.raises(ValueError, match=ends_with(DataCode.DIFFERENT_SHAPES, "pair", 2, 3)):
        made.setInputShapes([[-1, 3]]).fit(df)
    with pytest.raises(ValueError, match=ends_with(DataCode.TOO_FEW_ROWS)):
        made.setInputShapes(None).fit(df.limit(1))
    with pytest.raises(ValueError, match=ends_with(DataCode.DIFFERENT_SHAPES, "sample_weight_col", "pair")):
        made.fit(df, {made.sample_weight_col: "pair"})
    with pytest.raises(ValueError, match=ends_with(DataCode.MISSING_COLUMN, "absent")):
        made.fit(df, {made.feature_cols: ["absent"]})
    for validation in (1.5, True, "absent"):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "validation")):
            made.fit(df, {made.validation: validation})
    with pytest.raises(ValueError, match=ends_with(DataCode.UNSUPPORTED_COLUMN, "text")):
        made.fit(df.selectExpr("'a' AS text", "pair", "label"), {made.feature_cols: ["text"]})


def test_data_are_split_and_stored_exactly(spark: Any, df: Any, tmp_path: Path) -> None:  # noqa: F811
    store = Store.create(str(tmp_path))
    sparse = Vectors.sparse(5, [1, 4], [2.0, 3.0])
    frame = spark.createDataFrame(
        [(place, sparse if place % 2 else Vectors.sparse(5, [0], [1.0]), random.random()) for place in range(40)],
        ["number", "vector", "x"],
    ).selectExpr("number", "vector", "cast(x AS float) AS x")
    arguments: dict[str, Any] = {
        "num_processes": 2,
        "store": store,
        "df": frame,
        "label_columns": ["x"],
        "feature_columns": ["number", "vector"],
    }
    util.clear_training_cache()
    with util.prepare_data(**arguments, validation=0.25, compress_sparse=True) as first:
        train_rows, val_rows, metadata, row_bytes = util.get_dataset_properties(first)
        assert train_rows + val_rows == 40
        assert row_bytes > 0
        assert metadata["vector"]["shape"] == 5
        assert metadata["vector"]["max_size"] == 2
        assert metadata["vector"]["intermediate_format"] == "custom_sparse_format"
        parts = [spark.read.parquet(path(first)) for path in (store.get_train_data_path, store.get_val_data_path)]
        numbers = [row.number for part in parts for row in part.collect()]
        assert sorted(numbers) == list(range(40))
        assert {len(row.vector) for row in parts[0].collect()} == {5}
        with util.prepare_data(**arguments, validation=0.25, compress_sparse=True) as same:
            assert same == first == 0
        with util.prepare_data(**{**arguments, "df": frame.repartition(50)}) as beside:
            assert beside == 1
            train_rows, _, described, _ = util.get_dataset_properties(beside)
            assert train_rows == 40, "some partitions are empty"
            assert described["vector"]["intermediate_format"] == "nochange"
            assert described["x"]["spark_data_type"] is DoubleType  # as it is stored beside a vector
    with util.prepare_data(**{**arguments, "df": df, "label_columns": ["label"], "feature_columns": ["pair"]}) as given:
        assert given == 0
    frame = frame.selectExpr("*", "array(array(x, x, x), array(x, x, x)) AS lists", "array('a') AS words")
    types, shapes, sizes = util._get_col_info(frame.drop("words"))
    assert (shapes["vector"], sizes["vector"], types["x"], shapes["lists"]) == (5, 2, {float}, 6)
    with pytest.raises(ValueError, match=ends_with(DataCode.UNSUPPORTED_COLUMN, "words")):
        util._get_col_info(frame)
    assert frame.schema["x"].dataType == FloatType()
