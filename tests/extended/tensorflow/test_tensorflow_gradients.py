"""Gradients where TensorFlow runs only what is asked for (v1 graphs), and where it vectorizes what they are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from worlds import World


def _operations() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    return {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
        "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, 2 * x])[1],
        "allgather": hvd.allgather,
        "grouped_allgather": lambda x: hvd.grouped_allgather([x, x])[0],
        "broadcast": lambda x: hvd.broadcast(x, 1),
        "alltoall": lambda x: hvd.alltoall(x, [1, 1])[0],
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Average),
        "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum)[0],
    }


# -- v1 graphs ---------------------------------------------------------------------------------------------------------
def _in_a_session(factor_of_rank_0: float) -> dict[str, list[float]]:
    """Gradients of x * factor, where rank 0's factor is a constant that TensorFlow knows."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    found = {}
    for name, operation in _operations().items():
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.ones([2, 2])
            factor = factor_of_rank_0 if hvd.rank() == 0 else 1.0
            result = operation(x * tf.fill([2, 2], factor)) * (hvd.rank() + 1.0)
            gradient = tf.gradients(result, x)[0]
            found[name] = session.run(gradient).reshape(-1).tolist()
    return found


def test_gradients_that_a_rank_does_without(tf_pair: World) -> None:
    """A rank that has zeros for them, or multiplies them by zero, takes part: the other one waits for it."""
    expected = {
        "allreduce": [1.5, 1.5],
        "grouped_allreduce": [3.0, 3.0],
        "allgather": [1.5, 1.5],
        "grouped_allgather": [1.5, 1.5],
        "broadcast": [0.0, 1.5],
        "alltoall": [[1.0, 2.0], [1.0, 2.0]],
        "reducescatter": [[1.0, 2.0], [1.0, 2.0]],
        "grouped_reducescatter": [[2.0, 4.0], [2.0, 4.0]],
    }
    for factor in (1.0, 0.0):
        found = tf_pair.run(_in_a_session, factor)
        for name, of_ranks in expected.items():
            for rank, rows in enumerate(of_ranks):
                wanted = np.repeat(np.broadcast_to(rows, 2), 2) * (factor if rank == 0 else 1.0)
                np.testing.assert_allclose(found[rank][name], wanted, err_msg=f"{name}, rank {rank}, {factor}")


def _around_a_function() -> list[float]:
    """The backward pass of a function, in which TensorFlow runs only what is asked for, too."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    x = tf.Variable([1.0, 2.0])

    @tf.function
    def send() -> Any:
        return hvd.broadcast(x * (0.0 if rank == 1 else 2.0), 0)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(send()) * (rank + 1.0)
    return tape.gradient(loss, x).numpy().tolist()


def test_the_gradient_of_a_function_that_broadcasts(tf_pair: World) -> None:
    assert tf_pair.run(_around_a_function) == [[3.0, 3.0], [0.0, 0.0]]


# -- vectorized --------------------------------------------------------------------------------------------------------
def _vectorized() -> dict[str, tuple[Any, Any]]:
    """Each operation for three tensors, at once and one after the other."""
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    tensors = tf.reshape(tf.range(12.0), [3, 2, 2]) + 100.0 * rank
    cases = _operations() | {
        "of none": lambda x: x + hvd.allreduce(tf.constant(rank + 1.0), op=hvd.Sum),
        "of some": lambda x: (
            hvd.grouped_allreduce([x, tf.ones([2, 2])], op=hvd.Sum)[0] + tf.cast(hvd.rank_op(), x.dtype)
        ),
        "in a function": tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(2 * x, op=hvd.Sum)),
    }
    found = {}
    for name, operation in cases.items():
        at_once = tf.vectorized_map(operation, tensors, fallback_to_while_loop=False)
        found[name] = at_once.numpy(), np.stack([operation(one).numpy() for one in tf.unstack(tensors)])
    return found


def test_vectorized_map(tf_pair: World) -> None:
    for found in tf_pair.run(_vectorized):
        assert len(found) == 11
        for name, (at_once, one_by_one) in found.items():
            np.testing.assert_allclose(at_once, one_by_one, err_msg=name)


def _jacobians(in_function: bool, use_pfor: bool) -> dict[str, Any]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    def jacobian_of(operation: Any) -> Any:
        def differentiate() -> Any:
            x = tf.reshape(tf.range(4.0), [2, 2]) + rank
            with tf.GradientTape(persistent=not use_pfor) as tape:
                tape.watch(x)
                result = operation(x * (rank + 1.0))
            return tape.jacobian(result, x, experimental_use_pfor=use_pfor)

        return (tf.function(differentiate, autograph=False) if in_function else differentiate)()

    return {name: jacobian_of(operation).numpy() for name, operation in _operations().items()}


@pytest.mark.parametrize("use_pfor", [True, False])
def test_jacobians(tf_pair: World, use_pfor: bool) -> None:
    eager, in_function = tf_pair.run(_jacobians, False, use_pfor), tf_pair.run(_jacobians, True, use_pfor)
    unit = np.eye(4).reshape(2, 2, 2, 2)
    for rank in range(2):
        for found in (eager[rank], in_function[rank]):
            own = rank + 1.0
            np.testing.assert_allclose(found["allreduce"], 0.5 * 2 * own * unit)
            np.testing.assert_allclose(found["grouped_allreduce"], 2 * own * unit)
            np.testing.assert_allclose(found["broadcast"], rank * own * unit)
            # The average of what both ranks have of each row of the result, which came from one of them.
            np.testing.assert_allclose(
                found["allgather"], own * np.eye(8).reshape(4, 2, 4, 2)[:, :, 2 * rank :][:, :, :2]
            )
            # Rows 0 of all went to rank 0: each of the two that a rank has is differentiated by all, at once.
            rows = np.zeros([2, 2, 2, 2])
            for column in range(2):
                rows[rank, column, 0, column] = rows[rank, column, 1, column] = own
            np.testing.assert_allclose(found["alltoall"], rows, err_msg=str(rank))
