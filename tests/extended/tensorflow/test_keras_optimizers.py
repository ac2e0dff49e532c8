"""What distributed optimizers of Keras do beside training: local layers, mixed precision, embeddings, files, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras_batch_norm
import keras_steps
import numpy as np
import pytest
from error_codes import ends_with
from event_words import DISTRIBUTED_ALREADY
from worlds import World

from horovod.base.errors import OperationCode, TrainingCode


# -- local layers ------------------------------------------------------------------------------------------------------
def _local_layers(in_function: bool) -> None:
    import keras
    import tensorflow as tf

    import horovod.keras
    import horovod.tensorflow as hvd

    rank = hvd.rank()
    for way in ("tape", "optimizer"):
        keras.utils.set_random_seed(1)
        own, common = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input([1]), own, common])
        own.set_weights([np.array([[2.0]])])
        common.set_weights([np.array([[3.0]])])
        optimizer = keras.optimizers.SGD(1.0)
        if way == "optimizer":
            optimizer = horovod.keras.PartialDistributedOptimizer(optimizer, local_layers=own)

        def step(x: Any, model: Any = model, optimizer: Any = optimizer, way: str = way, own: Any = own) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x))
            if way == "tape":
                tape = hvd.PartialDistributedGradientTape(tape, local_layers=[own])
                gradients = tape.gradient(loss, model.trainable_variables)
            else:
                gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        (tf.function(step) if in_function else step)(tf.constant([[rank + 1.0]]))
        # d loss / d own = 3 x, of which this rank's part of the average is half; d loss / d common = 2 x.
        assert own.get_weights()[0].item() == pytest.approx(2 - 3 * (rank + 1) / 2), way
        assert common.get_weights()[0].item() == pytest.approx(3 - 2 * 1.5), way
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "local_layers", "not int")):
        horovod.keras.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[3])


def test_layers_of_a_rank_alone(tf_pair: World) -> None:
    tf_pair.run(_local_layers, True)
    tf_pair.run(_local_layers, False)


# -- mixed precision ---------------------------------------------------------------------------------------------------
def _infinity_on_one_rank(passes: int, local: bool, outside: bool) -> tuple[list[float], float, int]:
    import keras

    import horovod.keras as hvd

    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input([2]), layer, keras.layers.Dense(1, use_bias=False)])
    for one in model.layers:
        one.dtype_policy = keras.DTypePolicy("mixed_float16")
    scaled = keras.optimizers.LossScaleOptimizer
    optimizer: Any = keras.optimizers.SGD(0.01)
    options: dict[str, Any] = {"backward_passes_per_step": passes}
    distribute = hvd.DistributedOptimizer
    if local:
        distribute, options["local_layers"] = hvd.PartialDistributedOptimizer, layer
    if outside:
        optimizer = distribute(scaled(optimizer, initial_scale=64.0), **options)
    else:
        optimizer = scaled(distribute(optimizer, **options), initial_scale=64.0)
    model.compile(optimizer, loss="mse")
    found = []
    for step in range(6):
        x = np.ones([4, 2], np.float32)
        if hvd.rank() == 1 and step == 2:
            x[0, 0] = np.inf
        model.fit(x, np.ones([4, 1], np.float32), batch_size=4, verbose=0)
        found.append(float(model.layers[1].get_weights()[0].sum()))
    return found, float(np.array(optimizer.dynamic_scale)), int(np.array(optimizer.iterations))


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_an_infinity_on_one_rank_skips_the_step_on_all(tf_pair: World, torch_pair: World, outside: bool) -> None:
    for world in (tf_pair, torch_pair):
        for local in (False, True):
            (weights, scale, _), other = world.run(_infinity_on_one_rank, 1, local, outside)
            assert other == (weights, scale, _) or local
            assert other[1] == scale == 32.0  # one step was skipped
            assert weights[2] == weights[1] != weights[0]
            assert weights[3] != weights[2]
            assert np.isfinite(weights).all()


def test_an_infinity_in_one_of_several_passes(tf_pair: World) -> None:
    (weights, scale, _), other = tf_pair.run(_infinity_on_one_rank, 2, False, False)
    assert other == (weights, scale, _)
    assert scale == 32.0
    assert weights[0] != weights[1] == weights[2] == weights[3] == weights[4] != weights[5]


# -- embeddings --------------------------------------------------------------------------------------------------------
def _embedding(sparse_as_dense: bool, passes: int) -> list[float]:
    import keras

    import horovod.keras as hvd

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([2], dtype="int32"), keras.layers.Embedding(6, 3), keras.layers.Flatten()])
    model.layers[0].set_weights([np.zeros([6, 3])])
    optimizer = (
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sparse_as_dense=sparse_as_dense, op=hvd.Sum)
        if passes == 1
        else _with_passes(passes, sparse_as_dense)
    )
    model.compile(optimizer, loss=lambda y, found: keras.ops.sum(found))
    rank = hvd.rank()
    for _ in range(passes):
        model.fit(np.array([[rank, 2]], np.int32), np.zeros([1, 6], np.float32), verbose=0)
    rows: list[float] = model.layers[0].get_weights()[0][:, 0].tolist()
    return rows


def _with_passes(passes: int, sparse_as_dense: bool) -> Any:
    import keras

    import horovod.tensorflow as hvd

    return hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes, sparse_as_dense=sparse_as_dense
    )


def test_indexed_slices(tf_pair: World) -> None:
    for sparse_as_dense in (False, True):
        assert tf_pair.run(_embedding, sparse_as_dense, 1) == [[-1, -1, -2, 0, 0, 0]] * 2
    assert tf_pair.run(_embedding, True, 2) == [[-2, -2, -4, 0, 0, 0]] * 2
    for outcome in tf_pair.outcomes(_embedding, False, 2):
        assert "sparse_as_dense=True" in str(outcome.error)


# -- files -------------------------------------------------------------------------------------------------------------
def _saved_and_loaded(folder: Path) -> None:
    import keras

    import horovod.keras as hvd

    rank = hvd.rank()

    def train(model: Any) -> None:
        model.fit(np.full([4, 3], rank + 1.0), np.ones([4, 1]), batch_size=2, verbose=0)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    train(model)
    path = str(folder / f"{rank}.keras")
    model.save(path)

    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is type(keras.optimizers.Adam())  # on PyTorch Keras has a subclass
    assert len(plain.optimizer.variables) == len(model.optimizer.variables)
    for found, wanted in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array(found).tolist() == np.array(wanted).tolist()
    plain.save(path)  # without Horovod

    loaded = hvd.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    train(model)
    train(loaded)
    for found, wanted in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    weights = hvd.allgather(loaded.get_weights()[0][None])
    np.testing.assert_array_equal(weights[0], weights[1])

    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "filepath")):
        loaded.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0, callbacks=[best])
    best.filepath = str(folder / f"best-{rank}.keras")
    loaded.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0, callbacks=[best])
    assert Path(best.filepath).exists()


def test_models_saved_with_and_without_horovod(tf_pair: World, torch_pair: World, tmp_path: Path) -> None:
    tf_pair.run(_saved_and_loaded, tmp_path)
    torch_pair.run(_saved_and_loaded, tmp_path)


# -- batch normalization -----------------------------------------------------------------------------------------------
def _sync_batch_norm() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    random = np.random.default_rng(5)
    batch = tf.constant(random.normal(3.0, 2.0, size=(8, 4)), tf.float32)
    factors = tf.constant(random.normal(size=(8, 4)), tf.float32)
    own = slice(0, 3) if hvd.rank() == 0 else slice(3, 8)

    def run(layer: Any, x: Any, weights: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, training=True)
            loss = tf.reduce_sum(output * weights)
        return output, tape.gradient(loss, x)

    alone, synced = tf.keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    output, gradient = run(alone, batch, factors)
    own_output, own_gradient = tf.function(run)(synced, batch[own], factors[own])
    np.testing.assert_allclose(own_output, output[own], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own_gradient, gradient[own], rtol=1e-3, atol=1e-5)
    for found, wanted in zip(synced.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "fused")):
        hvd.SyncBatchNormalization(fused=True)


def test_batch_normalization_over_all_ranks(tf_pair: World) -> None:
    tf_pair.run(_sync_batch_norm)


def test_batch_normalization_over_all_ranks_on_pytorch(torch_pair: World, tmp_path: Path) -> None:
    torch_pair.run(keras_batch_norm.trains_as_one_process)
    torch_pair.run(keras_batch_norm.normalizes_all_rows, str(tmp_path))


def _saved_batch_normalization(folder: Path) -> None:
    import keras

    import horovod.keras
    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras

    rank = hvd.rank()
    layers = [keras.Input([2]), hvd.SyncBatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.losses.MeanSquaredError())
    model.fit(np.full([4, 2], float(rank)), np.ones([4, 1]), verbose=0)
    for ending in ("keras", "h5"):
        path = str(folder / f"{rank}.{ending}")
        model.save(path)
        for load in (horovod.keras.load_model, horovod.tensorflow.keras.load_model):
            loaded = load(path)
            assert type(loaded.layers[0]) is hvd.SyncBatchNormalization is horovod.keras.SyncBatchNormalization
            for found, wanted in zip(loaded.get_weights(), model.get_weights(), strict=True):
                np.testing.assert_array_equal(found, wanted)


def test_load_model_knows_the_batch_normalization(tf_pair: World, tmp_path: Path) -> None:
    tf_pair.run(_saved_batch_normalization, tmp_path)


# -- what is refused ---------------------------------------------------------------------------------------------------
def _refused() -> None:
    import keras
    import tensorflow as tf

    import horovod.keras
    import horovod.tensorflow as hvd

    sgd = keras.optimizers.SGD
    with pytest.raises(ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "gradient_predivide_factor")):
        hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "Keras")):
        hvd.DistributedOptimizer(sgd(), op=hvd.Adasum)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_GROUPS, "integer")):
        hvd.DistributedGradientTape(tf.GradientTape(), groups=-1)
    variable = tf.Variable(1.0)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_GROUPS, "once")):
        hvd.DistributedGradientTape(tf.GradientTape(), groups=[[variable], [variable]])
    wrong = [
        (3, ["int"]),
        (None, ["None"]),
        ("adam", ["string 'adam'"]),
        (sgd, ["class SGD", "SGD(learning_rate"]),
        (int, ["class builtins.int"]),
        (keras.Sequential([keras.layers.Dense(1)]), ["Sequential", "model"]),
        (keras.optimizers.get, ["function get"]),
    ]
    for given, facts in wrong:
        named = ends_with(TrainingCode.INVALID_ARGUMENT, "DistributedOptimizer", *facts)
        for function in (hvd.DistributedOptimizer, horovod.keras.DistributedOptimizer):
            with pytest.raises(ValueError, match=named):
                function(given)
    for given, facts in [*wrong[:3], (tf.GradientTape, ["class GradientTape", "GradientTape()"]), *wrong[4:]]:
        named = ends_with(TrainingCode.INVALID_ARGUMENT, "DistributedGradientTape", *facts)
        for function in (hvd.DistributedGradientTape, hvd.PartialDistributedGradientTape):
            with pytest.raises(TypeError, match=named):
                function(given)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.INVALID_ARGUMENT, "backward_passes_per_step", "0")):
        horovod.keras.PartialDistributedOptimizer(sgd(), backward_passes_per_step=0)
    with pytest.warns(UserWarning, match=DISTRIBUTED_ALREADY):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(sgd(), num_groups=2)
    distributed = hvd.DistributedOptimizer(sgd())
    copy = type(distributed).from_config(distributed.get_config())
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_DISTRIBUTED, "SGD")):
        copy.apply([tf.constant(1.0)], [tf.Variable(1.0)])


def test_what_is_refused(tf_pair: World) -> None:
    tf_pair.run(_refused)


# -- two optimizers of equal names -------------------------------------------------------------------------------------
@pytest.fixture(params=["tf_pair", "torch_pair"])
def pair(request: pytest.FixtureRequest) -> World:
    world: World = request.getfixturevalue(request.param)
    return world


@pytest.mark.parametrize("case", ["", "making", "holds", "drops"])
def test_two_optimizers_of_equal_names(pair: World, case: str) -> None:
    assert pair.run(keras_steps.of_two, case) == [[1.0, 100.0]] * 2


@pytest.mark.parametrize("case", ["first steps", "first steps, making", "first steps, later steps"])
def test_first_steps_of_two_optimizers_in_another_order(pair: World, case: str) -> None:
    for error in pair.run(keras_steps.error_of, keras_steps.of_two, case):
        assert re.search(ends_with(TrainingCode.DIFFERENT_ORDER, "rank 0", "rank 1"), error), error


def test_later_steps_of_two_optimizers_in_another_order(pair: World) -> None:
    for error in pair.run(keras_steps.error_of, keras_steps.of_two, "later steps"):
        assert re.search(ends_with(OperationCode.DEADLOCK, "gradient.0.kernel#", "same order"), error), error


@pytest.mark.parametrize("case", ["", "looks", "loads", "looks, loads"])
def test_two_models(pair: World, tmp_path: Path, case: str) -> None:
    assert pair.run(keras_steps.of_two_models, str(tmp_path), case) == [[1.0, 100.0]] * 2


def test_a_rank_goes_on_with_a_model_from_a_file(pair: World, tmp_path: Path) -> None:
    assert pair.run(keras_steps.of_two_models, str(tmp_path), "one, reloads") == [[1.0]] * 2


@pytest.mark.parametrize("case", ["first steps", "later steps"])
def test_two_models_in_another_order(pair: World, tmp_path: Path, case: str) -> None:
    for error in pair.run(keras_steps.error_of, keras_steps.of_two_models, str(tmp_path), case):
        code = f"{TrainingCode.DIFFERENT_ORDER.value}|{OperationCode.DEADLOCK.value}"
        assert re.search(code, error), error


def test_ranks_broadcast_two_models_in_another_order(pair: World) -> None:
    for error in pair.run(keras_steps.error_of, keras_steps.broadcast_two):
        assert re.search(ends_with(TrainingCode.DIFFERENT_ORDER, "keras_steps.py", "rank 1"), error), error


# -- two tapes of equal names ------------------------------------------------------------------------------------------
def _of_two_tapes(compiled: bool, case: str = "") -> list[float]:
    """Averages of the gradients of two models, which are 1 and 100 on all ranks.

    case: what rank 1 does in another order, "first steps" or "later steps", or "loads": rank 0 makes the first model
    anew after the first step; or "several lines", at which ranks train one model in different orders.
    """
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.common.ops import collectives

    collectives.join(-1)  # so that steps count anew
    models = [tf.Variable([scale], name="kernel") for scale in (1.0, 100.0)]

    def gradient_of(place: int) -> Any:
        variable = models[place]
        with tf.GradientTape() as tape:
            loss = variable * variable / 2.0
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0]

    def first() -> Any:
        return gradient_of(0)

    def second() -> Any:
        return gradient_of(0 if case == "several lines" else 1)

    functions = [tf.function(one) if compiled else one for one in (first, second)]

    def step_first() -> Any:
        return functions[0]()

    def step_second() -> Any:
        return functions[1]()

    found = [0.0, 0.0]
    for step in range(20 if case == "later steps" else 3):
        if case == "loads" and step == 1 and hvd.rank() == 0:
            models[0] = tf.Variable([1.0], name="kernel")
        both = [(0, step_first), (1, step_second)]
        turned = hvd.rank() == 1 and case in ("first steps" if step < 19 else "later steps", "several lines")
        for place, one in both[::-1] if turned else both:
            found[place] = float(one()[0])
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_two_tapes(tf_pair: World, compiled: bool) -> None:
    assert tf_pair.run(_of_two_tapes, compiled) == [[1.0, 100.0]] * 2
    assert tf_pair.run(_of_two_tapes, compiled, "several lines") == [[1.0, 1.0]] * 2
    if not compiled:
        assert tf_pair.run(_of_two_tapes, compiled, "loads") == [[1.0, 100.0]] * 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", ["first steps", "later steps"])
def test_two_tapes_in_another_order(tf_pair: World, compiled: bool, case: str) -> None:
    for error in tf_pair.run(keras_steps.error_of, _of_two_tapes, compiled, case):
        assert re.search(ends_with(TrainingCode.DIFFERENT_ORDER, "rank 0", "rank 1"), error), error
