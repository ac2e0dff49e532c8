"""tf_keras, which tf.keras is with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import World


def _model(seed: int, mixed: bool = False) -> Any:
    import tensorflow as tf

    tf.keras.utils.set_random_seed(seed)
    policy = "mixed_float16" if mixed else "float32"
    return tf.keras.Sequential(
        [tf.keras.layers.Dense(4, "tanh", input_shape=[3], dtype=policy), tf.keras.layers.Dense(1, dtype=policy)]
    )


def _fit(legacy: bool, passes: int) -> None:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    assert tf.keras.layers.Layer.__module__.startswith("tf_keras.")
    optimizers = tf.keras.optimizers.legacy if legacy else tf.keras.optimizers
    random = np.random.default_rng(1)
    x, y = random.normal(size=(24, 3)).astype(np.float32), random.normal(size=(24, 1)).astype(np.float32)
    alone = _model(1)
    alone.compile(optimizers.SGD(0.1, momentum=0.9), loss="mse")
    alone.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0)

    rank = hvd.rank()
    model = _model(1 + rank)
    optimizer = hvd.DistributedOptimizer(
        optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    model.compile(optimizer, loss="mse")
    own = [one.reshape(3, 2, 4, -1)[:, rank].reshape(12, -1) for one in (x, y)]
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0),
    ]
    history = model.fit(*own, batch_size=4 // passes, shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
    for found, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert int(optimizer.iterations) == 6 * passes
    np.testing.assert_allclose(history.history["lr"], [0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_fit_trains_as_one_process_would(legacy_pair: World, legacy: bool) -> None:
    legacy_pair.run(_fit, legacy, 1)
    legacy_pair.run(_fit, legacy, 2)


def _infinity(passes: int) -> tuple[list[float], float]:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    model = _model(1, mixed=True)
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01), backward_passes_per_step=passes)
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model.compile(scaled, loss="mse")
    found = []
    for step in range(4):
        x = np.ones([4, 3], np.float32)
        if hvd.rank() == 1 and step == 1:
            x[0, 0] = np.nan
        model.fit(x, np.ones([4, 1], np.float32), batch_size=4, verbose=0)
        found.append(float(model.get_weights()[0].sum()))
    return found, float(scaled.loss_scale)


def test_an_infinity_on_one_rank_skips_the_step_on_all(legacy_pair: World) -> None:
    (weights, scale), other = legacy_pair.run(_infinity, 1)
    assert other == (weights, scale)
    assert scale == 32.0
    assert weights[0] == weights[1] != weights[2]
    (weights, scale), other = legacy_pair.run(_infinity, 2)
    assert other == (weights, scale)
    assert scale == 32.0
    assert weights[0] == weights[1] == weights[2] != weights[3]


def _local_layer(legacy: bool) -> tuple[list[list[float]], list[list[float]], float]:
    """Four steps with one layer that is this rank's own, under loss scaling; the third has an infinity on rank 1."""
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    rank = hvd.rank()
    optimizers = tf.keras.optimizers.legacy if legacy else tf.keras.optimizers
    own = tf.keras.layers.Dense(1, use_bias=False, input_shape=[1])
    common = tf.keras.layers.Dense(1, use_bias=False)
    model = tf.keras.Sequential([own, common])
    own.set_weights([np.array([[2.0]])])
    common.set_weights([np.array([[3.0]])])
    inner = optimizers.SGD(0.5)
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=64.0)
    optimizer = hvd.PartialDistributedOptimizer(scaled, local_layers=own)
    assert optimizer is scaled
    model.compile(optimizer, loss=lambda y, found: tf.reduce_sum(found))
    owns, commons = [], []
    for step in range(4):
        x = np.full([1, 1], np.inf if rank == 1 and step == 2 else rank + 1.0, np.float32)
        model.fit(x, np.ones([1, 1], np.float32), verbose=0)
        owns.append(own.get_weights()[0].reshape(-1).tolist())
        commons.append(common.get_weights()[0].reshape(-1).tolist())
    return owns, commons, float(scaled.loss_scale)


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_local_layers_under_loss_scaling(legacy_pair: World, legacy: bool) -> None:
    (owns, commons, scale), (other_owns, other_commons, other_scale) = legacy_pair.run(_local_layer, legacy)
    assert commons == other_commons
    assert scale == other_scale == 32.0  # one step was skipped, by both
    weights = [np.array([2.0, 2.0]), 3.0]
    x = np.array([1.0, 2.0])
    for step in range(4):
        if step != 2:  # d loss / d own = common * x, of which this rank's part of the average is half
            own_gradient, common_gradient = weights[1] * x / 2, (weights[0] * x).mean()
            weights = [weights[0] - 0.5 * own_gradient, weights[1] - 0.5 * common_gradient]
        np.testing.assert_allclose([owns[step][0], other_owns[step][0]], weights[0], rtol=1e-5)
        np.testing.assert_allclose(commons[step][0], weights[1], rtol=1e-5)


