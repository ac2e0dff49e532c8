"""Collectives that XLA compiles into another program on each rank: they run in the order of the script all the same.

What needs nothing of each other XLA puts into an order of its own. Here the ranks differ in the sizes of their batches,
and in which results they return first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode


def _constructs(construct: str) -> list[list[float]]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    def in_line(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum, name="first")

    @tf.function(autograph=False)
    def called(x: tf.Tensor) -> tf.Tensor:
        return in_line(x)

    def in_a_loop(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, hvd.allreduce(y, name="loop")), (0, 2.0 * x))[1]

    def in_a_branch(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: in_line(x), lambda: x)

    first: Callable[[tf.Tensor], tf.Tensor] = {
        "line": in_line,
        "function": called,
        "loop": in_a_loop,
        "branch": in_a_branch,
    }[construct]

    @tf.function(jit_compile=True, autograph=False)
    def step(x: tf.Tensor, other: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for turn in range(4):
            mine = x
            if (turn + rank) % 2:
                mine = x + 0.0 * tf.reduce_mean(tf.tanh(other @ other))
            found.append(first(mine + turn))
            found.append(hvd.allreduce(3.0 * mine, op=hvd.Sum, name=f"after.{turn}"))
        return found[::-1] if rank else found

    for size in (8, 100):
        found = [one.numpy().tolist() for one in step(tf.ones([2]), tf.ones([size, size]))]
    return found[::-1] if rank else found


@pytest.mark.parametrize("construct", ["line", "function", "loop", "branch"])
def test_ranks_whose_programs_differ(construct: str, tf_pair: World) -> None:
    expected = [[2.0, 2.0], [6.0, 6.0], [4.0, 4.0], [6.0, 6.0], [6.0, 6.0], [6.0, 6.0], [8.0, 8.0], [6.0, 6.0]]
    assert tf_pair.run(_constructs, construct) == [expected, expected]


def _uneven(rows: tuple[int, int]) -> None:
    """A network with branches and batch normalization; the gradients are the average of those of both batches."""
    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    keras.utils.set_random_seed(0)
    given = keras.Input((8, 8, 3))
    x = given
    for filters in (4, 8):
        y = keras.layers.Conv2D(filters, 3, padding="same")(x)
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
        y = keras.layers.Conv2D(filters, 3, padding="same")(y)
        x = keras.layers.MaxPooling2D()(keras.layers.Add()([y, keras.layers.Conv2D(filters, 1)(x)]))
    model = keras.Model(given, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))

    random = np.random.default_rng(5)
    batches = [[tf.constant(random.random((n, *of)), tf.float32) for of in ((8, 8, 3), (3,))] for n in rows]

    def gradients(x: tf.Tensor, y: tf.Tensor, tape_of: Callable[[tf.GradientTape], tf.GradientTape]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        return tape_of(tape).gradient(loss, model.trainable_variables)

    @tf.function(jit_compile=True)
    def reduced(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        return gradients(x, y, hvd.DistributedGradientTape)

    alone = [gradients(*batch, lambda tape: tape) for batch in batches]
    found = reduced(*batches[hvd.rank()])
    for one, of_first, of_second in zip(found, *alone, strict=True):
        np.testing.assert_allclose(one, (of_first + of_second) / 2.0, rtol=1e-4, atol=1e-5)


def test_gradients_of_batches_of_different_sizes(tf_pair: World) -> None:
    tf_pair.run(_uneven, (1, 15))


def _layers_and_sets(rows: tuple[int, int]) -> None:
    """Statistics over all ranks, an embedding whose gradient is sparse, and a process set, in one step."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    own = hvd.add_process_set([0])
    normalize = hvd.SyncBatchNormalization(name="normalize")
    table = tf.Variable(tf.ones([5, 2]))
    random = np.random.default_rng(2)
    batches = [tf.constant(random.random((n, 2)), tf.float32) for n in rows]
    whole = tf.concat(batches, 0)
    normalize.build(whole.shape)

    @tf.function(jit_compile=True, autograph=False)
    def step(x: tf.Tensor, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        normalized = normalize(x, training=True)
        alone = hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=own) if rank == 0 else tf.ones([2])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, words))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True)
        return normalized, alone, tape.gradient(loss, table)

    normalized, alone, gradient = step(batches[rank], tf.range(rows[rank]) % 5)
    expected = (whole - tf.reduce_mean(whole, 0)) / tf.sqrt(tf.math.reduce_variance(whole, 0) + normalize.epsilon)
    mine = slice(0, rows[0]) if rank == 0 else slice(rows[0], None)
    np.testing.assert_allclose(normalized, expected[mine], rtol=1e-4, atol=1e-5)
    assert alone.numpy().tolist() == [1.0, 1.0]
    counts = [sum(word % 5 == place for n in rows for word in range(n)) / 2.0 for place in range(5)]
    assert gradient.numpy().tolist() == [[count, count] for count in counts]

    @tf.function(jit_compile=True, autograph=False)
    def rows_travel(words: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, words))
        return hvd.DistributedGradientTape(tape).gradient(loss, table).values

    with pytest.raises(tf.errors.FailedPreconditionError, match=ends_with(OperationCode.MISMATCHED)):
        rows_travel(tf.range(rows[rank]) % 5)
    hvd.remove_process_set(own)


