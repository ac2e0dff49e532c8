"""Functions that call each other: whatever was traced first, on any rank, each call meets the same one elsewhere.

In each of these cases one rank has the operands of the calls in another order than the other, so that operations with
one name would meet wrongly.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from worlds import World

from horovod.base.errors import TrainingCode, code_of


def _late(x: Any, is_late: bool) -> Any:
    """x, after a computation that takes a while."""
    import tensorflow as tf

    if not is_late:
        return x
    product = tf.random.uniform([600, 600])
    for _ in range(6):
        product = tf.linalg.matmul(product, product) / 180000.0
    return x + tf.reduce_sum(product) * 1e-30


def _steps(count: int) -> tuple[list[Any], list[Any]]:
    """Variables of one name, and functions whose gradient is 10^i times their argument."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    def make(variable: Any, slope: float) -> Any:
        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable) * x * slope
            gradient = hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0]
            variable.assign_add(gradient)
            return loss

        return step

    variables = [tf.Variable(tf.zeros([4]), name="w") for _ in range(count)]
    return variables, [make(variable, 10.0**place) for place, variable in enumerate(variables)]


def _called_from_a_third(traced_before: dict[int, list[int]], retraced: bool) -> list[list[float]]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    variables, steps = _steps(3)
    for place in traced_before[rank]:
        steps[place].get_concrete_function(tf.TensorSpec([], tf.float32))

    @tf.function
    def all_of_them(x: Any) -> None:
        for place, step in enumerate(steps):
            step(_late(x, (place + rank) % 2 == 0))

    for number in range(4):
        if retraced and rank == 1 and number == 2:
            all_of_them.get_concrete_function(tf.TensorSpec([1], tf.float32))
            steps[1].get_concrete_function(tf.TensorSpec([1], tf.float32))
        all_of_them(tf.constant(float(number + rank)))
    return [variable.numpy().tolist() for variable in variables]


@pytest.mark.parametrize(
    "traced_before",
    [{0: [], 1: []}, {0: [0, 1, 2], 1: [0, 1, 2]}, {0: [2, 0], 1: [0, 1]}, {0: [], 1: [1]}],
    ids=["none", "all", "others", "one rank's"],
)
def test_functions_that_a_third_calls(tf_pair: World, traced_before: dict[int, list[int]]) -> None:
    total = sum(number + 0.5 for number in range(4))
    found = tf_pair.run(_called_from_a_third, traced_before, retraced=True)
    assert found == [[pytest.approx([total * 10.0**place] * 4) for place in range(3)]] * 2


def _copies(folder: str) -> dict[str, list[float]]:
    """Sums of calls of one function in each way to call it, all twice and at once."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    one = tf.Variable(1.0)  # what uses no variable TensorFlow calls one by one

    class Layer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = one

        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def total(self, x: Any) -> Any:
            return hvd.allreduce(self.one * x, op=hvd.Sum, name="total")

    @tf.function
    def scaled(factor: Any, x: Any) -> Any:
        return factor * hvd.allreduce(one * x, op=hvd.Sum, name="total")

    def plain(x: Any) -> Any:
        return hvd.allreduce(one * x, op=hvd.Sum, name="total")

    first, second = Layer(), Layer()
    inner = tf.function(lambda x: scaled(1.0, x) + 100.0 * scaled(1.0, x + 1.0))
    not_inlined = tf.function(plain, experimental_attributes={"_noinline": True})
    compiled = tf.function(plain, jit_compile=True)
    path = f"{folder}/{rank}"
    tf.saved_model.save(first, path)
    loaded = [tf.saved_model.load(path) for _ in range(2)]
    concrete = first.total.get_concrete_function()
    kinds = {
        "concrete function": [concrete, concrete],
        "methods": [first.total, second.total],
        "partial": [functools.partial(scaled, 1.0), functools.partial(scaled, tf.constant(1.0))],
        "nested": [inner, inner],
        "not inlined": [not_inlined, not_inlined],
        "loaded": [loaded[0].total, loaded[1].total],
        "loaded and its model": [loaded[0].total, first.total],
        "compiled": [compiled, compiled],
        "an operation and a function": [plain, first.total],
    }
    found = {}
    for kind, (some, other) in kinds.items():

        @tf.function(autograph=False)
        def both(x: Any, some: Any = some, other: Any = other) -> Any:
            return some(_late(x, rank == 0)), other(_late(x + 10.0, rank == 1))

        for _ in range(2):
            found[kind] = [float(result) for result in both(tf.constant(float(rank)))]
    return found


def test_copies_of_a_function(tf_pair: World, tmp_path: Path) -> None:
    for found in tf_pair.run(_copies, str(tmp_path)):
        assert found.pop("nested") == [1.0 + 300.0, 21.0 + 2300.0]
        assert found == {kind: [1.0, 21.0] for kind in found}
        assert len(found) == 8


def _in_a_session() -> list[float]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="total"))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant(float(rank))
        return [float(one) for one in session.run([total(_late(x, rank == 0)), total(_late(x + 10.0, rank == 1))])]


def test_functions_called_in_a_v1_graph(tf_pair: World) -> None:
    for _ in range(2):
        assert tf_pair.run(_in_a_session) == [[1.0, 21.0]] * 2


def _loops() -> dict[str, list[float]]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    one = tf.Variable(1.0)  # what uses no variable TensorFlow calls one by one

    @tf.function
    def total(x: Any) -> Any:
        return hvd.allreduce(one * x, op=hvd.Sum)

    total(tf.constant(0.0))

    @tf.function(autograph=False)
    def mapped(numbers: Any) -> Any:
        return tf.map_fn(lambda x: total(x) + 100.0 * total(x + 1.0), numbers, parallel_iterations=10)

    @tf.function
    def looped(times: Any) -> Any:
        result = total(0.0)
        for step in tf.range(times):
            x = tf.cast(step, tf.float32)
            result += total(_late(x, rank == 0)) + 100.0 * total(_late(x + 1.0, rank == 1))
            if step % 2 == 0:
                result += 10000.0 * total(x)
        return result

    return {"mapped": mapped(tf.range(20.0)).numpy().tolist(), "looped": [float(looped(tf.constant(4)))]}


def test_functions_called_in_loops(tf_pair: World) -> None:
    for found in tf_pair.run(_loops):
        assert found["mapped"] == [2.0 * x + 200.0 * (x + 1) for x in range(20)]
        assert found["looped"] == [2 * 6 + 200 * 10 + 20000 * 2]


def _gradients(in_function: bool) -> dict[str, list[float]]:
    """Of functions with collectives, by a tape around their calls."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    x, y = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def total(x: Any, factor: Any) -> Any:
        return hvd.allreduce(factor * x, op=hvd.Sum)

    @tf.function
    def both(x: Any, y: Any) -> tuple[Any, Any]:
        return total(x, rank + 1.0), total(y, 10.0)

    def of_each() -> list[Any]:  # the gradients of the two calls meet while one rank has those of the other first
        with tf.GradientTape() as tape:
            first, second = both(x, y)
            loss = _late(first, rank == 0) + 100.0 * _late(second, rank == 1)
        return tape.gradient(loss, [x, y])

    def of_one_twice() -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            result = total(x, rank + 1.0)
            first, second = _late(result, rank == 0), 100.0 * _late(result, rank == 1)
        return [tape.gradient(first, x), tape.gradient(second, x)]

    def of_two_twice() -> list[Any]:  # the backward pass of `both` calls those of `total`
        with tf.GradientTape(persistent=True) as tape:
            results = tf.add_n(both(x, y))
            first, second = _late(results, rank == 0), 100.0 * _late(results, rank == 1)
        return [tape.gradient(first, x), tape.gradient(second, y)]

    ways = {"of each": of_each, "of one, twice": of_one_twice, "of two, twice": of_two_twice}
    return {
        name: [float(one) for one in (tf.function(way, autograph=False) if in_function else way)()]
        for name, way in ways.items()
    }


