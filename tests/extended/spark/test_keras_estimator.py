"""KerasEstimator, with Keras 3 on TensorFlow and with tf_keras; test_estimator_examples.py has PyTorch."""

from __future__ import annotations

import base64
import importlib.util
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from error_codes import ends_with
from worlds import Keeper

from horovod.base.errors import DataCode, TrainingCode

pytest.importorskip("pyspark")
pytest.importorskip("tensorflow")
import keras
from estimator_site import WorldBackend, spark  # noqa: F401 - a fixture
from pyspark.ml.linalg import DenseVector, Vectors

from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator, KerasModel
from horovod.spark.keras.remote import Rates
from horovod.spark.keras.tensors import inputs_for, labels_for, predictions_of, weights_for

ROWS = 21
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def backend() -> Iterator[WorldBackend]:
    with Keeper(2, "shm", {"TF_CPP_MIN_LOG_LEVEL": "2"}, preloaded="preloaded_estimators") as keeper:
        yield WorldBackend(keeper)


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:  # noqa: F811
    features = np.random.default_rng(0).normal(size=(ROWS, 3))
    rows = [
        (Vectors.dense(row), float(row.sum()), place % 3, [float(value) for value in row[:2]], 1.0 + place % 2)
        for place, row in enumerate(features)
    ]
    return spark.createDataFrame(rows, ["features", "label", "kind", "pair", "weight"]).cache()


def linear(package: Any = keras) -> Any:
    package.utils.set_random_seed(0)
    return package.Sequential([package.Input([3]), package.layers.Dense(1)])


