"""What tests of Keras on PyTorch and on JAX run on two ranks: hvd.SyncBatchNormalization beside Keras's own layer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

EPOCHS = 2


def trains_as_one_process() -> None:
    """AssertionError where two ranks have other weights than one process that trains with all rows."""
    import keras

    import horovod.keras as hvd

    rows = np.random.default_rng(5).normal(3.0, 2.0, [8, 3]).astype(np.float32)
    targets = np.tanh(rows.sum(1, keepdims=True))
    own = slice(hvd.rank(), None, 2)
    model = _trained(hvd.SyncBatchNormalization(), rows[own], targets[own], hvd.DistributedOptimizer)
    expected = _trained(keras.layers.BatchNormalization(), rows, targets, lambda optimizer: optimizer)
    for found, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def normalizes_all_rows(folder: str) -> None:
    """AssertionError where a layer does not see the rows of both ranks, or is not saved and loaded as it is."""
    import keras

    import horovod.keras as hvd

    rows = np.random.default_rng(5).normal(3.0, 2.0, [8, 3]).astype(np.float32)
    # The mean is large beside the deviation, and rank 1 has no rows.
    _same((rows + 1000.0).reshape(8, 3, 1), 8, axis=1)
    _same(np.stack([rows, rows[::-1]], 1), 5, mask=np.array([[True, False]] * 5 + [[False, True]] * 3))
    path = str(Path(folder) / f"{hvd.rank()}.keras")
    keras.Sequential([keras.Input([3]), hvd.SyncBatchNormalization()]).save(path)
    assert type(hvd.load_model(path).layers[0]) is hvd.SyncBatchNormalization


def _trained(layer: Any, rows: Any, targets: Any, wrapped: Any) -> Any:
    import keras

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([3]), layer, keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(wrapped(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(rows, targets, batch_size=len(rows), shuffle=False, epochs=EPOCHS, verbose=0)
    return model


def _same(rows: Any, border: int, mask: Any = None, axis: int = -1) -> None:
    """Rows and statistics are those of all rows together. Rank 0 has the rows up to the border, rank 1 the others."""
    import keras

    import horovod.keras as hvd

    part = slice(0, border) if hvd.rank() == 0 else slice(border, None)
    alone = keras.layers.BatchNormalization(axis=axis, momentum=0.0)
    synced = hvd.SyncBatchNormalization(axis=axis, momentum=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the mean of no rows
        wanted = alone(rows, training=True, mask=mask)
        found = synced(rows[part], training=True, mask=None if mask is None else mask[part])
    to_numpy = keras.ops.convert_to_numpy
    np.testing.assert_allclose(to_numpy(found), to_numpy(wanted)[part], rtol=1e-3, atol=2e-3)
    for one, other in zip(synced.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    if mask is None:
        gradient = _gradient(synced, rows[part], part)
        np.testing.assert_allclose(gradient, _gradient(alone, rows, slice(None))[part], rtol=1e-2, atol=1e-3)


def _gradient(layer: Any, rows: Any, part: slice) -> Any:
    """Of a loss that is the sum of the ranks' losses, in the rows of one of them."""
    import keras

    factors = np.arange(24, dtype=np.float32).reshape(8, 3, 1)[part] ** 2 / 100
    if keras.backend.backend() == "torch":
        given = keras.ops.convert_to_tensor(rows).requires_grad_()
        (layer(given, training=True) * keras.ops.convert_to_tensor(factors)).sum().backward()
        return given.grad.numpy()
    import jax

    def loss(given: Any) -> Any:
        values = [[one.value for one in of] for of in (layer.trainable_variables, layer.non_trainable_variables)]
        return (layer.stateless_call(*values, given, training=True)[0] * factors).sum()

    return np.asarray(jax.jit(jax.grad(loss))(rows))
