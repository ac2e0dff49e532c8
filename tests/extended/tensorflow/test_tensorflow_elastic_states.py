"""What elastic states of TensorFlow and Keras keep, commit and restore, in a world that stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras_elastic_rates
import numpy as np
import pytest
from error_codes import ends_with
from worlds import World, warnings_of_horovod

from horovod.base.errors import TrainingCode


def _model(rank: int) -> Any:
    import keras

    keras.utils.set_random_seed(1 + rank)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), loss="mse")
    return model


def _keras_state() -> None:
    import keras

    import horovod.keras as hvd

    rank = hvd.rank()
    model = _model(rank)
    state = hvd.elastic.KerasState(model, batch=rank, epoch=5)
    state.sync()
    assert state.batch == 0  # rank 0's
    weights = hvd.allgather(model.get_weights()[0][None])
    np.testing.assert_array_equal(weights[0], weights[1])
    kept = [np.array(one).tolist() for one in (*model.weights, *model.optimizer.variables)]
    model.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0)
    state.epoch = 6
    assert [np.array(one).tolist() for one in (*model.weights, *model.optimizer.variables)] != kept
    state.restore()
    assert [np.array(one).tolist() for one in (*model.weights, *model.optimizer.variables)] == kept
    assert state.epoch == 5

    state.batch, state.epoch = 2, 1
    seen: list[tuple[int, int]] = []
    state.commit = lambda: seen.append((state.epoch, state.batch))
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    # Two batches were left of epoch 1, and epoch 2 has four. The last one of an epoch is committed with its end.
    assert seen == [(2, 0), (2, 2), (3, 0)]

    # Keras does not know how many batches there are, so the epoch begins anew.
    state.batch, state.epoch = 1, 0
    seen.clear()
    model.fit(((np.ones([2, 3]), np.ones([2, 1])) for _ in range(3)), verbose=0, callbacks=callbacks)
    assert seen == [(0, 2), (1, 0)]

    if keras.backend.backend() == "tensorflow":
        seen.clear()
        model.compile(keras.optimizers.Adam(0.1), loss="mse", steps_per_execution=3)
        model.fit(np.ones([16, 3]), np.ones([16, 1]), batch_size=2, verbose=0, callbacks=callbacks)
        assert seen == [(1, 3), (1, 6), (2, 0)]

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    for steps in (4, 2):  # as in worlds of two sizes
        model.fit(np.ones([6 * steps, 3]), np.ones([6 * steps, 1]), batch_size=6, verbose=0, callbacks=[warmup])
        assert warmup.steps_per_epoch == steps
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_BUILT)):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


def test_the_state_of_a_keras_model_and_its_callbacks(tf_pair: World, torch_pair: World) -> None:
    tf_pair.run(_keras_state)
    torch_pair.run(_keras_state)


def _callbacks_go_on(folder: str) -> None:
    import keras

    import horovod.keras as hvd

    keras_elastic_rates.go_on(hvd, keras, keras.optimizers, folder)


def _callbacks_of_tf_keras_go_on(folder: str) -> None:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    for optimizers in (tf.keras.optimizers, tf.keras.optimizers.legacy):
        keras_elastic_rates.go_on(hvd, tf.keras, optimizers, folder)
        Path(folder, f"best-{hvd.rank()}.weights.h5").unlink()


def test_callbacks_after_an_interrupted_epoch(
    tf_pair: World, torch_pair: World, legacy_pair: World, tmp_path: Path
) -> None:
    tf_pair.run(_callbacks_go_on, str(tmp_path))
    torch_pair.run(_callbacks_go_on, str(tmp_path))
    legacy_pair.run(_callbacks_of_tf_keras_go_on, str(tmp_path))


def _tensorflow_keras_state(given: bool) -> None:
    """given: the optimizer is an argument; else that of the model."""
    import tensorflow as tf

    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras as keras_hvd

    rank = hvd.rank()
    tf.keras.utils.set_random_seed(1 + rank)
    model = tf.keras.Sequential([tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_BUILT)):
        hvd.elastic.TensorFlowKerasState(model)
    model.build([None, 3])
    optimizer = keras_hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1 + rank))
    model.compile(optimizer, loss="mse")
    state = hvd.elastic.TensorFlowKerasState(model, optimizer if given else None, batch=rank, epoch=0)
    assert state.optimizer is model.optimizer

    def values() -> list[Any]:
        variables = optimizer.variables
        variables = variables() if callable(variables) else variables
        return [np.array(one).tolist() for one in (*model.weights, *variables)]

    state.sync()
    assert hvd.allgather_object(values()) == [values()] * 2
    assert state.batch == 0  # rank 0's
    assert float(np.array(optimizer.learning_rate)) == pytest.approx(0.1)
    kept = values()
    x, y = np.full([8, 3], rank + 1.0), np.ones([8, 1])
    model.fit(x, y, batch_size=4, verbose=0)
    assert values() != kept
    state.batch = 5
    state.restore()
    assert (values(), state.batch) == (kept, 0)

    seen: list[tuple[int, int]] = []
    commit = state.commit

    def seen_commit() -> None:
        seen.append((state.epoch, state.batch))
        commit()

    state.commit = seen_commit
    callbacks = [
        keras_hvd.elastic.UpdateBatchStateCallback(state),
        keras_hvd.elastic.UpdateEpochStateCallback(state),
        keras_hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    assert seen == [(0, 2), (1, 0), (1, 2), (2, 0)]
    committed = values()
    model.fit(x, y, batch_size=4, verbose=0)
    state.restore()  # to what the callback has committed
    assert (values(), state.epoch) == (committed, 2)
    assert hvd.allgather_object(values()) == [committed] * 2


@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "model's"])
def test_the_state_of_a_model_beside_tensorflow(tf_pair: World, given: bool) -> None:
    tf_pair.run(_tensorflow_keras_state, given)


def test_the_state_of_a_model_of_tf_keras(legacy_pair: World) -> None:
    legacy_pair.run(_tensorflow_keras_state, True)


def _variables_in_a_session() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=[1.0 + hvd.rank()], use_resource=True)
        more = weight.assign_add([1.0])
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, batch=hvd.rank())
        state.sync()
        assert session.run(weight).tolist() == [1.0]
        session.run(more)
        state.batch = 7
        state.restore()
        assert (session.run(weight).tolist(), state.batch) == ([1.0], 0)


def test_variables_of_a_v1_graph(tf_pair: World) -> None:
    tf_pair.run(_variables_in_a_session)


class Gan:
    """An object of a script, which trains what it holds."""

    def __init__(self, generator: Any, optimizer: Any) -> None:
        self.generator = generator
        self.optimizer = optimizer
        self.steps = 0


def _parts_in_containers() -> None:
    import keras

    import horovod.keras as hvd

    rank = hvd.rank()
    model, second, third = _model(rank), _model(10 + rank), _model(20 + rank)
    optimizer = keras.optimizers.SGD(0.1 + rank, momentum=0.9)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_BUILT, "gans")):
        hvd.elastic.KerasState(model, gans=[Gan(second, optimizer)])
    optimizer.build(second.trainable_variables)
    variable = keras.Variable([float(rank)])
    dropout = keras.layers.Dropout(0.5, seed=rank)
    kept = {"gans": [Gan(second, optimizer)], "variable": (variable, dropout), "losses": [rank]}
    state = hvd.elastic.KerasState(model, kept=kept, third=third, metrics=[keras.metrics.Mean()], model_again=model)
    trained = [model, second, third]

    def values() -> Any:
        everything = [*model.weights, *second.weights, *third.weights, *optimizer.variables, variable]
        everything += [*third.optimizer.variables, *state.metrics[0].variables]
        return [np.array(keras.ops.convert_to_numpy(one)).tolist() for one in everything]

    state.sync()
    assert hvd.allgather_object(values()) == [values()] * 2
    assert state.kept is kept
    assert state.third is third
    assert kept["gans"][0].generator is second
    assert (kept["losses"], state.model_again) == ([0], model)
    optimizer.apply([keras.ops.ones_like(one) for one in second.trainable_variables])
    kept["gans"][0].steps = 1
    state.metrics[0].update_state([1.0 + rank])
    state.sync()
    committed = values()
    assert hvd.allgather_object(committed) == [committed] * 2
    for one in trained:
        one.fit(np.ones([4, 3]), np.full([4, 1], rank), verbose=0)
    optimizer.apply([keras.ops.ones_like(one) for one in second.trainable_variables])
    variable.assign([7.0])
    kept["gans"][0].steps = 2
    kept["losses"].append(3)
    assert values() != committed
    state.restore()
    assert values() == committed
    assert (kept["gans"][0].steps, kept["losses"]) == (1, [0])
    assert kept["gans"][0].optimizer is optimizer
    state.commit()


def test_models_in_containers(tf_pair: World, torch_pair: World) -> None:
    tf_pair.run(_parts_in_containers)
    torch_pair.run(_parts_in_containers)


def _variables_in_containers() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable([float(hvd.rank())])

    net, weight, more = Net(), tf.Variable([hvd.rank() + 1.0]), {"w": [tf.Variable([hvd.rank() + 2.0])]}
    generator = tf.random.Generator.from_seed(hvd.rank())
    state = hvd.elastic.TensorFlowState([weight], net=net, more=more, generators=[generator], wide=np.int64(2**40))
    state.sync()
    kept = more["w"][0]

    def values() -> Any:
        return [float(one.numpy()[0]) for one in (weight, net.weight, kept)], generator.state.numpy().tolist()

    assert values() == ([1.0, 0.0, 2.0], tf.random.Generator.from_seed(0).state.numpy().tolist())
    for one in (weight, net.weight, kept):
        one.assign([9.0])
    generator.normal([3])
    state.restore()
    assert values() == ([1.0, 0.0, 2.0], tf.random.Generator.from_seed(0).state.numpy().tolist())
    assert state.net is net
    assert state.more["w"][0] is kept
    assert (state.wide, state.wide.dtype) == (2**40, np.int64)


def test_variables_in_containers(tf_pair: World) -> None:
    tf_pair.run(_variables_in_containers)


def _optimizer_left_out() -> list[str]:
    import keras

    import horovod.keras as hvd

    model = _model(0)
    model.optimizer = None
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    with warnings_of_horovod() as said:
        for given in ({"optimizer": optimizer}, {"more": [optimizer]}, {}):
            assert said == []
            state = hvd.elastic.KerasState(model, **given)
            state.sync()
            state.commit()
            state.commit()
    return said


def test_an_optimizer_that_a_state_leaves_out(tf_pair: World, torch_pair: World) -> None:
    for pair in (tf_pair, torch_pair):
        first, second = pair.run(_optimizer_left_out)
        assert (len(first), second) == (1, [])
        assert "SGD" in first[0]
        assert "momentum" in first[0]