@pytest.fixture
def estimator(backend: WorldBackend, tmp_path: Path) -> Callable[..., KerasEstimator]:
    """Makes estimators that share a store."""

    def make(**changed: Any) -> KerasEstimator:
        arguments: dict[str, Any] = {
            "model": linear(),
            "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
            "loss": "mse",
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
        return KerasEstimator(**{**arguments, **changed})

    return make


def one_process(store: Any, package: Any = keras) -> list[np.ndarray]:
    """The same training without Horovod: each step over the batches of both ranks together."""
    from horovod.data import ParquetReader

    model = linear(package)
    model.compile(package.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    readers = [ParquetReader(store.get_train_data_path(0), batch_size=4, rank=rank, size=2, seed=7) for rank in (0, 1)]
    for _ in range(2):
        for batches in zip(*readers, strict=True):
            features, labels = (
                np.concatenate([batch[name] for batch in batches]).astype(np.float32) for name in ("features", "label")
            )
            model.train_on_batch(features, labels[:, None])
    return [np.asarray(one) for one in model.get_weights()]


def check_hdf5(store: Any, run_id: str, model: Any, package: Any = keras) -> None:
    """What programs on Databricks read a checkpoint with."""
    text = store.read_serialized_keras_model(store.get_checkpoint_path(run_id), model, {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.h5")
        path.write_bytes(pickle.loads(base64.b64decode(text)))
        for value, expected in zip(
            package.models.load_model(str(path)).get_weights(), model.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(value, expected)


def test_is_training_on_one_process_and_resumes_it(df: Any, estimator: Callable[..., KerasEstimator]) -> None:
    model = estimator(run_id="first").fit(df)
    store = estimator().getStore()
    for value, expected in zip(model.getModel().get_weights(), one_process(store), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert float(model.getModel().optimizer.learning_rate) == pytest.approx(0.05)
    assert len(model.getHistory()["loss"]) == 2
    assert store.exists(store.get_checkpoint_path("first"))

    check_hdf5(store, "first", model.getModel())


def test_resumes_as_if_undisturbed(df: Any, estimator: Callable[..., KerasEstimator]) -> None:
    def fit(run_id: str, epochs: int) -> KerasModel:
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        keras.utils.set_random_seed(0)
        made = estimator(
            run_id=run_id,
            epochs=epochs,
            model=keras.Sequential([keras.Input([3]), *layers]),
            optimizer=keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)),
            validation=0.3,
        )
        return made.fit(df)

    fit("first", 2)
    undisturbed, resumed = fit("second", 4), fit("first", 4)
    assert resumed.getHistory() == undisturbed.getHistory()
    for value, expected in zip(resumed.getModel().get_weights(), undisturbed.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    for changed, facts in (({"model": linear()}, ["first", "model"]), ({"optimizer": "sgd"}, ["Adam", "SGD"])):
        made = estimator(run_id="first", epochs=5, model=resumed.getModel(), optimizer="adam")
        with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, *facts)):
            made.fit(df, {made.getParam(name): value for name, value in changed.items()})


def test_has_the_weights_that_callbacks_leave(df: Any, estimator: Callable[..., KerasEstimator]) -> None:
    """With this learning rate the loss grows, so that the first epoch is the best one."""
    stopping = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    first = estimator(optimizer=keras.optimizers.SGD(0.9), epochs=1).fit(df)
    stopped = estimator(optimizer=keras.optimizers.SGD(0.9), epochs=5, callbacks=[stopping]).fit(df)
    assert len(stopped.getHistory()["loss"]) == 2
    for value, expected in zip(stopped.getModel().get_weights(), first.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_learning_rates_in_files_leave_those_of_the_training_alone() -> None:
    optimizer = keras.optimizers.SGD(0.05)
    rates = Rates(keras, optimizer, 7)
    rates.scale()
    rate = float(optimizer.learning_rate)
    assert rate == pytest.approx(0.35)
    for _ in range(20):
        rates.restore()
        assert float(optimizer.learning_rate) == pytest.approx(0.05)
        rates.scale()
        assert float(optimizer.learning_rate) == rate
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
    inner = keras.optimizers.SGD(schedule)
    Rates(keras, keras.optimizers.LossScaleOptimizer(inner), 7).scale()
    assert float(inner.learning_rate) == pytest.approx(0.35)


def test_columns_belong_to_the_inputs_and_outputs_of_their_names() -> None:
    """Keras sorts the names, so that columns in another order would be taken for each other."""
    two = {name: keras.Input([1], name=name) for name in ("b", "a")}
    model = keras.Model(two, {"z": two["a"] - two["b"], "y": two["b"] * 2})
    ones, zeros = np.ones(3), np.zeros(3)
    for columns, arrays in ((["a", "b"], [ones, zeros]), (["b", "a"], [zeros, ones])):
        found = predictions_of(model.predict_on_batch(inputs_for(model, arrays, columns)), ["z", "y"])
        assert [one[0, 0] for one in found] == [1.0, 0.0]
    assert weights_for(model, ones, ["y", "z"]) == {"y": ones, "z": ones}
    assert {name: one[0, 0] for name, one in labels_for(model, [zeros, ones], ["y", "z"], None).items()} == {
        "y": 0.0,
        "z": 1.0,
    }
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "inputs", "a, b", "x, b")):
        inputs_for(model, [ones, ones], ["x", "b"])
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "outputs", "y, z", "y, b")):
        labels_for(model, [ones, ones], ["y", "b"], None)

    text = keras.Sequential([keras.Input([], dtype="string"), keras.layers.StringLookup(vocabulary=["one", "two"])])
    texts = inputs_for(text, [np.array(["two", "one"], dtype=object)], ["text"])
    assert np.asarray(text.predict_on_batch(texts)).tolist() == [2, 1]
    halves = keras.layers.Dense(1, dtype="mixed_bfloat16")(np.ones((2, 1)))
    assert predictions_of(halves, ["y"])[0].dtype == np.float32  # NumPy has no such numbers


@keras.saving.register_keras_serializable("estimators")
class Doubled(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs * 2


def squared(label: Any, prediction: Any) -> Any:
    return keras.ops.mean(keras.ops.square(label - prediction), axis=-1)


def tenfold(frame: Any) -> Any:
    frame["features"] = frame["features"] * 10
    return frame


def test_losses_and_metrics_of_ones_own_need_custom_objects(estimator: Callable[..., KerasEstimator]) -> None:
    """The model is saved with them at the end of the training, when it would be too late."""
    own = {"squared": squared}
    for changed, facts in (
        ({"loss": squared}, ["loss", "custom_objects={'squared': squared}"]),
        ({"metrics": [["mae", squared]]}, ["metrics", "custom_objects={'squared': squared}"]),
        ({"loss": lambda label, prediction: prediction, "custom_objects": own}, ["loss", "lambda"]),
    ):
        with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, *facts)):
            estimator(**changed)._check_params(None)
    estimator(loss=[squared], metrics=[["mae", squared]], custom_objects=own)._check_params(None)