def test_gradients_of_functions(tf_pair: World) -> None:
    for in_function in (False, True):
        for rank, found in enumerate(tf_pair.run(_gradients, in_function)):
            assert found["of each"] == [2.0 * (rank + 1), 2000.0], in_function
            assert found["of one, twice"] == [2.0 * (rank + 1), 200.0 * (rank + 1)], in_function
            assert found["of two, twice"] == [2.0 * (rank + 1), 2000.0], in_function


# -- the order of models ---------------------------------------------------------------------------------------------
def _two_models(orders: list[list[int]], made_before: list[int], kind: str) -> list[list[float]] | str:
    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    for _ in range(made_before[rank]):
        keras.Sequential([keras.Input([2]), keras.layers.Dense(1), hvd.SyncBatchNormalization()])
    variables: list[Any]
    if kind == "keras":
        models = [keras.Sequential([keras.Input([2]), keras.layers.Dense(1, "linear", False)]) for _ in range(2)]
        variables = [model.trainable_variables[0] for model in models]
        for variable in variables:
            variable.assign(tf.zeros([2, 1]))
    else:
        variables = [tf.Variable(tf.zeros([2, 1]), name="w") for _ in range(2)]

    def train(place: int) -> None:
        variable = variables[place]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * (rank + 1.0) * 10.0**place
        variable.assign(hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0])

    trainers = [functools.partial(train, place) for place in range(2)]
    if kind == "functions":
        trainers = [tf.function(trainer, autograph=False) for trainer in trainers]

    @tf.function(autograph=False)
    def step() -> None:
        for place in orders[rank]:
            trainers[place]()

    try:
        step()
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    return [variable.numpy().reshape(-1).tolist() for variable in variables]


@pytest.mark.parametrize("kind", ["keras", "variables", "functions"])
def test_models_in_another_order_on_each_rank(tf_pair: World, kind: str) -> None:
    right = [[1.5, 1.5], [15.0, 15.0]]
    for order in ([0, 1], [1, 0]):
        assert tf_pair.run(_two_models, [order] * 2, [1, 0], kind) == [right] * 2
    for sentence in tf_pair.run(_two_models, [[0, 1], [1, 0]], [0, 0], kind):
        assert code_of(sentence) is TrainingCode.DIFFERENT_ORDER, sentence


def _batch_normalization(made_before: list[int], in_function: bool) -> list[list[float]]:
    import keras
    import numpy as np
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    for _ in range(made_before[rank]):
        hvd.SyncBatchNormalization()
    layers = [hvd.SyncBatchNormalization(momentum=0.0) for _ in range(2)]
    model = keras.Sequential([keras.Input([2]), layers[0], keras.layers.Rescaling(10.0, 5.0), layers[1]])

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x, training=True) * [[1.0, 2.0], [3.0, 4.0]])
        return tape.gradient(loss, x)

    (tf.function(step) if in_function else step)(tf.constant(np.array([[0.0, 1.0], [2.0, 5.0]], np.float32) + 4 * rank))
    return [layer.moving_mean.numpy().tolist() for layer in layers]


def test_batch_normalization_where_a_rank_has_made_another_model(tf_pair: World) -> None:
    for in_function in (True, False):
        for found in tf_pair.run(_batch_normalization, [2, 0], in_function):
            assert found[0] == pytest.approx([3.0, 5.0])
            assert found[1] == pytest.approx([5.0, 5.0], abs=1e-4)
