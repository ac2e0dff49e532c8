"""Copies of models and optimizers of Keras, by copy.deepcopy, pickle or clone_model, reduce as the originals do, and
an optimizer that was put in the place of a distributed one is told.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import cloudpickle
import pytest
from error_codes import ends_with
from worlds import Keeper, World

from horovod.base.errors import TrainingCode

WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
}


def _modules(legacy: bool) -> tuple[Any, Any]:
    if legacy:
        import tf_keras

        import horovod.tensorflow.keras

        return tf_keras, horovod.tensorflow.keras
    import keras

    import horovod.keras

    return keras, horovod.keras


def _model(keras: Any, optimizer: Any, **options: Any) -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer, loss="mse", **options)
    return model


def _fit(hvd: Any, model: Any, epochs: int = 1) -> list[list[float]]:
    """Kernel and bias of each rank, after steps on data of its own."""
    import numpy as np

    model.fit(np.full((4, 2), 1.0 + hvd.rank()), np.zeros((4, 1)), batch_size=4, epochs=epochs, verbose=0)
    flat = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
    found: list[list[float]] = np.asarray(hvd.allgather(flat.reshape(1, -1))).tolist()
    return found


def _models(way: str, legacy: bool, mixed: bool) -> None:
    keras, hvd = _modules(legacy)
    ways = WAYS if legacy else {**WAYS, "clone": keras.models.clone_model}
    if mixed:
        keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=1, op=hvd.Sum)
        model = _model(keras, optimizer)
        other = ways[way](model)
        assert type(other.optimizer) is type(model.optimizer)
        epochs = 8 if mixed else 1  # the scale of the loss is too large at first
        first, second = _fit(hvd, other, epochs)
        assert first == second
        assert first[0] < 1.0
        assert _fit(hvd, model, epochs) == [first, second]  # the original is what it was, and as good
    finally:
        if mixed:
            keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("way", [*WAYS, "clone"])
@pytest.mark.parametrize("pair", ["tf_pair", "torch_pair"])
def test_models(pair: str, way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(pair).run(_models, way, legacy=False, mixed=False)


@pytest.mark.parametrize("way", WAYS)
def test_models_of_keras_2(legacy_pair: World, way: str) -> None:
    legacy_pair.run(_models, way, legacy=True, mixed=False)


def test_models_with_mixed_precision(tf_pair: World) -> None:
    tf_pair.run(_models, "deepcopy", legacy=False, mixed=True)


def _optimizers(way: str) -> None:
    keras, hvd = _modules(legacy=False)
    original = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), groups=2)
    optimizer = {**WAYS, "copy": copy.copy}[way](original)
    assert optimizer is not original
    assert optimizer._hvd.reduction.groups == 2
    first, second = _fit(hvd, _model(keras, optimizer))
    assert first == second


@pytest.mark.parametrize("way", [*WAYS, "copy"])
@pytest.mark.parametrize("pair", ["tf_pair", "torch_pair"])
def test_optimizers(pair: str, way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(pair).run(_optimizers, way)


def _legacy_optimizer() -> None:
    keras, hvd = _modules(legacy=True)
    optimizer = copy.deepcopy(hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.01)))
    first, second = _fit(hvd, _model(keras, optimizer))
    assert first == second


def test_legacy_optimizers_of_keras_2(legacy_pair: World) -> None:
    legacy_pair.run(_legacy_optimizer)


def _local_variables_and_groups(legacy: bool) -> None:
    keras, hvd = _modules(legacy)
    model = _model(keras, "sgd")
    kernel, bias = model.trainable_variables
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), groups=[[kernel, bias]])
    optimizer.register_local_var(bias)
    model.compile(optimizer, loss="mse")
    if not legacy:
        with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_DISTRIBUTED, "`groups`")):
            copy.deepcopy(optimizer)
    other = copy.deepcopy(model)
    (first_kernel, _, first_bias), (second_kernel, _, second_bias) = _fit(hvd, other)
    assert first_kernel == second_kernel
    assert first_bias != second_bias, "its gradient stays that of the rank"
    groups = other.optimizer._hvd.reduction.groups
    assert all(one is two for one, two in zip(groups[0], other.trainable_variables, strict=True))


@pytest.mark.parametrize("pair", ["tf_pair", "legacy_pair"])
def test_local_variables_and_groups(pair: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(pair).run(_local_variables_and_groups, pair == "legacy_pair")


def _files(folder: str, legacy: bool) -> None:
    import os

    from horovod._keras.optimizer import is_distributed

    keras, hvd = _modules(legacy)
    model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    path = os.path.join(folder, f"{hvd.rank()}.keras")
    model.save(path)
    assert not is_distributed(keras.models.load_model(path).optimizer), "files know nothing of Horovod"
    assert is_distributed(hvd.load_model(path).optimizer)
    assert not is_distributed(copy.deepcopy(_model(keras, "sgd")).optimizer)


@pytest.mark.parametrize("pair", ["tf_pair", "torch_pair", "legacy_pair"])
def test_files_stay_plain(pair: str, request: pytest.FixtureRequest, tmp_path: Any) -> None:
    request.getfixturevalue(pair).run(_files, str(tmp_path), pair == "legacy_pair")


def _replaced(legacy: bool) -> list[int]:
    """How many warnings came of each of these."""
    keras, hvd = _modules(legacy)
    sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam

    class OwnStep(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return {"loss": 0.0}

    counts = []
    for case in ("kept", "plain", "train_on_batch", "scaled", "distributed", "compiled", "own step", "never"):
        model = _model(keras, sgd(0.01) if case == "never" else hvd.DistributedOptimizer(sgd(0.01)))
        if case in ("plain", "train_on_batch"):
            model.optimizer = adam(0.01)
        elif case == "scaled":
            model.optimizer = keras.mixed_precision.LossScaleOptimizer(adam(0.01))
        elif case == "distributed":
            model.optimizer = hvd.DistributedOptimizer(adam(0.01))
        elif case == "compiled":
            model.compile(adam(0.01), loss="mse")
        elif case == "own step":
            model = OwnStep(model.inputs, model.outputs)
            model.compile(hvd.DistributedOptimizer(sgd(0.01)), loss="mse", run_eagerly=True)
            model.optimizer = adam(0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if case == "train_on_batch":
                import numpy as np

                model.train_on_batch(np.ones((4, 2)), np.zeros((4, 1)))
            else:
                _fit(hvd, model)
        ours = [one for one in caught if str(one.message).endswith(f"[{TrainingCode.NOT_DISTRIBUTED.value}]")]
        assert all(one.filename == __file__ and "Adam" in str(one.message) for one in ours if case != "scaled")
        counts.append(len(ours))
    return counts


REPLACED = [0, 1, 1, 1, 0, 0, 0, 0]


def test_a_plain_optimizer_in_place_of_the_distributed_one(tf_pair: World) -> None:
    assert tf_pair.run(_replaced, False) == [REPLACED, [0] * 8]


def test_a_plain_optimizer_of_tf_keras(legacy_pair: World) -> None:
    assert legacy_pair.run(_replaced, True) == [REPLACED, [0] * 8]


def test_a_plain_optimizer_where_keras_runs_on_torch(torch_pair: World) -> None:
    assert torch_pair.run(_replaced, False) == [REPLACED, [0] * 8]


def _replaced_by_mistake() -> None:
    keras, hvd = _modules(False)
    model = _model(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    model.optimizer = keras.optimizers.Adam(0.01)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_DISTRIBUTED, "SGD", "Adam")):
        _fit(hvd, model)


def test_a_setting_makes_it_an_error() -> None:
    environment = {"HOROVOD_DIFFERENT_WEIGHTS": "error"}
    with Keeper(2, "shm", environment, preloaded="preloaded_tensorflow") as keeper:
        keeper.get().run(_replaced_by_mistake)
