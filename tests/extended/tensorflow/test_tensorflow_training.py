"""N ranks train as one process on the joined batch would: by a tape, an optimizer, model.fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import TrainingCode

STEPS = 6
BATCH = 8  # of all ranks together


def _data(steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(steps * BATCH, 5)).astype(np.float32)
    return x, (x @ random.normal(size=(5, 2)) + random.normal(size=(steps * BATCH, 2))).astype(np.float32)


def _model(seed: int = 1) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input([5]), keras.layers.Dense(7, "tanh"), keras.layers.Dense(2)])


def _own(batch: np.ndarray) -> np.ndarray:
    """This rank's rows of a batch."""
    import horovod.keras as hvd

    rows = len(batch) // hvd.size()
    return batch[hvd.rank() * rows : (hvd.rank() + 1) * rows]


def _batches(distributed: bool, passes: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = _data()
    found = []
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        if not distributed:
            found.append((x[rows], y[rows]))
            continue
        own_x, own_y = _own(x[rows]), _own(y[rows])
        found += list(zip(np.split(own_x, passes), np.split(own_y, passes), strict=True))
    return found


def _loop(model: Any, optimizer: Any, batches: Any, in_function: bool, tape_options: dict[str, Any] | None) -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        if tape_options is not None:
            tape = hvd.DistributedGradientTape(tape, **tape_options)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run: Callable[..., None] = tf.function(step) if in_function else step
    for x, y in batches:
        run(tf.constant(x), tf.constant(y))


def _optimizers() -> dict[str, Callable[[], Any]]:
    import keras

    return {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(0.05),
        "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
        "rmsprop": lambda: keras.optimizers.RMSprop(0.02, momentum=0.5),
    }


def _same_as_one_process(name: str, ways: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool, int]]) -> None:
    """ways: the options of the optimizer; those of the tape, if it is to reduce; whether in a function; passes."""
    import horovod.tensorflow as hvd

    make = _optimizers()[name]
    alone = _model()
    _loop(alone, make(), _batches(False), False, None)
    expected = alone.get_weights()
    for way, (options, tape_options, in_function, passes) in ways.items():
        model = _model(seed=1 + hvd.rank())
        hvd.broadcast_variables(model.variables, root_rank=0)
        optimizer = make()
        if tape_options is None:
            optimizer = hvd.DistributedOptimizer(optimizer, **options)
        _loop(model, optimizer, _batches(True, passes), in_function, tape_options)
        for found, wanted in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5, err_msg=f"{name}, {way}")
        assert int(optimizer.iterations) == STEPS * passes


PASSES = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "rmsprop"])
def test_custom_loops_train_as_one_process_would(tf_pair: World, name: str) -> None:
    ways: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool, int]] = {
        "optimizer, eager": ({"gradient_predivide_factor": 2.0}, None, False, 1),
        "passes, eager": (PASSES, None, False, 2),
    }
    if name == "momentum":
        ways |= {"tape": ({}, {"gradient_predivide_factor": 2.0}, True, 1), "eager": ({}, {"groups": 2}, False, 1)}
    if name == "adam":
        ways |= {"optimizer": ({"groups": 2}, None, True, 1), "passes": (PASSES, None, True, 2)}
    tf_pair.run(_same_as_one_process, name, ways)


