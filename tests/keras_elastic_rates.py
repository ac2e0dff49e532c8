"""What tests of every Keras run: callbacks after an epoch that was interrupted in its middle, on two ranks.

The interruption is a state that has counted batches already when `fit` begins: that is what a script finds after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

STEPS = 4  # of an epoch
WARMUP = 2  # epochs
RATE = 0.1
MOMENTUM = 0.5


def _warmup(place: float) -> float:
    """The rate at a place in the training, in epochs: from half of RATE, with two ranks, to RATE."""
    return RATE / 2 * (min(place, WARMUP) / WARMUP + 1)


def _compiled(hvd: Any, keras: Any, optimizers: Any) -> Any:
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    model.build((None, 1))
    model.set_weights([np.array([[1.0]])])
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.05, momentum=MOMENTUM))
    model.compile(optimizer, loss=lambda targets, found: found)  # so that the gradient is the average of x, which is 1
    return model


def _trained(model: Any, keras: Any, callbacks: list[Any], **fit: Any) -> tuple[list[float], list[float]]:
    """The rate of each batch, and the weight after it."""
    rates: list[float] = []
    weights: list[float] = []

    class Seen(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            rates.append(float(np.array(self.model.optimizer.learning_rate)))
            weights.append(model.get_weights()[0].item())

    rows = np.ones([STEPS, 1], np.float32)
    model.fit(rows, rows, batch_size=1, shuffle=False, verbose=0, callbacks=[*callbacks, Seen()], **fit)
    return rates, weights


def _after_steps(rates: list[float], correction: bool, weight: float, velocity: float, old: float) -> list[float]:
    """The weight after each step of SGD with such rates, whose gradient is 1."""
    found = []
    for rate in rates:
        velocity = MOMENTUM * velocity * (rate / old if correction else 1.0) - rate
        weight, old = weight + velocity, rate
        found.append(weight)
    return found


def go_on(hvd: Any, keras: Any, optimizers: Any, folder: str) -> None:
    """AssertionError where a callback begins the interrupted epoch anew."""
    elastic, callbacks = hvd.elastic, hvd.callbacks

    def updates(state: Any) -> list[Any]:
        return [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state)]

    every = [(epoch, batch) for epoch in range(3) for batch in range(STEPS)]
    expected = [_warmup(epoch + (batch + 1) / STEPS) for epoch, batch in every]
    for interrupted, initial, first in [(6, True, False), (6, False, True), (7, True, True), (3, False, False)]:
        epoch, batch = divmod(interrupted, STEPS)
        model = _compiled(hvd, keras, optimizers)
        state = elastic.KerasState(model, batch=batch, epoch=epoch)
        warmup = [callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=WARMUP)]
        common = [callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()]
        all_of_them = [*common, *warmup, *updates(state)] if first else [*updates(state), *common, *warmup]
        fit = {"initial_epoch": epoch, "epochs": 3} if initial else {"epochs": 3 - epoch}
        rates, weights = _trained(model, keras, all_of_them, **fit)
        np.testing.assert_allclose(rates, expected[interrupted:], rtol=1e-5, err_msg=f"{interrupted} {initial}")
        # What momentum has gathered before the interruption is nothing here.
        np.testing.assert_allclose(weights, _after_steps(rates, True, 1.0, 0.0, 0.05), rtol=1e-4)
        assert (state.epoch, state.batch) == (3, 0)
    # Nothing but the warm-up looks at the variables of the model during an epoch, which Keras on JAX keeps from it.
    model = _compiled(hvd, keras, optimizers)
    rows = np.ones([STEPS, 1], np.float32)
    warmup = [callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=WARMUP)]
    model.fit(rows, rows, batch_size=1, epochs=2, verbose=0, callbacks=warmup)
    last = _after_steps(expected[: 2 * STEPS], True, 1.0, 0.0, 0.05)[-1]
    assert abs(model.get_weights()[0].item() - last) < 1e-4
    # Another fit of a model, without a state, counts by itself.
    rates, _ = _trained(model, keras, [callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=WARMUP)])
    np.testing.assert_allclose(rates, expected[:STEPS], rtol=1e-5)

    _schedules(hvd, keras, optimizers, updates)
    _best_model(hvd, keras, optimizers, updates, folder)


def _schedules(hvd: Any, keras: Any, optimizers: Any, updates: Any) -> None:
    def multiplier(epoch: float) -> float:
        return 1.0 / (1.0 + epoch)

    # More batches are done than an epoch of this world has: one more, at the end of the epoch.
    cases = [(False, 2, [1.5, 1.75, 2.0, 2.25, 2.5, 2.75]), (False, 9, [1.75, 2.0, 2.25, 2.5, 2.75])]
    for staircase, batch, places in [*cases, (True, 2, [1.0, 1.0, 2.0, 2.0, 2.0, 2.0])]:
        model = _compiled(hvd, keras, optimizers)
        state = hvd.elastic.KerasState(model, batch=batch, epoch=1)
        schedule = hvd.callbacks.LearningRateScheduleCallback(
            RATE, multiplier, end_epoch=3, staircase=staircase, momentum_correction=False
        )
        rates, weights = _trained(model, keras, [schedule, *updates(state)], epochs=2)
        np.testing.assert_allclose(rates, [RATE * multiplier(place) for place in places], rtol=1e-5)
        np.testing.assert_allclose(weights, _after_steps(rates, False, 1.0, 0.0, RATE), rtol=1e-4)


def _best_model(hvd: Any, keras: Any, optimizers: Any, updates: Any, folder: str) -> None:
    """A callback of the next world does not take its first model for the best one."""
    path = Path(folder) / f"best-{hvd.rank()}.weights.h5"
    model = _compiled(hvd, keras, optimizers)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    def fit(loss: float) -> None:
        model.set_weights([np.array([[loss]])])
        model.optimizer.learning_rate = 0.0
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True, mode="min")
        best.filepath = str(path)
        _trained(model, keras, [*updates(state), best], epochs=1)

    fit(1.0)
    assert path.exists()
    path.unlink()
    fit(2.0)
    assert not path.exists()
    fit(0.5)
    assert path.exists()
