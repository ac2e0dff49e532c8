"""Loops and sessions whose optimizer was never distributed are told once; right scripts are told nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from unreduced_warnings import told
from worlds import World

STEPS = 110


def _keras() -> Any:
    return sys.modules.get("tf_keras") or sys.modules["keras"]


def _loop(case: str) -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    keras = _keras()
    legacy = getattr(keras.optimizers, "legacy", None) if "legacy" in case else keras.optimizers
    weights = [tf.Variable(tf.ones([64, 64])), tf.Variable(tf.ones([64]))]
    table = tf.Variable(tf.ones([100_000, 4]))

    def loss() -> Any:
        found = tf.reduce_sum(tf.linalg.matvec(weights[0], weights[1]))
        return found + tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2])) if case == "rows by hand" else found

    def work() -> None:
        trained = [table] if case == "rows by hand" else weights
        optimizer, other = legacy.SGD(1e-9), legacy.SGD(1e-9)
        if case == "distributed optimizer":
            optimizer = hvd.DistributedOptimizer(optimizer)
        if case == "another is distributed":
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        for one in (optimizer, other):
            one.build(trained) if hasattr(one, "build") else one.iterations

        def step() -> Any:
            with tf.GradientTape() as tape:
                lost = loss()
            if case == "distributed tape":
                tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(lost, trained)
            if "by hand" in case:
                gradients = [hvd.allreduce(one, name=f"{case}.{i}") for i, one in enumerate(gradients)]
            if case == "together in a function":
                gradients = hvd.grouped_allreduce(gradients, compression=hvd.Compression.fp16, name=case)
            if case == "a local part":
                local = tf.concat([tf.reshape(one, [-1]) for one in gradients], 0)
                hvd.allreduce(local, name=case)  # of another model
            optimizer.apply_gradients(zip(gradients, trained, strict=True))
            return lost

        def several() -> None:
            for _ in tf.range(10):
                step()

        if case == "a method":

            class Trainer:
                @tf.function
                def step(self) -> Any:
                    return step()

            run: Callable[[], Any] = Trainer().step
        elif "eagerly" in case:
            run = step
        elif case == "several steps a call":
            run = tf.function(several)
        elif case == "a concrete function":
            run = tf.function(step).get_concrete_function()
        elif case == "in another function":
            inner = tf.function(step)
            run = tf.function(lambda: [inner()])
        elif case == "compiled by XLA":
            run = tf.function(step, jit_compile=True)
        else:
            run = tf.function(step)
        evaluate = tf.function(loss)
        if case == "evaluated":
            run()
        for _ in range(STEPS // 10 + 3 if case == "several steps a call" else 90 if case == "few steps" else STEPS):
            evaluate() if case == "evaluated" else run()
            if case == "a loss now and then":
                hvd.allreduce(tf.zeros([]), name="loss")

    return told(work)


FORGOTTEN = [
    *("a function", "eagerly", "a method", "several steps a call", "in another function", "a loss now and then"),
    "a concrete function",
]
RIGHT = [
    *("distributed tape", "distributed optimizer", "another is distributed", "by hand in a function"),
    *("by hand, eagerly", "together in a function", "rows by hand", "a local part", "evaluated", "few steps"),
]


def _all(cases: list[str]) -> dict[str, list[str]]:
    return {case: _loop(case) for case in cases}


def _are_told(world: World, cases: list[str]) -> None:
    on_0, on_1 = world.run(_all, cases)
    for case in cases:
        assert len(on_0[case]) == 1, case
        assert on_0[case][0].startswith(__file__), "the warning must point to the script"
        assert "SGD has taken" in on_0[case][0]
        assert "hvd.DistributedGradientTape(tape)" in on_0[case][0]
        assert on_1[case] == []


def test_a_plain_tape_and_a_plain_optimizer_are_told_once_on_rank_0(tf_pair: World) -> None:
    _are_told(tf_pair, [*FORGOTTEN, "compiled by XLA"])


def test_a_plain_tape_and_a_plain_optimizer_of_tf_keras(legacy_pair: World) -> None:
    _are_told(legacy_pair, [*FORGOTTEN, "legacy", "legacy, eagerly"])


def test_right_loops_are_told_nothing(tf_pair: World) -> None:
    assert tf_pair.run(_all, RIGHT) == [{case: [] for case in RIGHT}] * 2


def test_right_loops_of_tf_keras_are_told_nothing(legacy_pair: World) -> None:
    assert legacy_pair.run(_all, RIGHT) == [{case: [] for case in RIGHT}] * 2


def _hooks_after(case: str) -> list[bool]:
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    _loop(case)
    optimizer = _keras().optimizers.Optimizer
    return [hasattr(one, "_hvd_shows_steps") for one in (Function.__call__, getattr(optimizer, "apply", None))]


def test_steps_are_not_counted_for_ever(tf_pair: World) -> None:
    assert tf_pair.run(_hooks_after, "few steps") == [[True, True]] * 2
    for case in ("a function", "by hand in a function"):
        assert tf_pair.run(_hooks_after, case) == [[False, False]] * 2


def _on_pytorch() -> list[str]:
    import keras
    import torch

    variable = keras.Variable(torch.ones(64))
    optimizer = keras.optimizers.SGD(0.1)

    def work() -> None:
        for _ in range(STEPS):
            optimizer.apply([torch.ones(64)], [variable])

    return told(work)


def test_a_loop_of_keras_on_pytorch_is_told(torch_pair: World) -> None:
    on_0, on_1 = torch_pair.run(_on_pytorch)
    assert (len(on_0), on_1) == (1, [])


def _in_session(case: str) -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1 = tf.compat.v1

    def work() -> None:
        with tf.Graph().as_default():
            weight = v1.get_variable("w", initializer=tf.ones([64, 64]), use_resource=True)
            loss = tf.reduce_sum(weight)
            optimizer = v1.train.GradientDescentOptimizer(1e-9)
            if case == "distributed":
                optimizer = hvd.DistributedOptimizer(optimizer)
            counted = v1.train.get_or_create_global_step()
            pairs = optimizer.compute_gradients(loss, [weight])
            if case == "by hand":
                pairs = [(hvd.allreduce(one, name="gradient"), variable) for one, variable in pairs]
            train = optimizer.apply_gradients(pairs, global_step=counted)
            after = tf.group(train, v1.assign_add(v1.get_variable("runs", initializer=0), 1))
            if case == "monitored":
                with v1.train.MonitoredTrainingSession() as session:
                    for _ in range(STEPS):
                        session.run([train, loss])
                return
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                call = session.make_callable([train, {"loss": loss}] if case == "a callable" else loss)
                for _ in range(90 if case == "few steps" else STEPS):
                    if "callable" in case:
                        call()
                        continue
                    session.run(loss if case == "evaluated" else {"group": after} if case == "in a group" else train)

    return told(work)


def test_sessions_are_told_once_on_rank_0(tf_pair: World) -> None:
    for case in ("a step", "in a group", "monitored", "a callable"):
        on_0, on_1 = tf_pair.run(_in_session, case)
        assert len(on_0) == 1, case
        assert on_0[0].startswith(__file__), "the warning must point to the script"
        assert "GradientDescentOptimizer has taken" in on_0[0]
        assert "before optimizer.minimize(" in on_0[0]
        assert on_1 == []


def test_right_sessions_are_told_nothing(tf_pair: World) -> None:
    for case in ("distributed", "by hand", "evaluated", "evaluated by a callable", "few steps"):
        assert tf_pair.run(_in_session, case) == [[], []], case


def test_a_rank_that_is_alone_runs_optimizers_as_they_are() -> None:
    with World(1, "shm", preloaded="preloaded_tensorflow") as world:
        assert world.run(_alone) == [([False, False], [])]


def _alone() -> tuple[list[bool], list[str]]:
    told_alone = _loop("a function")
    return _hooks_after("eagerly"), told_alone
