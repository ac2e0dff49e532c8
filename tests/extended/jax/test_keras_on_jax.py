"""horovod.keras where Keras runs on JAX: model.fit of two ranks is that of one process on the joined batches."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras_batch_norm
import keras_elastic_rates
import keras_steps
import numpy as np
import pytest
import unreduced_warnings
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode, SettingCode, TrainingCode
from horovod.coordinator.core.agreement.deadlock import DeadlockTimes

ROWS = 8  # of a joined batch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")


def _fit(distributed: bool, optimizer: Any) -> tuple[list[Any], float]:
    import keras

    import horovod.keras as hvd

    rows = np.random.default_rng(5).normal(size=[5 * ROWS, 3]).astype(np.float32)
    targets = np.tanh(rows @ np.array([[1.0], [-2.0], [0.5]], np.float32))
    own = slice(hvd.rank(), None, hvd.size()) if distributed else slice(None)
    keras.utils.set_random_seed(3 + (hvd.rank() if distributed else 0))
    norm = hvd.SyncBatchNormalization() if distributed else keras.layers.BatchNormalization()
    layers = [keras.Input([3]), keras.layers.Dense(4, activation="tanh"), norm, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    callbacks = []
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, groups=2)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    model.compile(optimizer, loss="mse")
    batch = ROWS // (hvd.size() if distributed else 1)
    history = model.fit(
        rows[own], targets[own], batch_size=batch, shuffle=False, epochs=2, verbose=0, callbacks=callbacks
    )
    return model.get_weights(), history.history["loss"][-1]


def _same_as_one_process() -> None:
    import keras

    found, loss = _fit(True, keras.optimizers.Adam(0.02))
    expected, expected_loss = _fit(False, keras.optimizers.Adam(0.02))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)


def _infinity_on_one_rank(outside: bool, local: bool) -> tuple[list[float], float]:
    """The sum of the last layer's weights after each step, and the scale.

    outside: the distributed optimizer is around the other one. local: the first layer is this rank's own.
    """
    import keras

    import horovod.keras as hvd

    keras.utils.set_random_seed(1)
    first = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input([2]), first, keras.layers.Dense(1, use_bias=False)])
    for layer in model.layers:
        layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    optimizer, scaled = keras.optimizers.SGD(0.01), keras.optimizers.LossScaleOptimizer
    if outside:
        optimizer = hvd.DistributedOptimizer(scaled(optimizer, initial_scale=64.0))
    else:
        given = {"local_layers": first} if local else {}
        distribute = hvd.PartialDistributedOptimizer if local else hvd.DistributedOptimizer
        optimizer = scaled(distribute(optimizer, **given), initial_scale=64.0)
    model.compile(optimizer, loss="mse")
    found = []
    for step in range(3):
        x = np.ones([4, 2], np.float32) * (1 + hvd.rank())
        if hvd.rank() == 1 and step == 1:
            x[0, 0] = np.inf
        model.fit(x, np.ones([4, 1], np.float32), batch_size=4, verbose=0)
        found.append(float(model.layers[1].get_weights()[0].sum()))
    return found, float(np.array(optimizer.dynamic_scale))


def _different_weights() -> dict[str, list[str]]:
    import warnings

    import keras

    import horovod.keras as hvd

    def told(change: str, steps: int = 6, groups: int | None = None, scaled: bool = False, local: bool = False) -> Any:
        keras.utils.set_random_seed(3 + hvd.rank() * (change in ("weights", "broadcast")))
        layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="last")]
        model = keras.Sequential([keras.Input([3]), *layers])
        given = {"local_layers": layers[0]} if local else {}
        distribute = hvd.PartialDistributedOptimizer if local else hvd.DistributedOptimizer
        optimizer = distribute(keras.optimizers.Adam(0.02 + hvd.rank() * (change == "rate")), groups=groups, **given)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, loss="mse")
        if change == "state":
            optimizer.build(model.trainable_variables)
            for one in optimizer.variables:
                if "momentum" in one.path and "last" in one.path:
                    one.assign(one + float(hvd.rank()))
        if change == "local":
            layers[0].kernel.assign(layers[0].kernel + float(hvd.rank()))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if change == "broadcast" else []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows, targets = np.ones([2 * steps, 3], np.float32), np.ones([2 * steps, 1], np.float32)
            model.fit(rows, targets, batch_size=2, verbose=0, callbacks=callbacks)
        return [str(one.message) for one in caught if TrainingCode.DIFFERENT_WEIGHTS.value in str(one.message)]

    return {
        "weights": told("weights"),
        "state": told("state", groups=2),
        "rate": told("rate"),
        "scaled": told("weights", scaled=True),
        "quiet: broadcast": told("broadcast", steps=20),
        "quiet: equal": told("", scaled=True),
        "quiet: local": told("local", local=True),
    }


def test_ranks_that_train_different_weights_are_told_so(world: World) -> None:
    on_0, on_1 = world.run(_different_weights)
    for case, told in on_0.items():
        assert len(told) == (0 if case.startswith("quiet") else 1), (case, told)
    assert not any(on_1.values())
    for case, parts in {
        "weights": ("step 2", "variable 0 ('kernel')", "BroadcastGlobalVariablesCallback"),
        "scaled": ("variable 0 ('kernel')",),
        "state": ("momentum", "variable 2 ('kernel')"),
        "rate": ("'learning_rate' of the optimizer",),
    }.items():
        for part in parts:
            assert part in on_0[case][0], on_0[case]


def _what_is_not_there() -> None:
    import keras

    import horovod.keras as hvd

    with pytest.raises(NotImplementedError, match=ends_with(TrainingCode.INVALID_ARGUMENT)):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    assert float(hvd.allreduce(hvd.rank() + 1.0)) == 1.5
    assert int(hvd.allreduce(np.int64(2**40), op=hvd.Max)) == 2**40
    assert hvd.broadcast([1.0, 2.0], 0).tolist() == [1, 2]
    state = hvd.elastic.KerasState(keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]), batch=hvd.rank())
    state.sync()
    assert state.batch == 0
    with pytest.raises(NotImplementedError, match=ends_with(SettingCode.UNSUPPORTED)):
        hvd.elastic.run(print)


def _initialized() -> None:
    import keras

    import horovod.keras as hvd

    hvd.init()
    assert keras.backend.backend() == "jax"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, "shm", preloaded="preloaded_keras_jax") as world:
        world.run(_initialized)
        yield world


@pytest.fixture(scope="module")
def deadlocked() -> Iterator[World]:
    """A world for ranks that are to wait for each other: the coordinator finds that in seconds, not after a minute."""
    soon = DeadlockTimes(still_s=1.0, idle_s=4.0, look_s=0.1)
    with World(2, "shm", preloaded="preloaded_keras_jax", deadlock=soon) as world:
        world.run(_initialized)
        yield world


def test_fit_is_that_of_one_process(world: World) -> None:
    world.run(_same_as_one_process)


def test_batch_normalization_over_all_ranks(world: World, tmp_path: Path) -> None:
    world.run(keras_batch_norm.normalizes_all_rows, str(tmp_path))


@pytest.mark.parametrize(("outside", "local"), [(False, False), (True, False), (False, True)])
def test_an_infinity_on_one_rank_skips_the_step_on_all(world: World, outside: bool, local: bool) -> None:
    (weights, scale), (other_weights, other_scale) = world.run(_infinity_on_one_rank, outside, local)
    assert (other_weights[0], other_scale) == (weights[0], scale)
    assert local or other_weights == weights
    assert scale == 32  # the second step was skipped, by both ranks
    assert weights[0] == weights[1] != weights[2]
    assert np.isfinite(weights).all()


def test_what_is_not_there_says_so(world: World) -> None:
    world.run(_what_is_not_there)


def _go_on(folder: str) -> None:
    import keras

    import horovod.keras as hvd

    keras_elastic_rates.go_on(hvd, keras, keras.optimizers, folder)


def test_callbacks_after_an_interrupted_epoch(world: World, tmp_path: Path) -> None:
    world.run(_go_on, str(tmp_path))


def test_an_optimizer_reduces_once(world: World) -> None:
    world.run(keras_steps.every_step_reduces_once)


def test_ranks_broadcast_two_models_in_another_order(world: World) -> None:
    for error in world.run(keras_steps.error_of, keras_steps.broadcast_two):
        assert re.search(ends_with(TrainingCode.DIFFERENT_ORDER, "keras_steps.py", "rank 1"), error), error


@pytest.mark.parametrize("case", ["", "drops"])
def test_two_optimizers_of_equal_names(world: World, case: str) -> None:
    assert world.run(keras_steps.of_two, case) == [[1.0, 100.0]] * 2


@pytest.mark.parametrize("case", ["first steps", "later steps", "making"])
def test_two_optimizers_in_another_order(deadlocked: World, case: str) -> None:
    for error in deadlocked.run(keras_steps.error_of, keras_steps.of_two, case):  # a step waits for other ranks
        assert re.search(ends_with(OperationCode.DEADLOCK, "gradient.0.kernel#", "same order"), error), error


@pytest.mark.parametrize("case", ["", "looks", "one, loads"])
def test_two_models(world: World, tmp_path: Path, case: str) -> None:
    """A rank may load one to look at it, or in place of another if it is the only one."""
    expected = [1.0] if "one" in case else [1.0, 100.0]
    assert world.run(keras_steps.of_two_models, str(tmp_path), case) == [expected] * 2


@pytest.mark.parametrize("case", ["first steps", "later steps"])
def test_two_models_in_another_order(deadlocked: World, tmp_path: Path, case: str) -> None:
    for error in deadlocked.run(keras_steps.error_of, keras_steps.of_two_models, str(tmp_path), case):
        assert re.search(ends_with(OperationCode.DEADLOCK, "gradient.0.kernel#", "same order"), error), error


def _never_wrapped(wraps: bool) -> list[str]:
    import keras

    import horovod.keras as hvd

    def work() -> None:
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(hvd.DistributedOptimizer(optimizer) if wraps else optimizer, loss="mse")
        data = np.ones([120, 3], np.float32)
        model.fit(data, data[:, :1], batch_size=1, verbose=0)

    return unreduced_warnings.told(work)


def test_an_optimizer_that_was_never_distributed_is_told_once(world: World) -> None:
    (told, on_1), quiet = world.run(_never_wrapped, False), world.run(_never_wrapped, True)
    assert len(told) == 1
    assert told[0].startswith(__file__), "the warning must point to the script"
    assert on_1 == []
    assert quiet == [[], []]


def _loop_never_wrapped(case: str) -> list[str]:
    import jax
    import jax.numpy as jnp
    import keras

    import horovod.keras as hvd

    variable = keras.Variable(np.ones(64, np.float32))

    def work() -> None:
        optimizer = keras.optimizers.SGD(0.01)
        if case == "distributed":
            optimizer = hvd.DistributedOptimizer(optimizer)
        optimizer.build([variable])

        @jax.jit
        def step(trained: Any, state: Any) -> Any:
            return optimizer.stateless_apply(state, [jnp.ones(64)], trained)

        trained, state = [variable.value], [one.value for one in optimizer.variables]
        for _ in range(110):
            if case == "eagerly":
                optimizer.apply([jnp.ones(64)])
            else:
                trained, state = step(trained, state)

    return unreduced_warnings.told(work)


def test_a_loop_whose_optimizer_was_never_distributed_is_told_once(world: World) -> None:
    for case in ("a function", "eagerly"):
        told_on_0, on_1 = world.run(_loop_never_wrapped, case)
        assert len(told_on_0) == 1, case
        assert told_on_0[0].startswith(__file__), "the warning must point to the script"
        assert on_1 == []
    assert world.run(_loop_never_wrapped, "distributed") == [[], []]
