"""Ranks of TensorFlow and Keras that train different weights are told so in the second step; others hear nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from worlds import Keeper, World

from horovod.base.errors import TrainingCode
from horovod.common import counted_weights
from horovod.common.ops import collectives

CODE = f"[{TrainingCode.DIFFERENT_WEIGHTS.value}]"


def _told(work: Callable[[], Any]) -> list[str]:
    """The warnings of a call."""
    collectives.join(-1)  # so that steps count anew
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [f"{one.filename}: {one.message}" for one in caught if CODE in str(one.message)]


def _model(seed: int, *layers: Any, built: bool = True) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    first = [keras.Input([3])] if built else []
    return keras.Sequential([*first, *(layers or [keras.layers.Dense(2), keras.layers.Dense(1)])])


def _compiled(model: Any, optimizer: Any = None, **options: Any) -> Any:
    import keras

    import horovod.keras as hvd

    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse", **options)
    return model


def _fit(model: Any, batches: int = 6, **options: Any) -> list[str]:
    data = np.random.default_rng(1).normal(size=(4 * batches, 3)).astype(np.float32)
    return _told(lambda: model.fit(data, data[:, :1], batch_size=4, verbose=0, **options))


# -- Keras -------------------------------------------------------------------------------------------------------------
WAYS: dict[str, dict[str, Any]] = {
    "function": {},
    "eagerly": {"run_eagerly": True},
    "several steps a call": {"steps_per_execution": 3},
}


def _forgotten_in_fit(way: str) -> list[str]:
    import horovod.keras as hvd

    return _fit(_compiled(_model(hvd.rank()), **WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
def test_a_forgotten_broadcast_in_fit(tf_pair: World, way: str) -> None:
    on_0, on_1 = tf_pair.run(_forgotten_in_fit, way)
    assert len(on_0) == 1
    assert on_0[0].startswith(__file__), "the warning must point to the script"
    for part in ("step 2", "variable 0 ('kernel')", "rank 1", "BroadcastGlobalVariablesCallback(0)"):
        assert part in on_0[0]
    assert on_1 == []


def test_a_forgotten_broadcast_in_fit_on_pytorch(torch_pair: World) -> None:
    on_0, on_1 = torch_pair.run(_forgotten_in_fit, "function")
    assert (len(on_0), on_1) == (1, [])
    assert "variable 0 ('kernel')" in on_0[0]


def test_a_forgotten_broadcast_in_fit_of_tf_keras(legacy_pair: World) -> None:
    on_0, on_1 = legacy_pair.run(_forgotten_in_tf_keras)
    assert (len(on_0), on_1) == (2, [])
    assert all("variable 0 ('kernel')" in one for one in on_0)


def _forgotten_in_tf_keras() -> list[str]:
    import tf_keras

    import horovod.tensorflow.keras as hvd

    told = []
    data = np.random.default_rng(1).normal(size=(24, 3)).astype(np.float32)
    for seed in (hvd.rank(), 0):
        for kind in (tf_keras.optimizers.Adam, tf_keras.optimizers.legacy.Adam):
            tf_keras.utils.set_random_seed(seed)
            model = tf_keras.Sequential([tf_keras.layers.Input([3]), tf_keras.layers.Dense(1)])
            model.compile(hvd.DistributedOptimizer(kind(0.01)), loss="mse")
            told += _told(lambda model=model: model.fit(data, data[:, :1], batch_size=4, verbose=0))  # type: ignore[misc]
    return told


def _quiet_in_fit() -> list[str]:
    import keras

    import horovod.keras as hvd

    told = []
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback
    for options in WAYS.values():
        # Made by the first batch, and broadcast after it.
        told += _fit(_compiled(_model(hvd.rank(), built=False), **options), callbacks=[broadcast(0)])
        told += _fit(_compiled(_model(hvd.rank()), **options), callbacks=[broadcast(0)])
    # Statistics, seeds and metrics differ by intent, and so do layers of a rank alone, with their state.
    keras.utils.set_random_seed(1)
    dropout = keras.layers.Dropout(0.5)
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), dropout, keras.layers.Dense(1)]
    model = _model(1, *layers)
    dropout.seed_generator.state.assign([hvd.rank(), 1])
    layers[1].moving_mean.assign(np.full(2, hvd.rank()))
    told += _fit(_compiled(model, metrics=["mae"]))
    keras.utils.set_random_seed(hvd.rank())
    own = keras.layers.Dense(2)
    model = _model(1, own, keras.layers.Dense(1))
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.Adam(0.01), local_layers=own)
    model.compile(optimizer, loss="mse")
    local = broadcast(0, local_variables=own.trainable_weights)
    told += _fit(model, callbacks=[local])
    # One rank has made more models and optimizers before, so its variables have other paths.
    if hvd.rank() == 1:
        _compiled(_model(0)).optimizer.build([])
    told += _fit(_compiled(_model(0)), callbacks=[broadcast(0)])
    return told


def test_fit_with_a_broadcast_or_differences_by_intent_is_told_nothing(tf_pair: World) -> None:
    assert tf_pair.run(_quiet_in_fit) == [[], []]


def _something_of_one_rank(what: str) -> list[str]:
    import keras

    import horovod.keras as hvd

    rate = 0.5 if what == "learning rate" and hvd.rank() == 0 else 0.01
    model = _compiled(_model(0), keras.optimizers.Adam(rate))
    model.optimizer.build(model.trainable_variables)
    if hvd.rank() == 0 and what == "state":
        next(one for one in model.optimizer.variables if "kernel" in one.path).assign(np.ones([3, 2]))
    return _fit(model)


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("learning rate", "'learning_rate' of the optimizer (0.5 on rank 0, 0.01 on rank 1)"),
        ("state", "'momentum' of variable 0 ('kernel')"),
    ],
)
def test_what_an_optimizer_holds_on_one_rank_only(tf_pair: World, what: str, part: str) -> None:
    on_0, on_1 = tf_pair.run(_something_of_one_rank, what)
    assert len(on_0) == 1
    assert part in on_0[0]
    assert on_1 == []


# -- loops -------------------------------------------------------------------------------------------------------------
def _loop(seed: int, in_function: bool, broadcast: bool, steps: int = 4, models: int = 1) -> list[str]:
    """As the examples of old releases have it, which broadcast after the first step."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    several = [_model(seed + number) for number in range(models)]
    data = tf.constant(np.random.default_rng(1).normal(size=(4, 3)), tf.float32)

    def step(data: Any) -> None:
        for model in several:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(data) ** 2)
            tape = hvd.DistributedGradientTape(tape)
            for variable, gradient in zip(
                model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
            ):
                variable.assign_sub(0.01 * gradient)

    run = tf.function(step) if in_function else step

    def train() -> None:
        for number in range(steps):
            run(data)
            if number == 0 and broadcast:
                for model in several:
                    hvd.broadcast_variables(model.variables, root_rank=0)

    return _told(train)


