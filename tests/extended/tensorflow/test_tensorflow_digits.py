"""A convolutional network on scikit-learn's digits: two ranks are as accurate as one process with the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from worlds import World

EPOCHS = 6
BATCH = 32  # of all ranks together
TESTED = slice(None, None, 6)  # of the digits
# Both see the same batches, so only rounding tells them apart; it may turn one or two digits that the network doubts.
MOST_THAT_DIFFER = 3


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.float32)[..., None] / 16, digits.target.astype(np.int32)


def _model(seed: int) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def _order(rows: int) -> np.ndarray:
    """Whole batches of row numbers, shuffled in each epoch."""
    random = np.random.default_rng(5)
    whole = rows // BATCH * BATCH
    return np.concatenate([random.permutation(rows)[:whole] for _ in range(EPOCHS)]).reshape(-1, BATCH)


def _fit(model: Any, optimizer: Any, x: np.ndarray, y: np.ndarray, batches: np.ndarray, callbacks: Any) -> None:
    import keras

    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = batches.reshape(-1)
    model.fit(x[rows], y[rows], batch_size=batches.shape[1], shuffle=False, verbose=0, callbacks=callbacks)


def _loop(model: Any, optimizer: Any, x: np.ndarray, y: np.ndarray, batches: np.ndarray, callbacks: Any) -> None:
    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    distributed = callbacks is not None
    if distributed:
        hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        if distributed:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for rows in batches:
        step(tf.constant(x[rows]), tf.constant(y[rows]))


def _answers(way: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the network says of the tested digits after training by one process and by both, and what they are."""
    import keras

    import horovod.keras as hvd

    x, y = _digits()
    learned = np.delete(np.arange(len(x)), TESTED)
    images, labels, tested = x[learned], y[learned], x[TESTED]
    train = _fit if way == "fit" else _loop
    batches = _order(len(images))
    half = BATCH // 2
    own = batches[:, half * hvd.rank() : half * (hvd.rank() + 1)]

    alone = _model(1)
    train(alone, keras.optimizers.SGD(0.1, momentum=0.9), images, labels, batches, None)
    together = _model(1 + hvd.rank())
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer) if way == "fit" else optimizer
    train(together, optimizer, images, labels, own, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    said = [np.argmax(np.array(model(tested)), axis=-1) for model in (alone, together)]
    return said[0], said[1], y[TESTED]


@pytest.mark.parametrize("way", ["fit", "custom loop"])
def test_two_ranks_are_as_accurate_as_one_process(tf_pair: World, way: str) -> None:
    for alone, together, wanted in tf_pair.run(_answers, way):
        correct = [int((said == wanted).sum()) for said in (alone, together)]
        assert min(correct) > 0.95 * len(wanted)
        assert abs(correct[0] - correct[1]) <= MOST_THAT_DIFFER, correct
