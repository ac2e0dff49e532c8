"""Training by an optimizer of Keras that was never distributed is told once; right scripts are told nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unreduced_warnings import told
from worlds import World


def _keras() -> Any:
    import sys

    return sys.modules.get("tf_keras") or sys.modules["keras"]


def _model() -> Any:
    keras = _keras()
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2), keras.layers.Dense(1)])


def _fit(case: str) -> list[str]:
    keras = _keras()
    if keras.__name__ == "tf_keras":
        import horovod.tensorflow.keras as hvd
    else:
        import horovod.keras as hvd  # type: ignore[no-redef]
    data = np.ones([130, 3], np.float32)
    options: dict[str, Any] = {"run_eagerly": True} if case == "eagerly" else {}
    if case == "several steps a call":
        options = {"steps_per_execution": 10}
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if case == "broadcast" else []

    def work() -> None:
        model = _model()
        optimizer = keras.optimizers.SGD(0.01)
        if case == "another is distributed":
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        if case == "distributed":
            optimizer = hvd.DistributedOptimizer(optimizer)
        model.compile(optimizer, loss="mse", **options)
        if case == "evaluated":
            model.evaluate(data, data[:, :1], batch_size=1, verbose=0)
            model.predict(data, batch_size=1, verbose=0)
            return
        if case == "batches":
            for _ in range(120):
                model.train_on_batch(data[:2], data[:2, :1])
            return
        if case == "epochs of few batches":
            model.fit(data, data[:, :1], batch_size=10, epochs=10, verbose=0)
            return
        batch_size = 2 if case == "few steps" else 1
        model.fit(data, data[:, :1], batch_size=batch_size, verbose=0, callbacks=callbacks)
        if case == "function":
            assert type(model.train_function).__name__ != "_Counted", "steps must not be counted for ever"

    return told(work)


FORGOTTEN = ["function", "eagerly", "several steps a call", "broadcast", "batches", "epochs of few batches"]
RIGHT = ["distributed", "another is distributed", "evaluated", "few steps"]


def _all(cases: list[str]) -> dict[str, list[str]]:
    return {case: _fit(case) for case in cases}


def _aretold(world: World, cases: list[str]) -> None:
    on_0, on_1 = world.run(_all, cases)
    for case in cases:
        assert len(on_0[case]) == 1, case
        assert on_0[case][0].startswith(__file__), "the warning must point to the script"
        assert "SGD has taken" in on_0[case][0]
        assert "model.compile(hvd.DistributedOptimizer(" in on_0[case][0]
        assert on_1[case] == []


def test_a_plain_optimizer_is_told_once_on_rank_0(tf_pair: World) -> None:
    _aretold(tf_pair, FORGOTTEN)


def test_a_plain_optimizer_of_tf_keras(legacy_pair: World) -> None:
    _aretold(legacy_pair, FORGOTTEN)


def test_a_plain_optimizer_on_pytorch(torch_pair: World) -> None:
    _aretold(torch_pair, ["function", "broadcast", "batches"])


def test_right_scripts_are_told_nothing(tf_pair: World) -> None:
    assert tf_pair.run(_all, RIGHT) == [{case: [] for case in RIGHT}] * 2


def test_right_scripts_of_tf_keras_are_told_nothing(legacy_pair: World) -> None:
    assert legacy_pair.run(_all, RIGHT) == [{case: [] for case in RIGHT}] * 2


def _own_step(case: str) -> list[str]:
    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    class Reduces(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, data: Any) -> Any:
            return self.layer(data)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            if case == "tape":
                tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, self.trainable_variables)
            if case == "allreduce":
                gradients = [hvd.allreduce(one, name=f"gradient_{i}") for i, one in enumerate(gradients)]
            if case == "grouped":
                gradients = hvd.grouped_allreduce(gradients, compression=hvd.Compression.fp16, name="gradients")
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    class Average(keras.callbacks.Callback):
        """Weights are averaged now and then."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 60:
                self.model.set_weights([hvd.allreduce(one, name=f"w{i}") for i, one in enumerate(self.model.weights)])

    def work() -> None:
        model = Reduces()
        model.compile(keras.optimizers.SGD(0.01), loss="mse")
        data = np.ones([120, 3], np.float32)
        model.fit(data, data[:, :1], batch_size=1, verbose=0, callbacks=[Average()] if case == "weights" else [])

    return told(work)


@pytest.mark.parametrize("case", ["tape", "allreduce", "grouped", "weights"])
def test_a_step_of_the_scripts_own_that_reduces_is_told_nothing(tf_pair: World, case: str) -> None:
    assert tf_pair.run(_own_step, case) == [[], []]


def test_a_step_of_the_scripts_own_that_reduces_nothing_istold(tf_pair: World) -> None:
    on_0, on_1 = tf_pair.run(_own_step, "nothing")
    assert (len(on_0), on_1) == (1, [])


def _rows(case: str) -> list[str]:
    """A large embedding, of which each step has few rows."""
    import tensorflow as tf

    keras = _keras()
    import horovod.tensorflow as hvd

    class Embedded(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = keras.layers.Embedding(100_000, 4)

        def call(self, data: Any) -> Any:
            return self.embedding(data)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0]) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            assert isinstance(gradients[0], tf.IndexedSlices)
            if case == "by hand":
                gradients = [hvd.allreduce(one, name="rows") for one in gradients]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def work() -> None:
        model = Embedded()
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(optimizer)
        data = np.ones([120, 2], np.int32)
        model.fit(data, data, batch_size=1, verbose=0)

    return told(work)


def test_rows_that_are_reduced_by_hand_in_fit_are_told_nothing(tf_pair: World) -> None:
    assert tf_pair.run(_rows, "by hand") == [[], []]
    on_0, on_1 = tf_pair.run(_rows, "nothing")
    assert (len(on_0), on_1) == (1, [])


def test_rows_that_are_reduced_by_hand_in_fit_of_tf_keras_are_told_nothing(legacy_pair: World) -> None:
    assert legacy_pair.run(_rows, "by hand") == [[], []]
    on_0, on_1 = legacy_pair.run(_rows, "nothing")
    assert (len(on_0), on_1) == (1, [])


def test_a_rank_that_is_alone_runs_keras_as_it_is() -> None:
    with World(1, "shm", preloaded="preloaded_tensorflow") as world:
        assert world.run(_alone) == [(False, [])]


def _alone() -> tuple[bool, list[str]]:
    told = _fit("function")
    return hasattr(_keras().Model.make_train_function, "_hvd_looks_at_the_optimizer"), told
