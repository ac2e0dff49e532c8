"""Operations in graphs: what TensorFlow may not do with them (fold, merge, drop, put in an order), loops, branches."""

from __future__ import annotations

import numpy as np
from worlds import World


def _eager_and_function() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    mine = tf.constant([1.0, rank])
    assert hvd.allreduce(mine).numpy().tolist() == [1.0, 0.5]

    @tf.function
    def both(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)

    for rows in (1, 2, 5):  # traced anew for each shape, under the same names
        total, gathered = both(tf.fill([rows], float(rank + 1)))
        assert total.numpy().tolist() == [3.0] * rows
        assert gathered.numpy().tolist() == [1.0] * rows + [2.0] * rows


def test_calls_work_eagerly_and_in_functions_that_are_traced_again(tf_pair: World) -> None:
    tf_pair.run(_eager_and_function)


def _dynamic_shapes() -> list[list[float]]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def gather(x: tf.Tensor) -> tf.Tensor:
        gathered = hvd.allgather(x)
        assert gathered.shape.as_list() == [None, 2]
        return hvd.allreduce(gathered, op=hvd.Sum)

    return [gather(tf.ones([rows, 2])).shape.as_list() for rows in (1, 3, 0)]


def test_shapes_that_are_known_when_it_runs(tf_pair: World) -> None:
    assert tf_pair.run(_dynamic_shapes) == [[[2, 2], [6, 2], [0, 2]]] * 2


def _in_opposite_order() -> float:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    names = [f"opposite.{number}" for number in range(64)]
    in_order = names if hvd.rank() == 0 else names[::-1]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.add_n([hvd.allreduce(x, op=hvd.Sum, name=name) for name in in_order])

    for _ in range(5):
        total = step(tf.ones([3]))
    return float(total[0])


def test_operations_of_a_graph_meet_in_whatever_order_each_rank_has_them(tf_pair: World) -> None:
    assert tf_pair.run(_in_opposite_order) == [128.0, 128.0]


def _unused_constant_and_equal() -> list[int]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    @tf.function
    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        hvd.allgather(tf.constant([rank]), name="nobody reads it")
        constant = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)
        x = tf.fill([2], 3.0)
        return constant, hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x, op=hvd.Sum)

    found = [hvd.allreduce(tf.constant(rank), op=hvd.Sum, name="how many").numpy() for _ in range(1)]
    for _ in range(3):
        constant, first, second = step()
        assert float(constant) == 2.0
        assert first.numpy().tolist() == second.numpy().tolist() == [6.0, 6.0]
    kinds = [operation.type for operation in step.get_concrete_function().graph.get_operations()]
    assert kinds.count("HorovodAllreduce") == 3
    return found


def _one_rank_is_late() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import tensorflow as tf

    import horovod.tensorflow as hvd

    @tf.function(autograph=False)
    def chain(x: tf.Tensor) -> tf.Tensor:
        for link in range(4):
            x = hvd.allreduce(x, op=hvd.Average, name=f"late.{link}")
        return x

    with ThreadPoolExecutor(1) as early:
        for call in range(12):
            begun = early.submit(chain, tf.constant([float(call)])) if hvd.rank() == call % 2 else None
            # A rank is here while its first operation waits for the other's, and has left that to the engine.
            assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="meet")) == 2.0
            result = begun.result(60) if begun else chain(tf.constant([float(call)]))
            assert result.numpy().tolist() == [float(call)]


def test_an_operation_whose_other_rank_is_late(tf_pair: World) -> None:
    tf_pair.run(_one_rank_is_late)


def test_nothing_is_folded_merged_or_dropped(tf_pair: World) -> None:
    """That a call whose result nobody reads runs is seen by the rank that reads it: it would wait for ever."""
    tf_pair.run(_unused_constant_and_equal)
    assert tf_pair.run(_only_one_reads) == [[0, 0], [0, 1]]


def _only_one_reads() -> list[int]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        gathered = hvd.allgather(x, name="one reads")
        return gathered if rank == 1 else tf.zeros_like(x)

    found: list[int] = step(tf.constant([rank])).numpy().tolist()
    return found if rank == 1 else [*found, 0]


