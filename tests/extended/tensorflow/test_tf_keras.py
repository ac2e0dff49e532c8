"""tf_keras, which tf.keras is with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import World

if importlib.util.find_spec("tf_keras") is None:
    pytest.skip("tf_keras is not installed", allow_module_level=True)


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
    assert weights[0].tolist() == weights[1].tolist()


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