def test_several_inputs_labels_and_all_that_is_optional(
    df: Any, estimator: Callable[..., KerasEstimator], tmp_path: Path
) -> None:
    import horovod.keras as hvd

    cloudpickle.register_pickle_by_value(__import__(__name__))
    features, pair = keras.Input([3]), keras.Input([2, 1])
    joined = keras.layers.Concatenate()([Doubled()(features), keras.layers.Flatten()(pair)])
    outputs = [keras.layers.Dense(1, name="a")(joined), keras.layers.Dense(3, activation="softmax", name="b")(joined)]
    made = estimator(
        model=keras.Model({"pair": pair, "features": features}, outputs),
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)),
        loss=[squared, "sparse_categorical_crossentropy"],
        loss_weights=[1.0, 0.5],
        metrics=[["mae"], ["accuracy"]],
        custom_objects={"Doubled": Doubled, "squared": squared},
        callbacks=[keras.callbacks.EarlyStopping("loss", patience=3)],
        checkpoint_callback=hvd.callbacks.BestModelCheckpoint(monitor="val_loss"),
        feature_cols=["features", "pair"],
        label_cols=["label", "kind"],
        label_shapes=[[-1, 1], [-1, 1]],
        sample_weight_col="weight",
        validation=0.3,
        gradient_compression=hvd.Compression.fp16,
        backward_passes_per_step=2,
        train_steps_per_epoch=4,
        tensorflow_dataset_prefetch_buffer_size=2,
    )
    with pytest.raises(ValueError, match=ends_with(DataCode.DIFFERENT_SHAPES, "kind", "label_shapes")):
        made.fit(df, {made.label_shapes: None})
    with pytest.raises(
        ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "custom_objects={'Doubled': Doubled}")
    ):
        made.fit(df, {made.custom_objects: {"squared": squared}})  # ranks have not registered it
    model = made.setTransformationFn(tenfold).fit(df)
    assert {"loss", "a_mae", "b_accuracy", "val_loss"} <= set(model.getHistory())
    model.setOutputCols(["one", "two"]).write().overwrite().save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"))
    rows = [one.transform(df).orderBy("label").first() for one in (model, loaded)]
    assert rows[0] == rows[1]
    inputs = {"pair": np.array([rows[0].pair])[..., None], "features": rows[0].features.toArray()[None] * 10}
    assert rows[0].one == pytest.approx(np.asarray(model.getModel().predict_on_batch(inputs)[0]).item(), rel=1e-5)
    assert isinstance(rows[0].two, DenseVector)
    assert rows[0].two.toArray().sum() == pytest.approx(1.0, abs=1e-5)

    made.write().overwrite().save(str(tmp_path / "estimator"))
    again = KerasEstimator.load(str(tmp_path / "estimator"))
    assert again.getModel().count_params() == made.getModel().count_params()
    assert type(again.getOptimizer()).__name__ == "Adam"


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")
def test_tf_keras_is_training_on_one_process(df: Any, estimator: Callable[..., KerasEstimator]) -> None:
    import tf_keras

    environment = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with Keeper(2, "shm", environment, preloaded="preloaded_tf_keras_estimators") as keeper:
        made = estimator(
            model=linear(tf_keras),
            optimizer=tf_keras.optimizers.SGD(0.05, momentum=0.9),
            backend=WorldBackend(keeper),
            run_id="legacy",
        )
        model = made.fit(df)
        for value, expected in zip(model.getModel().get_weights(), one_process(made.getStore(), tf_keras), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4)
        check_hdf5(made.getStore(), "legacy", model.getModel(), tf_keras)
        resumed = made.setEpochs(3).fit(df)
    assert len(resumed.getHistory()["loss"]) == 3
    row = resumed.transform(df).first()
    expected = resumed.getModel().predict(row.features.toArray()[None], verbose=0)
    assert row.label__output == pytest.approx(float(expected[0, 0]), rel=1e-4)
