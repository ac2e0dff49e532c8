"""By whatever way gradients come to an optimizer, they are reduced once: neither never nor twice.

The gradient is 1 on rank 0 and 2 on rank 1, the reduction a sum, and the learning rate 1: one right step leads to -3, a
step with gradients of this rank alone to -1 or -2, and one with gradients that were summed up twice to -6.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras_steps
import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import TrainingCode

SUM = -3.0


def _ways(optimizer: Any, x: Any, legacy: bool, hvd: Any) -> dict[str, Callable[[], Any]]:
    """Ways of one step with tf_keras. Each is called eagerly and in a function."""
    import tensorflow as tf

    import horovod.tensorflow as hvd_tf

    def loss() -> Any:
        return x * (hvd.rank() + 1.0)

    def taped(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        if options:
            tape = hvd_tf.DistributedGradientTape(tape, **options)
        return list(zip(tape.gradient(value, [x]), [x], strict=True))

    def same(pairs: Any) -> Any:  # other tensors
        return [(gradient * 1.0, variable) for gradient, variable in pairs]

    # A LossScaleOptimizer around a new optimizer has no _compute_gradients; ours have both.
    compute = getattr(optimizer, "_compute_gradients", None) or optimizer.compute_gradients
    aggregate = optimizer._aggregate_gradients if legacy else optimizer.aggregate_gradients
    apply = optimizer.apply_gradients
    skip = {"experimental_aggregate_gradients": False}
    return {
        "minimize": lambda: optimizer.minimize(loss, [x]),
        "compute": lambda: apply(compute(loss, [x])),
        "compute, skip": lambda: apply(compute(loss, [x]), **skip),
        "compute, change, skip": lambda: apply(same(compute(loss, [x])), **skip),
        "tape": lambda: apply(taped()),
        "aggregate": lambda: apply(aggregate(taped())),
        "aggregate, skip": lambda: apply(aggregate(taped()), **skip),
        "aggregate, change, skip": lambda: apply(same(aggregate(taped())), **skip),
        "by hand, skip": lambda: apply([(hvd_tf.allreduce(taped()[0][0], op=hvd.Sum), x)], **skip),
        "our tape": lambda: apply(taped(op=hvd.Sum)),
        "our tape, skip": lambda: apply(taped(op=hvd.Sum), **skip),
        "our tape, change, skip": lambda: apply(same(taped(op=hvd.Sum)), **skip),
    }


_OWN = ["minimize", "compute", "compute, skip", "compute, change, skip", "tape", "aggregate", "aggregate, skip"]
_WAYS = [*_OWN, "aggregate, change, skip", "by hand, skip", "our tape", "our tape, skip", "our tape, change, skip"]
# With several passes a step is one of sums, and what is reduced in each pass can't be a part of them.
_OF_ONE_PASS = {"by hand, skip", "our tape", "our tape, skip", "our tape, change, skip"}


def _refused(optimizer: Any, x: Any, hvd: Any) -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd_tf

    before = float(x.numpy()[0])
    own = [(tf.constant([hvd.rank() + 1.0]), x)]
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_REDUCED, x.name)):
        optimizer.apply_gradients(own, experimental_aggregate_gradients=False)
    with tf.GradientTape() as tape:
        value = x * (hvd.rank() + 1.0)
    tape = hvd_tf.DistributedGradientTape(tape, op=hvd.Sum)
    changed = [(tape.gradient(value, [x])[0] * 1.0, x)]
    with pytest.raises(ValueError, match=ends_with(TrainingCode.REDUCED_TWICE, x.name)):
        optimizer.apply_gradients(changed)
    averaged = [(hvd_tf.allreduce(own[0][0]), x)]
    with pytest.raises(ValueError, match=ends_with(TrainingCode.REDUCED_TWICE, x.name)):
        optimizer.apply_gradients(averaged)
    assert float(x.numpy()[0]) == before


def _tf_keras_ways(legacy: bool, passes: int, scaled: bool) -> None:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    optimizers = tf.keras.optimizers.legacy if legacy else tf.keras.optimizers
    for name, in_function in itertools.product(["minimize", "compute"] if scaled else _WAYS, [False, True]):
        if passes > 1 and name in _OF_ONE_PASS:
            continue
        x = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes)
        if scaled:
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=8.0)
        elif passes == 1:
            _refused(optimizer, x, hvd)
        way = _ways(optimizer, x, legacy, hvd)[name]
        step = tf.function(lambda way=way: [way(), tf.constant(0)][1]) if in_function else way
        found = []
        for _ in range(2 * passes):
            step()
            found.append(float(x.numpy()[0]))
        expected = [passes * SUM * (done // passes) for done in range(1, 2 * passes + 1)]
        assert found == expected, (name, in_function)
        assert int(optimizer.iterations) == 2 * passes, (name, in_function)


@pytest.mark.parametrize("legacy", [False, True], ids=["new", "legacy"])
def test_every_way_of_tf_keras_reduces_once(legacy_pair: World, legacy: bool) -> None:
    for passes, scaled in itertools.product((1, 2), (False, True)):
        legacy_pair.run(_tf_keras_ways, legacy, passes, scaled)


def _local_and_sets() -> None:
    """Local variables, and a process set without rank 1, by way of compute_gradients."""
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    rank = hvd.rank()
    alone = hvd.add_process_set([0])
    for optimizers in (tf.keras.optimizers, tf.keras.optimizers.legacy):
        x, own = tf.Variable([0.0]), tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), op=hvd.Sum, groups=[[x]])
        optimizer.register_local_var(own)
        pairs = optimizer._compute_gradients(lambda x=x, own=own: (x + own) * (rank + 1.0), [x, own])
        optimizer.apply_gradients(pairs)
        assert (x.numpy().tolist(), own.numpy().tolist()) == ([SUM], [-(rank + 1) / 2])
        x = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), process_set=alone)
        skip = {"experimental_aggregate_gradients": False}
        optimizer.apply_gradients([(tf.constant([rank + 1.0]), x)], **skip)  # which nobody could reduce with it
        assert x.numpy().tolist() == [-(rank + 1.0)]
    x = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.build([x])
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_REDUCED, "update_step")):
        optimizer.update_step(tf.constant([1.0]), x)
    hvd.remove_process_set(alone)


def _in_a_v1_graph() -> None:
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.Variable([0.0])
        loss = tf.reduce_sum(x * (hvd.rank() + 1.0))
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(1.0), op=hvd.Sum)
        (gradient,) = optimizer.get_gradients(loss, [x])
        updates = optimizer.get_updates(loss, [x])
        session.run(v1.global_variables_initializer())
        session.run(v1.variables_initializer(optimizer.variables()))
        assert session.run(gradient).tolist() == [-SUM]
        session.run(updates)
        assert session.run(x).tolist() == [SUM]


def _between_functions() -> None:
    """One function computes, another one applies, and both run again without being traced."""
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    skip = {"experimental_aggregate_gradients": False}
    for legacy, passes in itertools.product((False, True), (1, 2)):
        optimizers = tf.keras.optimizers.legacy if legacy else tf.keras.optimizers
        x = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes)
        compute = tf.function(
            lambda x=x, one=optimizer: one._compute_gradients(lambda: x * (hvd.rank() + 1.0), [x])[0][0]
        )
        apply = tf.function(
            lambda gradient, x=x, one=optimizer: [one.apply_gradients([(gradient, x)], **skip), tf.constant(0)][1]
        )
        for _ in range(3 * passes):
            apply(compute())
        assert x.numpy().tolist() == [3 * passes * SUM]


def test_sets_local_variables_graphs_and_functions_of_tf_keras(legacy_pair: World) -> None:
    legacy_pair.run(_local_and_sets)
    legacy_pair.run(_in_a_v1_graph)
    legacy_pair.run(_between_functions)


# -- Keras 3 and tf.compat.v1 ------------------------------------------------------------------------------------------
def _without_arguments(step: Callable[[], None]) -> None:
    step()


def _keras3_and_a_tape() -> None:
    import keras
    import tensorflow as tf

    import horovod.tensorflow as hvd

    for changes, in_function in itertools.product((False, True), (False, True)):
        x = keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
        optimizer.build([x])

        def step(x: Any = x, optimizer: Any = optimizer, changes: bool = changes) -> None:
            with tf.GradientTape() as tape:
                loss = x * (hvd.rank() + 1.0)
            gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [x.value])[0]
            optimizer.apply([gradient * 1.0 if changes else gradient], [x])

        run = tf.function(functools.partial(_without_arguments, step)) if in_function else step
        if changes:
            with pytest.raises(ValueError, match=ends_with(TrainingCode.REDUCED_TWICE)):
                run()
            optimizer.apply([tf.constant([hvd.rank() + 1.0])], [x])  # the next one is this rank's own
        else:
            run()
        assert np.array(x).tolist() == [SUM]


def _v1() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1, rank = tf.compat.v1, hvd.rank()
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.get_variable("x", initializer=[0.0], use_resource=True)
        loss = tf.reduce_sum(x * (rank + 1.0))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum)
        with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_REDUCED, "compute_gradients", "'x:0'")):
            optimizer.apply_gradients([(tf.gradients(loss, [x])[0], x)])
        steps = [optimizer.minimize(loss), optimizer.apply_gradients(optimizer.compute_gradients(loss))]
        clipped = [(tf.clip_by_norm(one, 100.0), variable) for one, variable in optimizer.compute_gradients(loss)]
        steps.append(tf.cond(tf.constant(True), lambda: optimizer.apply_gradients(clipped), tf.no_op))
        steps.append(optimizer.apply_gradients([(hvd.allreduce(tf.gradients(loss, [x])[0], op=hvd.Sum), x)]))
        session.run(v1.global_variables_initializer())
        for done, step in enumerate(steps, 1):
            session.run(step)
            assert session.run(x).tolist() == [done * SUM]
    x = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum)
    with pytest.raises(ValueError, match=ends_with(TrainingCode.NOT_REDUCED)):
        optimizer.apply_gradients([(tf.constant([rank + 1.0]), x)])
    optimizer.minimize(lambda: x * (rank + 1.0))
    assert x.numpy().tolist() == [SUM]


def test_keras_3_and_v1(tf_pair: World, torch_pair: World) -> None:
    tf_pair.run(keras_steps.every_step_reduces_once)
    torch_pair.run(keras_steps.every_step_reduces_once)
    tf_pair.run(_keras3_and_a_tape)
    tf_pair.run(_v1)