def _loops(in_function: bool) -> tuple[list[str], list[str], list[str], list[str]]:
    import horovod.tensorflow as hvd

    rank = hvd.rank()
    return (
        _loop(10 * rank, in_function, False),
        _loop(10 * rank, in_function, True),
        _loop(10 * rank, in_function, False, models=3),
        _loop(10 * rank, in_function, True, models=3),
    )


@pytest.mark.parametrize("in_function", [True, False])
def test_tapes(tf_pair: World, in_function: bool) -> None:
    (told, quiet, several, quiet_too), on_1 = tf_pair.run(_loops, in_function)
    assert len(told) == 1
    assert "variable 0 ('kernel')" in told[0]
    assert "hvd.broadcast_variables(" in told[0]
    assert on_1 == ([], [], [], [])
    assert (quiet, quiet_too) == ([], [])
    assert len(several) == 3


def _by_intent_in_loops() -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    told = []
    data = tf.constant(np.random.default_rng(1).normal(size=(4, 3)), tf.float32)
    rank = hvd.rank()
    # A source that is this rank's own, inputs as sources, and gradients of nothing that is trained.
    own, common = tf.Variable([[1.0 + rank]] * 3), tf.Variable([[2.0]])
    fixed = tf.Variable([1.0 + rank], trainable=False)

    @tf.function
    def step(data: Any) -> None:
        with tf.GradientTape() as tape:
            tape.watch([data, fixed])
            loss = tf.reduce_mean(data @ own @ common * fixed)
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(own)
        gradients = tape.gradient(loss, [data, fixed, own, common])
        common.assign_sub(0.1 * gradients[3])

    told += _told(lambda: [step(data + rank) for _ in range(4)])
    # Each rank is alone in a process set, or outside of it.
    for member in range(hvd.size()):
        alone = hvd.add_process_set([member])
        weight = tf.Variable([1.0 + rank])

        def train(weight: Any = weight, alone: Any = alone) -> None:
            for _ in range(4):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weight * 2.0)
                weight.assign_sub(hvd.DistributedGradientTape(tape, process_set=alone).gradient(loss, weight))

        told += _told(train)
        hvd.remove_process_set(alone)
    return told


