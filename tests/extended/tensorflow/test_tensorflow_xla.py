"""Collectives in functions that XLA compiles."""

from __future__ import annotations

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode

DTYPES = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"]
EIGHT_BIT_FLOATS = ["float8_e4m3fn", "float8_e5m2"]


def _dtype(name: str) -> object:
    import tensorflow as tf

    return getattr(tf, name, None) or getattr(tf.dtypes.experimental, name)


def _every_collective() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor) -> dict[str, object]:
        return {
            "sum": hvd.allreduce(x * 2, op=hvd.Sum),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1e-5, name="scaled"),
            "again": hvd.allreduce(x * 2, op=hvd.Sum),
            "group": hvd.grouped_allreduce([x, tf.cast(x, tf.int32)], op=hvd.Max),
            "rows": hvd.allgather(x),
            "both": hvd.grouped_allgather([x, x + 1]),
            "root": hvd.broadcast(x, 1),
            "exchanged": hvd.alltoall(tf.range(4) + 10 * rank),
            "own": hvd.reducescatter(tf.range(3.0), op=hvd.Sum),
            "size": hvd.size_op(),
        }

    for _ in range(3):
        found = tf.nest.map_structure(lambda tensor: tensor.numpy().tolist(), step(tf.constant([1.0, rank])))
    np.testing.assert_allclose(found.pop("scaled"), [1e-5, 0.5e-5])
    assert found == {
        "sum": [4.0, 2.0],
        "again": [4.0, 2.0],
        "group": [[1.0, 1.0], [1, 1]],
        "rows": [1.0, 0.0, 1.0, 1.0],
        "both": [[1.0, 0.0, 1.0, 1.0], [2.0, 1.0, 2.0, 2.0]],
        "root": [1.0, 1.0],
        "exchanged": [0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13],
        "own": [0.0, 2.0] if rank == 0 else [4.0],
        "size": 2,
    }


def test_every_collective(tf_pair: World) -> None:
    tf_pair.run(_every_collective)


def _dtypes(names: list[str]) -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    for name in names:

        @tf.function(jit_compile=True)
        def step(x: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(x, op=hvd.Max)

        mine = tf.cast(tf.constant([0.0, hvd.rank()]), _dtype(name))
        assert tf.cast(step(mine), tf.float32).numpy().tolist() == [0.0, 1.0], name


def test_every_dtype(tf_pair: World) -> None:
    tf_pair.run(_dtypes, [*DTYPES, *EIGHT_BIT_FLOATS])


def _training(jit_compile: bool) -> list[float]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    weights = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    bias = tf.Variable([0.5, 0.5])
    rows = tf.constant([[1.0, 2.0], [3.0, 1.0]]) * (hvd.rank() + 1.0)

    @tf.function(jit_compile=jit_compile)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = hvd.allreduce(tf.nn.tanh(x @ weights + bias))
            gathered = hvd.allgather(hidden)
            scattered = hvd.reducescatter(gathered * gathered, op=hvd.Sum)
            loss = tf.reduce_sum(scattered) + tf.reduce_sum(hvd.broadcast(hidden, 1) * hvd.alltoall(hidden))
        gradients = hvd.grouped_allreduce(tape.gradient(loss, [weights, bias]))
        weights.assign_sub(0.01 * gradients[0])
        bias.assign_sub(0.01 * gradients[1])
        return loss

    losses = [float(step(rows)) for _ in range(4)]
    return [*losses, *weights.numpy().reshape(-1).tolist(), *bias.numpy().tolist()]


def test_gradients_are_those_without_xla(tf_pair: World) -> None:
    for compiled, plain in zip(tf_pair.run(_training, True), tf_pair.run(_training, False), strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-5)


def _loop() -> list[float]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    @tf.function(jit_compile=True)
    def loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(5):
            x = hvd.allreduce(x, op=hvd.Sum) / 2.0 + 1.0
        return x

    found: list[float] = loop(tf.constant([float(hvd.rank())])).numpy().tolist()
    return found


def test_a_loop(tf_pair: World) -> None:
    assert tf_pair.run(_loop) == [[5.5], [5.5]]


def _disagree() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, name="not.alike")

    with pytest.raises(tf.errors.FailedPreconditionError, match=ends_with(OperationCode.MISMATCHED)):
        step(tf.zeros([1 + hvd.rank()]))

    @tf.function(jit_compile=True)
    def gather(x: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(x, name="uneven")

    with pytest.raises(tf.errors.FailedPreconditionError, match=ends_with(OperationCode.MISMATCHED)):
        gather(tf.zeros([1 + hvd.rank()]))

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([None])])
    def any_shape(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x)

    with pytest.raises(NotImplementedError, match=ends_with(OperationCode.NOT_COMPILABLE, "shape (None,)")):
        any_shape(tf.zeros([2]))


def _tape_of_a_batch(jit_compile: bool) -> dict[str, list[np.ndarray]]:
    """The gradients of this rank's half of a batch, reduced, and those of all of it by this process alone."""
    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)])
    random = np.random.default_rng(7)
    x, y = (tf.constant(random.normal(size=[8, columns]), tf.float32) for columns in (6, 2))

    def gradients(x: tf.Tensor, y: tf.Tensor, tape_of: object) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        return tape_of(tape).gradient(loss, model.trainable_variables)  # type: ignore[operator]

    @tf.function(jit_compile=jit_compile)
    def reduced(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        return gradients(x, y, lambda tape: hvd.DistributedGradientTape(tape, groups=2))

    own = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    found = {"reduced": reduced(x[own], y[own]), "alone": gradients(x, y, lambda tape: tape)}
    return {name: [one.numpy() for one in ones] for name, ones in found.items()}


def test_gradients_of_a_tape_are_those_of_one_process(tf_pair: World) -> None:
    for found in tf_pair.run(_tape_of_a_batch, True):
        for reduced, alone in zip(found["reduced"], found["alone"], strict=True):
            np.testing.assert_allclose(reduced, alone, rtol=1e-5, atol=1e-6)


def _auto_beside_a_gpu() -> None:
    import keras
    import tensorflow as tf

    import horovod.keras as hvd

    def compiled(optimizer: object, **options: object) -> bool:
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile(optimizer, loss="mse", **options)
        return bool(model.jit_compile)

    sgd, on_this_machine = keras.optimizers.SGD, tf.config.list_physical_devices
    scaled = keras.optimizers.LossScaleOptimizer
    assert not compiled(hvd.DistributedOptimizer(sgd()))
    assert compiled(hvd.DistributedOptimizer(sgd()), jit_compile=True)
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    tf.config.list_physical_devices = lambda kind=None: [gpu] if kind == "GPU" else [*on_this_machine(kind), gpu]
    try:
        assert compiled(sgd())  # as Keras has it
        assert not compiled(hvd.DistributedOptimizer(sgd()))
        assert not compiled(scaled(hvd.DistributedOptimizer(sgd())))
        with pytest.warns(UserWarning, match="Proceeding with `jit_compile=False`"):
            assert not compiled(hvd.DistributedOptimizer(sgd()), jit_compile=True)
    finally:
        tf.config.list_physical_devices = on_this_machine


def test_keras_chooses_no_xla_for_a_gpu_where_it_can_not_compile_our_operations(tf_pair: World) -> None:
    tf_pair.run(_auto_beside_a_gpu)


def test_what_is_wrong_is_an_error_of_the_same_class(tf_pair: World) -> None:
    tf_pair.run(_disagree)
