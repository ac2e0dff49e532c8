"""How tapes and optimizers reduce: in process sets, compressed, by Adasum, in groups. The weights are those of one
process that computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from adasum_reference import adasum
from worlds import World

RATE = 0.1
STEPS = 4
ROWS = 4  # of each rank in a step
WAYS = ("tape, eager", "tape", "optimizer", "optimizer, eager", "fit", "v1")

Reduce = Callable[[Sequence[list[np.ndarray]]], list[np.ndarray]]


def _data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(30 + rank)
    x = random.normal(size=(STEPS, ROWS, 3)).astype(np.float32)
    return x, (x.sum(-1, keepdims=True) + random.normal(size=(STEPS, ROWS, 2))).astype(np.float32)


def _begin() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.normal(size=(3, 2)).astype(np.float32), np.array([0.5, -0.5], np.float32)]


def _gradients(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Of the mean of the squared errors of a linear model."""
    error = 2 * (x @ weights[0] + weights[1] - y) / y.size
    return [x.T @ error, error.sum(0)]


def _one_process(ranks: Sequence[int], reduce: Reduce) -> list[np.ndarray]:
    weights = _begin()
    data = [_data(rank) for rank in ranks]
    for step in range(STEPS):
        reduced = reduce([_gradients(weights, x[step], y[step]) for x, y in data])
        weights = [weight - RATE * gradient for weight, gradient in zip(weights, reduced, strict=True)]
    return weights


def _average(gradients: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    return [np.mean(ones, axis=0, dtype=np.float32) for ones in zip(*gradients, strict=True)]


def _halved(gradients: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """What float16 leaves of a sum."""
    return [
        np.mean([one.astype(np.float16).astype(np.float32) for one in ones], axis=0).astype(np.float16)
        for ones in zip(*gradients, strict=True)
    ]


def _adasum(gradients: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    return [adasum([one.reshape(-1) for one in ones]).reshape(ones[0].shape) for ones in zip(*gradients, strict=True)]


def _train(way: str, **options: Any) -> list[np.ndarray]:
    import keras
    import tensorflow as tf

    import horovod.keras
    import horovod.tensorflow as hvd

    if way == "v1":
        return _train_v1(**options)
    layer = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input([3]), layer])
    model.set_weights(_begin())
    optimizer = keras.optimizers.SGD(RATE)
    if not way.startswith("tape"):
        optimizer = (horovod.keras if way == "fit" else hvd).DistributedOptimizer(optimizer, **options)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        if way.startswith("tape"):
            tape = hvd.DistributedGradientTape(tape, **options)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    x, y = _data(hvd.rank())
    if way == "fit":
        model.compile(optimizer, loss="mse")
        model.fit(x.reshape(-1, 3), y.reshape(-1, 2), batch_size=ROWS, shuffle=False, verbose=0)
    else:
        run = step if way.endswith("eager") else tf.function(step)
        for own_x, own_y in zip(x, y, strict=True):
            run(tf.constant(own_x), tf.constant(own_y))
    weights: list[np.ndarray] = model.get_weights()
    return weights


def _train_v1(**options: Any) -> list[np.ndarray]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        kernel, bias = (
            v1.get_variable(name, initializer=tf.constant(value), use_resource=True)
            for name, value in zip(("kernel", "bias"), _begin(), strict=True)
        )
        x, y = v1.placeholder(tf.float32, [ROWS, 3]), v1.placeholder(tf.float32, [ROWS, 2])
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(RATE), **options)
        train = optimizer.minimize(tf.reduce_mean(tf.square(x @ kernel + bias - y)))
        session.run(v1.global_variables_initializer())
        for own_x, own_y in zip(*_data(hvd.rank()), strict=True):
            session.run(train, {x: own_x, y: own_y})
        weights: list[np.ndarray] = session.run([kernel, bias])
        return weights


def _check(found: list[np.ndarray], wanted: list[np.ndarray], way: str, **tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, err_msg=way, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


# -- process sets ------------------------------------------------------------------------------------------------------
def _in_a_set(ways: Sequence[str]) -> dict[str, list[np.ndarray]]:
    import horovod.tensorflow as hvd

    outer = hvd.add_process_set([0, 2])
    found = {way: _train(way, process_set=outer) for way in ways}
    assert hvd.remove_process_set(outer)
    return found


def test_a_process_set_trains_as_one_process_and_the_others_alone() -> None:
    with World(3, "shm", {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, preloaded="preloaded_tensorflow") as world:
        found = world.run(_in_a_set, WAYS)
    together, alone = _one_process([0, 2], _average), _one_process([1], _average)
    for way in WAYS:
        for rank, wanted in enumerate((together, alone, together)):
            _check(found[rank][way], wanted, f"{way}, rank {rank}")


# -- compression -------------------------------------------------------------------------------------------------------
def _compressed(way: str) -> list[np.ndarray]:
    import horovod.tensorflow as hvd

    return _train(way, compression=hvd.Compression.fp16)


def _below_float16(compression: str) -> float:
    """The gradient of a variable is one that float16 rounds to 1."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    variable = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        loss = variable * (1.0 + 2.0**-13)
    tape = hvd.DistributedGradientTape(tape, compression=getattr(hvd.Compression, compression))
    return float(tape.gradient(loss, variable))


def test_fp16_compression_trains_as_one_process_that_rounds(tf_pair: World) -> None:
    wanted = _one_process([0, 1], _halved)
    for way in WAYS:
        for found in tf_pair.run(_compressed, way):
            _check(found, wanted, way, rtol=1e-3, atol=1e-4)  # a sum that lies between two of float16's numbers
    assert tf_pair.run(_below_float16, "fp16") == [1.0, 1.0]
    assert tf_pair.run(_below_float16, "none") == [1.0 + 2.0**-13] * 2


# -- Adasum ------------------------------------------------------------------------------------------------------------
def _by_adasum(way: str, **options: Any) -> list[np.ndarray]:
    import horovod.tensorflow as hvd

    return _train(way, op=hvd.Adasum, **options)


@pytest.mark.parametrize("groups", [None, 1], ids=["alone", "grouped"])
def test_adasum_by_a_tape_trains_as_its_definition(tf_pair: World, groups: int | None) -> None:
    wanted = _one_process([0, 1], _adasum)
    assert not np.allclose(wanted[0], _one_process([0, 1], _average)[0], atol=1e-3)
    for way in ("tape, eager", "tape"):
        for found in tf_pair.run(_by_adasum, way, groups=groups):
            _check(found, wanted, way)


# -- groups ------------------------------------------------------------------------------------------------------------
def _operations_of(groups: int | None) -> list[int]:
    """How many tensors the allreduces have that a Keras optimizer puts into a graph."""
    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    variables = [keras.Variable([1.0]) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), groups=groups)
    optimizer.build(variables)

    @tf.function
    def step() -> None:
        optimizer.apply([tf.ones([1])] * 4, variables)

    step()
    nodes = step.get_concrete_function().graph.get_operations()
    return sorted(len(node.outputs) for node in nodes if node.type in ("HorovodAllreduce", "HorovodGroupedAllreduce"))


def test_groups_of_a_keras_optimizer(tf_pair: World) -> None:
    for groups, wanted in ((None, [1, 1, 1, 1]), (2, [2, 2]), (1, [4])):
        assert tf_pair.run(_operations_of, groups) == [wanted] * 2