def _loops_and_branches() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    @tf.function
    def loop(times: tf.Tensor) -> tf.Tensor:
        total = tf.zeros([2])
        for step in tf.range(times):
            total += hvd.allreduce(tf.fill([2], tf.cast(step * 2 + rank, tf.float32)), op=hvd.Sum)
            if step % 2 == 0:
                total += hvd.allreduce(tf.ones([2]), op=hvd.Sum)
        return total

    times = 60
    expected = sum(4 * step + 1 for step in range(times)) + times
    for _ in range(3):
        assert loop(tf.constant(times)).numpy().tolist() == [expected, expected]

    @tf.function
    def nested(x: tf.Tensor) -> tf.Tensor:
        rows = tf.TensorArray(tf.float32, 4)
        for outer in tf.range(4):
            total = tf.zeros([])
            for inner in tf.range(3):
                total += hvd.allreduce(x * tf.cast(10 * outer + inner, tf.float32), op=hvd.Sum)
            rows = rows.write(outer, total)
        return rows.stack()

    assert nested(tf.constant(rank + 1.0)).numpy().tolist() == [3.0 * (30 * outer + 3) for outer in range(4)]


def test_loops_and_branches(tf_pair: World) -> None:
    tf_pair.run(_loops_and_branches)


def _independent_iterations() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    @tf.function
    def squares(numbers: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(
            lambda number: hvd.allreduce(tf.fill([1 + 4096 * ((number - rank) % 2)], number), op=hvd.Sum)[0],
            numbers,
            parallel_iterations=10,
        )

    for _ in range(3):
        numbers = tf.range(200) + rank
        assert squares(numbers).numpy().tolist() == [2 * number + 1 for number in range(200)]


def test_iterations_that_run_at_once_meet_their_like(tf_pair: World) -> None:
    tf_pair.run(_independent_iterations)


def _gradients(in_function: bool) -> dict[str, list[float]]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()

    def gradient_of(operation: object) -> tf.Tensor:
        variable = tf.Variable(tf.reshape(tf.range(6.0), [3, 2]) + rank)

        def differentiate() -> tf.Tensor:
            with tf.GradientTape() as tape:
                result = operation(variable)  # type: ignore[operator]
                factors = tf.reshape(tf.range(tf.size(result), dtype=tf.int32), tf.shape(result))
                loss = tf.reduce_sum(result * tf.cast(factors + 1, tf.float32) * float(rank + 1))
            return tape.gradient(loss, variable)

        return (tf.function(differentiate) if in_function else differentiate)()

    operations = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
        "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, 2 * x])[1],
        "allgather": hvd.allgather,
        "grouped_allgather": lambda x: hvd.grouped_allgather([x, x])[0],
        "broadcast": lambda x: hvd.broadcast(x, 1),
        "alltoall": lambda x: hvd.alltoall(x, [1, 1])[0],
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Average),
        "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum)[0],
    }
    return {name: gradient_of(operation).numpy().reshape(-1).tolist() for name, operation in operations.items()}


def test_gradients_of_every_collective(tf_pair: World) -> None:
    factors = np.arange(1.0, 7.0)
    both = np.arange(1.0, 13.0)  # of what has the rows of two ranks
    expected = {
        "allreduce": [0.5 * 3 * factors] * 2,
        "grouped_allreduce": [2 * 1.5 * factors] * 2,
        "allgather": [1.5 * both[:6], 1.5 * both[6:]],
        "grouped_allgather": [1.5 * both[:6], 1.5 * both[6:]],
        "broadcast": [0 * factors, 1.5 * factors],
        # Each rank sends its first row to rank 0 and its second to rank 1; the third goes nowhere.
        "alltoall": [[1, 2, 2, 4, 0, 0], [3, 4, 6, 8, 0, 0]],
        # Rank 0 has two rows, with factors 1 to 4; rank 1 the third, with 2 * (1, 2).
        "reducescatter": [[1, 2, 3, 4, 2, 4]] * 2,
        "grouped_reducescatter": [[2, 4, 6, 8, 4, 8]] * 2,
    }
    for in_function in (False, True):
        found = tf_pair.run(_gradients, in_function)
        for name, of_ranks in expected.items():
            for rank, wanted in enumerate(of_ranks):
                np.testing.assert_allclose(found[rank][name], wanted, err_msg=f"{name}, rank {rank}, {in_function}")