def test_differences_by_intent_in_loops_are_told_nothing(tf_pair: World) -> None:
    assert tf_pair.run(_by_intent_in_loops) == [[], []]


def _made_anew_on_rank_0() -> tuple[list[str], list[str]]:
    """As if rank 0 alone had loaded a file in the middle of training; then with, and without a broadcast."""
    import horovod.tensorflow as hvd

    def train(broadcast: bool) -> None:
        models = [_model(0), _model(1)]
        for number in range(8):
            model = models[number >= 4 and hvd.rank() == 0]
            if number == 4 and broadcast:
                hvd.broadcast_variables(model.variables, root_rank=0)
            _step(model)

    return _told(lambda: train(True)), _told(lambda: train(False))


def _step(model: Any) -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.ones([2, 3])) ** 2)
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.01 * gradient)


def test_a_rank_that_makes_its_model_anew_waits_for_nobody(tf_pair: World) -> None:
    (quiet, told), on_1 = tf_pair.run(_made_anew_on_rank_0)
    assert (quiet, len(told)) == ([], 1)
    assert on_1 == ([], [])


def _uneven() -> list[str]:
    """Rank 1 has no data at first, and joins; the other one goes on, past the words of the first steps."""
    import horovod.tensorflow as hvd

    model = _model(hvd.rank())

    def train() -> None:
        for _ in range(20 * (hvd.rank() == 0)):
            _step(model)
        hvd.join()
        for _ in range(4):
            _step(model)

    return _told(train)


def test_ranks_that_have_joined_are_compared_when_they_are_back(tf_pair: World) -> None:
    on_0, on_1 = tf_pair.run(_uneven)
    assert (len(on_0), on_1) == (1, [])


# -- sessions ----------------------------------------------------------------------------------------------------------
def _session(broadcast: bool, passes: int = 1, op: str = "Average", is_resource: bool = True) -> tuple[list[str], int]:
    """What was told of a loop of tf.compat.v1, and how often weights were read for it."""
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow import same_weights

    v1 = tf.compat.v1
    reads = []
    take = same_weights._Read.take

    def noted(self: Any, *values: Any) -> Any:
        reads.append(len(values))
        return take(self, *values)

    same_weights._Read.take = noted  # type: ignore[method-assign]
    with tf.Graph().as_default():
        own = v1.get_variable("own", initializer=[1.0 + hvd.rank()], use_resource=is_resource)
        first = v1.get_variable("first", initializer=[1.0, 2.0], use_resource=is_resource)
        second = v1.get_variable("second", initializer=[1.0 + hvd.rank(), 2.0], use_resource=is_resource)
        loss = tf.reduce_sum(first * second) + tf.reduce_sum(own)
        optimizer = hvd.DistributedOptimizer(
            v1.train.MomentumOptimizer(0.01, 0.9), op=getattr(hvd, op), backward_passes_per_step=passes
        )
        optimizer.register_local_var(own)
        train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())

        def run() -> None:
            begin = [hvd.BroadcastGlobalVariablesHook(0)] if broadcast else []
            with v1.train.MonitoredTrainingSession(hooks=begin) as session:
                for _ in range(20 * passes):
                    session.run([train, loss])

        try:
            return _told(run), sum(one > 0 for one in reads)
        finally:
            same_weights._Read.take = take  # type: ignore[method-assign]