def _callbacks() -> None:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    model = _model(1 + hvd.rank())
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.5, momentum=0.9)), loss="mse")
    rates: list[float] = []

    class Rates(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), warmup]
    y = np.full([12, 1], float(hvd.rank()))
    history = model.fit(np.ones([12, 3]), y, batch_size=6, epochs=2, verbose=0, callbacks=[*callbacks, Rates()])
    np.testing.assert_allclose(rates, [0.125, 0.15, 0.175, 0.2], rtol=1e-6)
    losses = hvd.allgather(np.array([history.history["loss"]]))
    np.testing.assert_array_equal(losses[0], losses[1])


def test_callbacks(legacy_pair: World) -> None:
    legacy_pair.run(_callbacks)


def _saved(folder: Path) -> None:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    model = _model(1)
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1)), loss="mse")
    model.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0)
    path = str(folder / f"{hvd.rank()}.keras")
    model.save(path)
    assert type(tf.keras.models.load_model(path).optimizer) is tf.keras.optimizers.Adam
    loaded = hvd.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    loaded.fit(np.full([4, 3], hvd.rank()), np.ones([4, 1]), verbose=0)
    weights = hvd.allgather(loaded.get_weights()[0][None])
    np.testing.assert_array_equal(weights[0], weights[1])


def test_models_saved_with_and_without_horovod(legacy_pair: World, tmp_path: Path) -> None:
    legacy_pair.run(_saved, tmp_path)


def _sync_batch_norm() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    batch = tf.constant(np.random.default_rng(5).normal(3.0, 2.0, size=(8, 4)), tf.float32)
    own = slice(0, 3) if hvd.rank() == 0 else slice(3, 8)
    alone, synced = tf.keras.layers.BatchNormalization(fused=False), hvd.SyncBatchNormalization()
    expected = alone(batch, training=True)
    np.testing.assert_allclose(synced(batch[own], training=True), expected[own], rtol=1e-4, atol=1e-5)
    for found, wanted in zip(synced.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_batch_normalization_over_all_ranks(legacy_pair: World) -> None:
    legacy_pair.run(_sync_batch_norm)


def _saved_batch_normalization(folder: Path) -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.keras import load_model

    model = tf.keras.Sequential([tf.keras.Input([2]), hvd.SyncBatchNormalization(), tf.keras.layers.Dense(1)])
    for ending in ("keras", "h5"):
        path = str(folder / f"{hvd.rank()}.{ending}")
        model.save(path)
        loaded = load_model(path)
        assert type(loaded.layers[0]) is hvd.SyncBatchNormalization
        for found, wanted in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_load_model_knows_the_batch_normalization(legacy_pair: World, tmp_path: Path) -> None:
    legacy_pair.run(_saved_batch_normalization, tmp_path)
