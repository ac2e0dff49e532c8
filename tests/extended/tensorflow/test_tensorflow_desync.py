"""Graphs that take other ways on different ranks. The engine has their operations, and no thread is known to wait."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from error_codes import ends_with
from worlds import Keeper

from horovod.base.errors import OperationCode
from horovod.coordinator.core.agreement.deadlock import DeadlockTimes

SOON = DeadlockTimes(still_s=1.0, idle_s=4.0, look_s=0.1)  # ranks report once in a second
FOUND = "The ranks submit different operations and wait for each other: "


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    with Keeper(2, "shm", preloaded="preloaded_tensorflow", deadlock=SOON) as keeper:
        yield keeper


def _other_functions(steps: int, jit: bool) -> str:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    functions = [
        tf.function(lambda x, name=name: hvd.allreduce(x, name=name), jit_compile=jit)  # type: ignore[misc]
        for name in ("f", "g")
    ]
    for _ in range(steps):
        for function in functions:
            function(tf.ones(3))
    with pytest.raises(Exception, match=ends_with(OperationCode.DEADLOCK)) as caught:
        functions[hvd.rank()](tf.ones(3))
    for function in functions:  # the engine stays usable
        assert function(tf.ones(3)).numpy().tolist() == [1.0] * 3
    return str(caught.value)


@pytest.mark.parametrize(
    ("steps", "jit"), [(0, False), (20, False), (20, True)], ids=["graph-new", "graph-known", "xla-known"]
)
def test_functions_that_wait_for_each_other(keeper: Keeper, steps: int, jit: bool) -> None:
    for sentence in keeper.get().run(_other_functions, steps, jit):
        assert FOUND in sentence
        assert re.search(r"rank 0 .*allreduce\.f, .*rank 1 .*rank 1 .*allreduce\.g, .*rank 0 ", sentence), sentence


def _other_variables(optimizer: bool) -> str:
    """Each rank has gradients of another head, of the same shape. A thread computes, so the processes are not idle."""
    import threading

    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    variables = [tf.Variable([1.0, 2.0]) for _ in range(3)]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variables[0] * variables[1 + hvd.rank()])
    ended = threading.Event()

    def compute() -> None:
        while not ended.wait(0.02):
            sum(range(200_000))

    def reduce() -> None:
        if not optimizer:
            hvd.DistributedGradientTape(tape).gradient(loss, variables)
            return
        sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        sgd.build(variables)
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        sgd.apply_gradients([pair for pair in pairs if pair[0] is not None])

    computing = threading.Thread(target=compute)
    computing.start()
    try:
        with pytest.raises(Exception, match=ends_with(OperationCode.DEADLOCK)) as caught:
            reduce()
    finally:
        ended.set()
        computing.join()
    return str(caught.value)


@pytest.mark.parametrize("optimizer", [False, True], ids=["tape", "optimizer"])
def test_gradients_of_other_variables_on_each_rank(keeper: Keeper, optimizer: bool) -> None:
    for sentence in keeper.get().run(_other_variables, optimizer):
        assert "rank 0 waits for grouped_allreduce.gradient.0.Variable,gradient.1.Variable, which rank 1" in sentence
        assert "rank 1 waits for grouped_allreduce.gradient.0.Variable,gradient.2.Variable, which rank 0" in sentence


def _more_steps_on_one_rank() -> str:
    import keras
    import numpy as np

    import horovod.keras as hvd
    from horovod.keras.callbacks import MetricAverageCallback

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    rows = 8 * (3 if hvd.rank() == 0 else 2)
    with pytest.raises(Exception, match=ends_with(OperationCode.DEADLOCK)) as caught:
        model.fit(
            np.ones((rows, 4), "float32"),
            np.ones((rows, 1), "float32"),
            batch_size=8,
            epochs=3,
            verbose=0,
            callbacks=[MetricAverageCallback()],
        )
    return str(caught.value)


def test_fit_with_more_steps_on_one_rank(keeper: Keeper) -> None:
    for sentence in keeper.get().run(_more_steps_on_one_rank):
        assert FOUND in sentence
        assert "which rank 1 has not started" in sentence
        assert "which rank 0 has not started" in sentence