@pytest.mark.parametrize(("passes", "is_resource"), [(1, True), (1, False), (2, True)])
def test_a_forgotten_broadcast_in_a_session(tf_pair: World, passes: int, is_resource: bool) -> None:
    (told, reads), (on_1, _) = tf_pair.run(_session, False, passes, is_resource=is_resource)
    assert len(told) == 1
    assert told[0].startswith(__file__), "the warning must point to the script"
    for part in ("step 2", "variable 1 ('second')", "BroadcastGlobalVariablesHook(0)"):
        assert part in told[0]
    assert "'own'" not in told[0]
    assert on_1 == []
    assert reads == counted_weights.WORDS, "steps after the first ones must read no weights for this"


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_sessions_with_a_broadcast_are_told_nothing(tf_pair: World, op: str) -> None:
    for told, _ in tf_pair.run(_session, True, 1, op):
        assert told == []


def test_a_forgotten_broadcast_before_steps_of_adasum(tf_pair: World) -> None:
    (told, _), (on_1, _) = tf_pair.run(_session, False, 1, "Adasum")
    assert (len(told), on_1) == (1, [])
    assert "step 2" in told[0]


def _something_of_one_rank_in_a_session(what: str, passes: int = 1, steps: int = 4) -> list[str]:
    """Weights are equal, but one rank has restored more than them."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        own = v1.get_variable("own", initializer=[1.0 + hvd.rank()])
        weight = v1.get_variable("weight", initializer=[1.0, 2.0], use_resource=what != "m")
        rate: Any = v1.get_variable("rate", initializer=0.01, trainable=False)
        if what == "a rate of a rank":
            rate = 0.01 + hvd.rank()
        elif what == "a rate that is computed":
            rate = rate * 0.5
        elif what == "a rate that is fed":
            rate = v1.placeholder(tf.float32, [])
        optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(rate), backward_passes_per_step=passes)
        optimizer.register_local_var(own)
        pairs = optimizer.compute_gradients(tf.reduce_sum(weight**2) + tf.reduce_sum(own**2))
        if what == "another optimizer applies":
            weight = weight.assign([1.0 + hvd.rank(), 2.0])
            train = v1.train.GradientDescentOptimizer(0.01).apply_gradients(pairs)
        else:
            train = optimizer.apply_gradients(pairs)
        session.run(v1.global_variables_initializer())
        if hvd.rank() == 0:
            by_name = {one.op.name: one for one in v1.global_variables()}
            if what in ("m", "v"):
                slot = optimizer.get_slot(by_name["weight"], what)
                session.run(slot.assign([0.25, 0.5]))
                session.run(optimizer.get_slot(by_name["own"], what).assign([0.5]))
            elif what in ("beta1_power", "rate", "a rate that is computed"):
                session.run(by_name["rate" if "rate" in what else what].assign(0.5))
        if what == "another optimizer applies":
            session.run(weight)
        fed = {rate: 0.01 + hvd.rank()} if what == "a rate that is fed" else None

        def run() -> None:
            for step in range(steps * passes):
                session.run(train, fed)
                if what == "late" and step == 10 and hvd.rank() == 1:
                    session.run(optimizer.get_slot(by_variable, "m").assign([0.25, 0.5]))

        by_variable = weight
        return _told(run)


@pytest.mark.parametrize(
    ("what", "passes", "parts"),
    [
        ("m", 1, ("'m' of variable 0 ('weight') (", "so does variable 0 ('weight')")),
        ("v", 2, ("'v' of variable 0 ('weight') (",)),
        ("beta1_power", 1, ("'beta1_power' of the optimizer (",)),
        ("rate", 1, ("'learning_rate' of the optimizer (0.5 on rank 0, 0.01 on rank 1)",)),
        ("a rate of a rank", 2, ("'learning_rate' of the optimizer (0.01 on rank 0, 1.01 on rank 1)",)),
        ("a rate that is computed", 1, ("'learning_rate' of the optimizer (0.25 on rank 0, 0.005 on rank 1)",)),
        ("a rate that is fed", 1, ("'learning_rate' of the optimizer (0.01 on rank 0, 1.01 on rank 1)",)),
        ("another optimizer applies", 1, ("variable 0 ('weight')",)),
    ],
)
def test_what_an_optimizer_of_a_session_holds_on_one_rank_only(
    tf_pair: World, what: str, passes: int, parts: tuple[str, ...]
) -> None:
    on_0, on_1 = tf_pair.run(_something_of_one_rank_in_a_session, what, passes)
    assert (len(on_0), on_1) == (1, [])
    for part in ("step 2", *parts):
        assert part in on_0[0]
    assert "'own'" not in on_0[0]


def _v1_outside_of_sessions(in_function: bool, differs: bool) -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    weight, own = tf.Variable([1.0, 2.0], name="weight"), tf.Variable([1.0 + hvd.rank(), 1.0], name="own")
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9))
    optimizer.register_local_var(own)

    def loss() -> Any:
        return tf.reduce_sum(weight**2) + tf.reduce_sum(own**2)

    def step() -> None:
        optimizer.minimize(loss, var_list=[weight, own])

    run = tf.function(step) if in_function else step

    def train() -> None:
        for number in range(4):
            run()
            if number == 0 and differs and hvd.rank() == 0:
                optimizer.get_slot(weight, "momentum").assign([0.25, 0.5])

    return _told(train)


@pytest.mark.parametrize("in_function", [True, False])
def test_slots_of_optimizers_of_v1_outside_of_sessions(tf_pair: World, in_function: bool) -> None:
    assert tf_pair.run(_v1_outside_of_sessions, in_function, False) == [[], []]
    on_0, on_1 = tf_pair.run(_v1_outside_of_sessions, in_function, True)
    assert (len(on_0), on_1) == (1, [])
    assert "'momentum' of variable 0 ('weight')" in on_0[0]
    assert "'own'" not in on_0[0]


def _adasum_outside_of_sessions(in_function: bool) -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    weight = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), op=hvd.Adasum)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * (hvd.rank() + 1.0))
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    run = tf.function(step) if in_function else step
    return _told(lambda: [run() for _ in range(4)])


@pytest.mark.parametrize("in_function", [True, False])
def test_steps_of_adasum_that_each_rank_takes_are_no_difference(tf_pair: World, in_function: bool) -> None:
    assert tf_pair.run(_adasum_outside_of_sessions, in_function) == [[], []]


def _loaded_graph(folder: str) -> list[float]:
    """A graph that another process has written, whose functions of Python are not here."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1 = tf.compat.v1
    path = f"{folder}/{hvd.rank()}.meta"
    with tf.Graph().as_default():
        weight = v1.get_variable("w", initializer=[2.0], use_resource=True)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
        train = optimizer.minimize(tf.reduce_sum(weight * (hvd.rank() + 1.0)))
        v1.train.export_meta_graph(path)
        names = train.name, v1.global_variables_initializer().name
    counted_weights._by_number.clear()
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.import_meta_graph(path)
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(names[0])
        return list(session.run(v1.global_variables()[0]).tolist())


