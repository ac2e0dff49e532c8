"""The lightning TorchEstimator, with both names of Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from error_codes import ends_with
from event_words import NOTHING_IS_TRAINED
from worlds import Keeper

from horovod.base.errors import DataCode, TrainingCode

pytest.importorskip("pyspark")
pytest.importorskip("lightning")
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from estimator_site import WorldBackend, spark  # noqa: F401 - a fixture
from pyspark import keyword_only
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.ml.param import Param, Params
from pyspark.sql import functions

from horovod.spark.common.store import Store
from horovod.spark.lightning import TorchEstimator, TorchModel

ROWS = 21
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def backend() -> Iterator[WorldBackend]:
    cloudpickle.register_pickle_by_value(__import__(__name__))
    with Keeper(2, "shm", {}) as keeper:
        yield WorldBackend(keeper)


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:  # noqa: F811
    features = np.random.default_rng(0).normal(size=(ROWS, 3))
    rows = [(Vectors.dense(row), float(row.sum()), 1.0 + place % 2) for place, row in enumerate(features)]
    return spark.createDataFrame(rows, ["features", "label", "weight"]).cache()


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self(batch["features"])[:, 0], batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch["label"]))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


@pytest.fixture
def estimator(backend: WorldBackend, tmp_path: Path) -> Callable[..., TorchEstimator]:
    """Makes estimators that share a store."""

    def make(**changed: Any) -> TorchEstimator:
        arguments: dict[str, Any] = {
            "model": Lit(),
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


class Harmful:
    """Makes the folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self._folder,)


def one_process(store: Any, epochs: int) -> dict[str, torch.Tensor]:
    """The same training without Horovod and Lightning: each step over the batches of both ranks together."""
    from horovod.data import ParquetReader

    model = Lit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    readers = [ParquetReader(store.get_train_data_path(0), batch_size=4, rank=rank, size=2, seed=7) for rank in (0, 1)]
    for _ in range(epochs):
        for batches in zip(*readers, strict=True):
            features, labels = (
                torch.from_numpy(np.concatenate([batch[name] for batch in batches])).float()
                for name in ("features", "label")
            )
            optimizer.zero_grad()
            F.mse_loss(model(features)[:, 0], labels).backward()
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    return model.state_dict()


def test_is_training_on_one_process_and_resumes_it(
    df: Any, estimator: Callable[..., TorchEstimator], tmp_path: Path
) -> None:
    model = estimator(run_id="first", callbacks=[pl.callbacks.ModelCheckpoint(filename="{epoch}", save_top_k=-1)]).fit(
        df
    )
    store = estimator().getStore()
    for name, value in one_process(store, 2).items():
        torch.testing.assert_close(model.getModel().state_dict()[name], value)
    assert [record["epoch"] for record in model.getHistory()] == [0, 1]
    assert store.exists(store.get_checkpoint_path("first"))
    assert len([name for name in store.get_checkpoints("first") if "epoch=" in name]) == 2
    resumed = estimator(run_id="first", epochs=3).fit(df)
    for name, value in one_process(store, 3).items():
        torch.testing.assert_close(resumed.getModel().state_dict()[name], value)
    assert len(resumed.getHistory()) == 3
    with pytest.warns(UserWarning, match=NOTHING_IS_TRAINED):
        done = estimator(run_id="first", epochs=1).fit(df)
    assert done.getHistory() == resumed.getHistory()
    other = Lit()
    other.layer = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "layer.weight", "run_id")):
        estimator(run_id="first", epochs=4, model=other).fit(df)
    row = done.transform(df).first()
    path = Path(store.get_checkpoint_path("first").removeprefix("file://"))
    ran = tmp_path / "ran"
    harmful = torch.load(path, weights_only=False) | {"callbacks": {"Own": Harmful(str(ran))}}
    torch.save(harmful, path)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.UNTRUSTED_CHECKPOINT, "'first'", "add_safe_globals")):
        estimator(run_id="first", epochs=4).fit(df)
    assert not ran.exists(), "the code of whoever has written the checkpoint ran"

    expected = resumed.getModel()(torch.tensor(row.features.toArray()).float()).item()
    assert row.label__output == pytest.approx(expected, rel=1e-5)