def test_layers_and_process_sets_with_batches_of_different_sizes(tf_pair: World) -> None:
    tf_pair.run(_layers_and_sets, (1, 6))


def _fit(rows: int) -> list[np.ndarray]:
    import keras

    import horovod.keras as hvd

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=True)
    random = np.random.default_rng(hvd.rank())
    model.fit(random.random((rows, 4)), random.random((rows, 2)), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [one.numpy() for one in model.weights]


def _fit_uneven() -> list[np.ndarray]:
    import horovod.keras as hvd

    return _fit((9, 15)[hvd.rank()])


def test_a_fit_whose_last_batches_differ(tf_pair: World) -> None:
    for one, other in zip(*tf_pair.run(_fit_uneven), strict=True):
        np.testing.assert_array_equal(one, other)


def _threads() -> list[list[float]]:
    """Two threads, each with a function of its own that it traces and runs; the ranks start them in another order."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    found: dict[str, list[float]] = {}
    arrived = threading.Barrier(2)

    def work(name: str) -> None:
        @tf.function(jit_compile=True, autograph=False)
        def step(x: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(x, op=hvd.Sum, name=f"{name}.1") + hvd.allreduce(x, op=hvd.Sum, name=f"{name}.2")

        arrived.wait(60)
        for _ in range(20):
            result = step(tf.ones([2]))
        found[name] = result.numpy().tolist()

    names = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found["a"], found["b"]]


def test_threads_with_functions_of_their_own(tf_pair: World) -> None:
    assert tf_pair.run(_threads) == [[[4.0, 4.0], [4.0, 4.0]]] * 2


def _session() -> list[float]:
    """Of v1: the variable of the order needs no initializer and is in no checkpoint."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    with tf.Graph().as_default():

        @tf.function(jit_compile=True, autograph=False)
        def step(x: tf.Tensor) -> list[tf.Tensor]:
            found = [hvd.allreduce(x + turn, op=hvd.Sum, name=f"v1.{turn}") for turn in range(4)]
            return found[::-1] if rank else found

        results = step(tf.constant([1.0]))
        assert tf.compat.v1.global_variables() == []
        with tf.compat.v1.Session() as session:
            for _ in range(2):
                found = [float(one[0]) for one in session.run(results)]
    return found[::-1] if rank else found


def test_a_v1_session(tf_pair: World) -> None:
    assert tf_pair.run(_session) == [[2.0, 4.0, 6.0, 8.0]] * 2