def test_a_graph_of_a_file_trains_where_it_compares_nothing(tf_pair: World, tmp_path: Any) -> None:
    assert tf_pair.run(_loaded_graph, str(tmp_path)) == [[2 - 3 * 0.5 * 1.5]] * 2


# -- settings ----------------------------------------------------------------------------------------------------------
def _with(setting: str, value: str) -> Iterator[Keeper]:
    with Keeper(2, "shm", {setting: value}, preloaded="preloaded_tensorflow") as keeper:
        yield keeper


@pytest.fixture(scope="module")
def strict() -> Iterator[Keeper]:
    yield from _with("HOROVOD_DIFFERENT_WEIGHTS", "error")


@pytest.fixture(scope="module")
def again() -> Iterator[Keeper]:
    yield from _with("HOROVOD_COMPARE_WEIGHTS_STEPS", "5")


def _an_error() -> tuple[str, str, bool]:
    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    model = _model(hvd.rank())
    _step(model)
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="different-weights") as eager:
        _step(model)
    same = all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))
    collectives.join(-1)
    model = _compiled(_model(hvd.rank()))
    weights: list[Any] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: weights.append(model.get_weights()))
    with pytest.raises(tf.errors.InvalidArgumentError, match="different-weights") as compiled:
        model.fit(np.ones([24, 3]), np.ones([24, 1]), batch_size=4, verbose=0, callbacks=[note])
    same &= all((one == other).all() for one, other in zip(weights[0], model.get_weights(), strict=True))
    return str(eager.value), str(compiled.value), same and len(weights) == 1


