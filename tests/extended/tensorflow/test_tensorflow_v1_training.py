"""Optimizers of tf.compat.v1.train in sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode, TrainingCode


def _train(op: str, passes: int, eager: bool = False, **options: Any) -> tuple[list[float], int]:
    """Three steps of momentum; the gradient of rank r is r + 1."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1 = tf.compat.v1
    rank = hvd.rank()
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=[1.0 + rank, 2.0], use_resource=True)
        loss = tf.reduce_sum(weight * (rank + 1.0))
        optimizer = hvd.DistributedOptimizer(
            v1.train.MomentumOptimizer(0.5, 0.5), op=getattr(hvd, op), backward_passes_per_step=passes, **options
        )
        counted = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, global_step=counted)
        assert [one.op.name for one in optimizer.variables()] == ["w/Momentum"]
        assert optimizer.get_slot_names() == ["momentum"]
        begin = hvd.broadcast_global_variables(0)
        session.run(v1.global_variables_initializer())
        session.run(begin)
        for _ in range(3 * passes):
            session.run(train)
        return session.run(weight).tolist(), int(session.run(counted))


def test_gradients_are_reduced(tf_pair: World) -> None:
    # Momentum adds up 1, 1.5 and 1.75 times the gradient, half of which is taken off.
    for op, passes, options, gradient in (
        ("Average", 1, {}, 1.5),
        ("Sum", 1, {"groups": 1}, 3.0),
        ("Average", 2, {}, 3.0),
        ("Average", 2, {"average_aggregated_gradients": True}, 1.5),
    ):
        weight = [1 - 0.5 * 4.25 * gradient, 2 - 0.5 * 4.25 * gradient]
        for found, steps in tf_pair.run(_train, op, passes, **options):
            assert found == pytest.approx(weight), (op, passes)
            assert steps == 3 * passes


def test_adasum_combines_what_steps_change(tf_pair: World) -> None:
    for passes in (1, 2):
        (first, _), (second, _) = tf_pair.run(_train, "Adasum", passes)
        assert first == second
        # Parallel changes a and b: a (1 - ab / 2aa) + b (1 - ab / 2bb) is their average.
        np.testing.assert_allclose(first, np.array([1.0, 2.0]) - 0.5 * 4.25 * 1.5 * passes, rtol=1e-5)


def _refused() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    make = tf.compat.v1.train.GradientDescentOptimizer
    with pytest.raises(ValueError, match=ends_with(TrainingCode.UNSUPPORTED_OPTIMIZER, "backward_passes_per_step")):
        hvd.DistributedOptimizer(make(0.1), backward_passes_per_step=2)
    with pytest.raises(
        ValueError, match=ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "average_aggregated_gradients")
    ):
        hvd.DistributedOptimizer(make(0.1), op=hvd.Adasum, average_aggregated_gradients=True)
    with pytest.raises(NotImplementedError, match=ends_with(OperationCode.UNDEFINED_REDUCTION, "Adasum")):
        hvd.DistributedOptimizer(make(0.1), op=hvd.Adasum, process_set=hvd.ProcessSet([0]))


def test_what_is_refused(tf_pair: World) -> None:
    tf_pair.run(_refused)