def _heads_in_turn(kind: str, in_function: bool, leaves_out: bool) -> None:
    """Passes of one step make gradients of different variables, and some step makes none of some of them."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    if kind == "keras":
        import keras

        sgd = keras.optimizers.SGD
    else:
        sgd = tf.keras.optimizers.legacy.SGD if kind == "legacy" else tf.keras.optimizers.SGD
    # Without a gradient momentum changes a variable; functions of tf_keras have zeros in its place.
    sgd = functools.partial(sgd, 0.1, momentum=0.9 if kind == "keras" or not in_function else 0.0)
    variables, alone = ([tf.Variable([1.0, 2.0], name=f"v{place}") for place in range(3)] for _ in range(2))
    optimizer, reference = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2), sgd()
    if leaves_out:
        optimizer.build(variables)

    def step(head: int) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * variables[head] * (hvd.rank() + 1.0))
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None or not leaves_out])

    run: Callable[..., None] = tf.function(step) if in_function else step
    if kind != "legacy":
        reference.build(alone)
    for heads in ((1, 1), (1, 2), (2, 1), (1, 1)):
        sums: dict[int, Any] = {0: 0.0}
        for head in heads:
            run(head)
            sums[0] += 1.5 * alone[head]
            sums[head] = sums.get(head, 0.0) + 1.5 * alone[0]
        reference.apply_gradients([(total, alone[place]) for place, total in sums.items()])
        found, expected = ([one.numpy() for one in several] for several in (variables, alone))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_passes_of_different_variables(tf_pair: World, legacy_pair: World, in_function: bool) -> None:
    tf_pair.run(_heads_in_turn, "keras", in_function, False)
    tf_pair.run(_heads_in_turn, "keras", in_function, True)
    legacy_pair.run(_heads_in_turn, "tf_keras", in_function, False)
    legacy_pair.run(_heads_in_turn, "legacy", in_function, False)


def _fit(**options: Any) -> None:
    import keras

    import horovod.keras as hvd

    x, y = _data()
    alone = _model()
    of_optimizer = {name: options.pop(name) for name in list(options) if name.startswith("gradient")}
    alone.compile(keras.optimizers.SGD(0.1, momentum=0.9, **of_optimizer), loss="mse", **options)
    alone.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)

    model = _model(seed=1 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, **of_optimizer))
    model.compile(optimizer, loss="mse", **options)
    own = [np.concatenate([_own(one[row : row + BATCH]) for row in range(0, len(one), BATCH)]) for one in (x, y)]
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    assert model.jit_compile == (options.get("jit_compile") is True)
    history = model.fit(*own, batch_size=BATCH // hvd.size(), shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
    for found, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)
    for found, wanted in zip(model.optimizer.variables, alone.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=2e-3, atol=2e-5)
    np.testing.assert_allclose(history.history["loss"], alone.history.history["loss"], rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 3},
        {"run_eagerly": True},
        {"gradient_accumulation_steps": 2},
        {"jit_compile": True},
        {"jit_compile": True, "steps_per_execution": 3},
        {"jit_compile": "auto"},
    ],
    ids=str,
)
def test_fit_trains_as_one_process_would(tf_pair: World, options: dict[str, Any]) -> None:
    tf_pair.run(_fit, **options)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_fit_on_pytorch_trains_as_one_process_would(torch_pair: World, options: dict[str, Any]) -> None:
    torch_pair.run(_fit, **options)


def _callbacks() -> None:
    import keras

    import horovod.keras as hvd

    rank = hvd.rank()
    x, y = np.ones([12, 3], np.float32), np.full([12, 1], rank, np.float32)
    model = keras.Sequential([keras.layers.Dense(1)])  # unbuilt
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9))
    model.compile(optimizer, loss="mse")
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(np.array(self.model.optimizer.learning_rate)))

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(0.2, lambda epoch: 0.5, start_epoch=2),
        Rates(),
    ]
    history = model.fit(x, y, batch_size=6, epochs=3, verbose=0, callbacks=callbacks)
    np.testing.assert_allclose(rates, [0.125, 0.15, 0.175, 0.2, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], [0.15, 0.2, 0.1], rtol=1e-6)
    gathered = np.asarray(hvd.allgather(np.array([history.history["loss"]])))
    assert gathered[0].tolist() == gathered[1].tolist()
    weights = np.asarray(hvd.allgather(model.get_weights()[0][None]))
    assert weights[0].tolist() == weights[1].tolist()
    validated = {"validation_data": (x, y)} if rank == 1 else {}
    with pytest.raises(
        ValueError, match=ends_with(TrainingCode.DIFFERENT_METRICS, "'val_loss'", "rank 1 had", "rank 0")
    ):
        model.fit(x, y, batch_size=6, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()], **validated)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "local_variables", "int")):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "`initial_lr`")):
        hvd.callbacks.LearningRateWarmupCallback(None)


def test_callbacks(tf_pair: World, torch_pair: World) -> None:
    tf_pair.run(_callbacks)
    torch_pair.run(_callbacks)