def test_a_setting_makes_it_an_error_on_all_ranks_before_the_step(strict: Keeper) -> None:
    outcomes = strict.get().run(_an_error)
    assert all(unchanged for _, _, unchanged in outcomes)
    for eager, compiled, _ in outcomes:
        assert "variable 0 ('kernel')" in eager
        assert "variable 0 ('kernel')" in compiled


def _changed_late() -> tuple[int, int]:
    import horovod.tensorflow as hvd

    model = _model(0)

    def train(steps: int) -> None:
        for _ in range(steps):
            _step(model)

    def change_and_train() -> None:
        train(30)
        if hvd.rank() == 1:
            model.trainable_variables[1].assign_add(np.ones(2))
        train(5)

    return len(_told(lambda: train(30))), len(_told(change_and_train))


def test_a_setting_compares_again_every_so_many_steps(again: Keeper) -> None:
    assert again.get().run(_changed_late) == [(0, 1), (0, 0)]


def test_a_setting_compares_slots_again_every_so_many_steps(again: Keeper) -> None:
    on_0, on_1 = again.get().run(_something_of_one_rank_in_a_session, "late", 1, 22)
    assert (len(on_0), on_1) == (2, []), "step 15, and step 20, where they still differ"
    assert all("'m' of variable 0 ('weight')" in one for one in on_0)


# -- beside the training -----------------------------------------------------------------------------------------------
def _exported(folder: str) -> list[float]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    class Trained(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable([2.0])

        @tf.function(input_signature=[tf.TensorSpec([1])])
        def step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.weight * data
            return hvd.DistributedGradientTape(tape).gradient(loss, self.weight)

    trained = Trained()
    step = [float(trained.step(tf.constant([1.0 + hvd.rank()]))[0]) for _ in range(3)]
    path = f"{folder}/{hvd.rank()}"
    tf.saved_model.save(trained, path)
    loaded = tf.saved_model.load(path)
    return step + [float(loaded.step(tf.constant([1.0 + hvd.rank()]))[0]) for _ in range(3)]


def test_a_function_that_was_saved_reduces(tf_pair: World, tmp_path: Any) -> None:
    assert tf_pair.run(_exported, str(tmp_path)) == [[1.5] * 6] * 2


def _nothing_is_kept() -> tuple[int, int]:
    import gc

    def train() -> None:
        for _ in range(3):
            model = _compiled(_model(0))
            model.fit(np.ones([4, 3]), np.ones([4, 1]), batch_size=4, verbose=0)

    train()
    gc.collect()
    before = len(counted_weights._of_models)
    train()
    del train
    gc.collect()
    return before, len(counted_weights._of_models)


def test_models_that_are_gone_leave_nothing(tf_pair: World) -> None:
    for before, after in tf_pair.run(_nothing_is_kept):
        assert after <= before