class Normed(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.2), self.layer)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        loss = F.mse_loss(self(batch["features"])[:, 0], batch["label"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["label"]))

    def on_train_epoch_start(self) -> None:
        self.log("rate", self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def test_resumes_as_if_undisturbed(df: Any, estimator: Callable[..., TorchEstimator]) -> None:
    def fit(run_id: str, epochs: int) -> TorchModel:
        stopping = pl.callbacks.EarlyStopping("train_loss", patience=3, min_delta=100.0)
        return estimator(model=Normed(), run_id=run_id, epochs=epochs, validation=0.3, callbacks=[stopping]).fit(df)

    fit("first", 2)
    undisturbed, resumed = fit("second", 8), fit("first", 8)
    assert resumed.getHistory() == undisturbed.getHistory()
    assert len(resumed.getHistory()) == 4, "it stops after three epochs that are no better than the first"
    assert resumed.getHistory()[3]["rate"] < resumed.getHistory()[0]["rate"]
    for name, value in undisturbed.getModel().state_dict().items():
        assert torch.equal(resumed.getModel().state_dict()[name], value)


def test_a_plain_module_and_all_that_is_optional(
    df: Any, estimator: Callable[..., TorchEstimator], tmp_path: Path
) -> None:
    import horovod.torch as hvd

    model = torch.nn.Linear(3, 1)
    made = estimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=F.mse_loss,
        validation=0.3,
        sample_weight_col="weight",
        gradient_compression=hvd.Compression.fp16,
        backward_passes_per_step=2,
        train_steps_per_epoch=3,
        train_async_data_loader_queue_size=2,
        terminate_on_nan=True,
        trainer_args={"gradient_clip_val": 1.0},
        transformation_fn=lambda row: {**row, "features": row["features"] * 10, "label": row["label"] + 1},
    )
    fitted = made.fit(df)
    row = fitted.transform(df.drop("label")).first()
    changed = torch.tensor([row.features.toArray() * 10], dtype=torch.float32)
    assert row.label__output == pytest.approx(fitted.getModel()(changed).item(), rel=1e-5)
    assert set(fitted.getHistory()[0]) == {"epoch", "train_loss", "val_loss"}
    assert fitted.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.01)
    fitted.write().overwrite().save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    assert torch.equal(loaded.getModel().weight, fitted.getModel().weight)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "optimizer, loss")):
        made.setModel(Lit()).fit(df)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "__version__", "1.9.5")
        with pytest.raises(RuntimeError, match=ends_with(DataCode.MISSING_DATA_PACKAGE, "1.9.5")):
            estimator().fit(df)


def test_the_older_name(df: Any, estimator: Callable[..., TorchEstimator]) -> None:
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.LightningModule):  # type: ignore[misc, name-defined]
        __init__, forward, training_step, configure_optimizers = (
            lambda self: (older.LightningModule.__init__(self), setattr(self, "layer", torch.nn.Linear(3, 1)))[0],
            Lit.forward,
            Lit.training_step,
            Lit.configure_optimizers,
        )

    fitted = estimator(model=Older(), epochs=1).fit(df)
    assert len(fitted.getHistory()) == 1


class Counting(pl.LightningModule):
    """Takes other columns than those of the DataFrame: transformation_fn makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        return self.layer(counts)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert set(batch) == {"counts", "kind"}
        return F.cross_entropy(self(batch["counts"]), batch["kind"].long())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def counts(text: str) -> np.ndarray:
    return np.array([text.count("a"), text.count("b")], dtype=np.float32)


class TextModel(TorchModel):
    """As libraries derive theirs: with parameters of its own, asked row by row, one more column behind the output."""

    text_col: Any = Param(Params._dummy(), "text_col", "column with the text")

    @keyword_only
    def __init__(self, **_: Any) -> None:
        given = self._input_kwargs
        super().__init__()
        self._setDefault(text_col="text", outputCols=["output"], label_columns=["label"])
        self._set(**given)
        self.setFeatureColumns([self.getOrDefault("text_col")])
        self.setLabelColoumns(["label"])

    def getOptimizer(self) -> None:  # noqa: N802
        return None

    def get_prediction_fn(self) -> Any:
        text_col = self.getOrDefault("text_col")
        return lambda model, row: model(torch.from_numpy(counts(row[text_col]))[None])

    def _transform(self, df: Any) -> Any:
        (output,) = self.getOutputCols()
        return super()._transform(df).withColumn("prediction", array_argmax(output))


def array_argmax(column: str) -> Any:
    values = vector_to_array(column)
    return functions.array_position(values, functions.array_max(values)) - 1


class TextEstimator(TorchEstimator):
    text_col: Any = Param(Params._dummy(), "text_col", "column with the text")

    def _fit(self, dataset: Any) -> Any:
        return super()._fit(dataset)

    def _get_or_create_backend(self) -> Any:
        assert self.getNumProc() is None
        return self.getBackend()

    def get_model_class(self) -> type:
        return TextModel

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "input_shapes": self.getInputShapes(),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
            "text_col": self.getOrDefault("text_col"),
        }


def test_a_library_derives_from_it(spark: Any, backend: WorldBackend, tmp_path: Path) -> None:  # noqa: F811
    texts = spark.createDataFrame([("ab" * place, place % 3) for place in range(8)], ["text", "label"])
    made = TextEstimator(
        model=Counting(),
        backend=backend,
        store=Store.create(str(tmp_path)),
        feature_cols=["text"],
        label_cols=["label"],
        transformation_fn=lambda row: {**row, "counts": counts(row["text"]), "kind": row["label"]},
        transformation_edit_fields=[("counts", np.float32, None, True), ("kind", int, None, False)],
        transformation_removed_fields=["text", "label"],
        verbose=0,
    )
    fitted = made._set(text_col="text").fit(texts)
    assert isinstance(fitted, TextModel)
    for row in fitted.transform(texts).collect():
        expected = fitted.getModel()(torch.from_numpy(counts(row.text))).tolist()
        assert row.output.toArray() == pytest.approx(expected, rel=1e-5)
        assert row.prediction == np.argmax(expected)
