"""What the matrix and the graphs leave out of the operations: errors, sets, join, objects, v1, IndexedSlices, names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode, TrainingCode


def _refused() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    invalid, aborted = tf.errors.InvalidArgumentError, tf.errors.AbortedError
    unmatched = tf.errors.FailedPreconditionError
    supersedes = ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "The op parameter supersedes average.")  # promised
    unregistered = ends_with(OperationCode.NO_SUCH_SET, "Allreduce", "[0, 1, 5]")
    x = tf.ones([4])
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            invalid,
            ends_with(OperationCode.UNSUPPORTED_DTYPE, "complex64", "tf.math.real", "'allreduce.waves'"),
            _call("allreduce", "complex64"),
        ),
        (invalid, ends_with(OperationCode.UNSUPPORTED_DTYPE, "string"), lambda: hvd.broadcast("text", 0)),
        (ValueError, supersedes, lambda: hvd.allreduce(x, average=True, op=hvd.Sum)),
        (ValueError, ends_with(OperationCode.UNKNOWN_REDUCTION, "op=17"), lambda: hvd.allreduce(x, op=17)),
        (invalid, "Average of bool is not defined", lambda: hvd.allreduce(x > 0)),
        (invalid, ends_with(OperationCode.INVALID_ROOT, "root_rank 17"), lambda: hvd.broadcast(x, 17)),
        (invalid, ends_with(OperationCode.INVALID_ROOT, "root_rank -1"), lambda: hvd.broadcast_([tf.Variable(x)], -1)),
        (invalid, "splits", lambda: hvd.alltoall(x, [0, 0, 0])),
        (invalid, "splits", lambda: hvd.alltoall(x, [5, 5])),
        (invalid, "splits must not be negative", lambda: hvd.alltoall(x, [-1, 1])),
        (invalid, "must have one dimension", lambda: hvd.alltoall(x, [[1, 1]])),
        (invalid, "must be a multiple of the number of ranks", lambda: hvd.alltoall(tf.ones([3]))),
        (ValueError, ends_with(OperationCode.NO_ROWS, "Reducescatter"), lambda: hvd.reducescatter(tf.constant(1.0))),
        (
            aborted,
            ends_with(OperationCode.UNDEFINED_REDUCTION, "Reducescatter"),
            lambda: hvd.reducescatter(x, op=hvd.Min),
        ),
        (
            NotImplementedError,
            ends_with(OperationCode.UNDEFINED_REDUCTION, "hvd.Adasum"),
            lambda: hvd.reducescatter(x, op=hvd.Adasum),
        ),
        (unmatched, "tried to ALLGATHER a rank-zero tensor", lambda: hvd.allgather(tf.constant(1.0))),
        (unmatched, "tried to ALLTOALL a rank-zero tensor", lambda: hvd.alltoall(tf.constant(1.0))),
        (unmatched, "Mismatched", lambda: hvd.allreduce(tf.ones([hvd.rank() + 1]), name="shape")),
        (unmatched, "Mismatched", lambda: hvd.allreduce(tf.cast(x, [tf.half, tf.int32][hvd.rank()]), name="dtype")),
        (unmatched, "Mismatched", lambda: hvd.broadcast(x, hvd.rank(), name="root")),
        (ValueError, ends_with(TrainingCode.INVALID_ARGUMENT, "not int"), lambda: hvd.allreduce(x, process_set=1)),
        (invalid, unregistered, lambda: hvd.allreduce(x, process_set=hvd.ProcessSet([0, 1, 5]))),
        (ValueError, ends_with(TrainingCode.INVALID_ARGUMENT, "not EagerTensor"), lambda: hvd.broadcast_([x], 0)),
        (
            RuntimeError,
            ends_with(TrainingCode.NO_GRAPH, "hvd.broadcast_variables"),
            lambda: hvd.broadcast_global_variables(0),
        ),
        (
            NotImplementedError,
            ends_with(OperationCode.UNDEFINED_REDUCTION, "tf.IndexedSlices"),
            lambda: hvd.allreduce(_slices(0), op=hvd.Max),
        ),
        (
            NotImplementedError,
            ends_with(TrainingCode.CONTRADICTORY_ARGUMENTS, "prescale_factor"),
            lambda: hvd.allreduce(_slices(0), prescale_factor=2.0),
        ),
    ]
    for number, (error, sentence, call) in enumerate(cases):
        try:
            with pytest.raises(error, match=sentence):
                call()
            assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == 2.0  # the engine stays usable
        except BaseException as failure:
            failure.add_note(f"The case is {number}: {sentence!r}.")
            raise


def _call(function: str, dtype: str) -> Callable[[], Any]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    return lambda: getattr(hvd, function)(tf.ones([2], dtype), name="waves")


def _slices(rank: int) -> Any:
    import tensorflow as tf

    rows = tf.fill([rank + 1, 2], 2.0 * (rank + 1))
    return tf.IndexedSlices(rows, tf.range(rank + 1), tf.constant([4, 2]))


def test_what_is_wrong_is_an_error_of_its_class(tf_pair: World) -> None:
    tf_pair.run(_refused)


def _sparse(in_function: bool) -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    def reduce() -> Any:
        both = [_slices(hvd.rank()), tf.ones([2])]
        average = hvd.allreduce(_slices(hvd.rank()), name="rows")
        return (
            average,
            hvd.grouped_allreduce(both, op=hvd.Sum),
            hvd.allreduce(both[0], compression=hvd.Compression.fp16),
        )

    average, (rows, dense), halved = (tf.function(reduce) if in_function else reduce)()
    assert tf.convert_to_tensor(average).numpy().tolist() == [[3.0, 3.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert rows.indices.numpy().tolist() == [0, 0, 1]
    assert rows.values.numpy().tolist() == [[2.0, 2.0], [4.0, 4.0], [4.0, 4.0]]
    assert dense.numpy().tolist() == [2.0, 2.0]
    assert halved.values.dtype == tf.float32


@pytest.mark.parametrize("in_function", [False, True])
def test_indexed_slices(tf_pair: World, in_function: bool) -> None:
    tf_pair.run(_sparse, in_function)


def _sets() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    last = hvd.add_process_set([1])
    assert int(hvd.size_op(last.process_set_id)) == 1
    assert int(hvd.process_set_included_op(last.process_set_id)) == hvd.rank()
    x = tf.fill([2], hvd.rank() + 5.0)

    @tf.function
    def only_members(x: tf.Tensor) -> tf.Tensor:  # traced on all ranks, run by members
        included = hvd.process_set_included_op(last.process_set_id)
        return tf.cond(included == 1, lambda: hvd.allreduce(x, op=hvd.Sum, process_set=last) * 2, lambda: x)

    assert only_members(x).numpy().tolist() == ([12.0, 12.0] if hvd.rank() == 1 else [5.0, 5.0])
    if hvd.rank() == 0:
        with pytest.raises(tf.errors.InvalidArgumentError, match=ends_with(OperationCode.NOT_IN_SET, "Rank 0")):
            hvd.allreduce(x, process_set=last)
    number = last.process_set_id
    assert hvd.remove_process_set(last)
    with pytest.raises(tf.errors.InvalidArgumentError, match=ends_with(OperationCode.NO_SUCH_SET, "Allreduce")):
        hvd.allreduce(x, process_set=last)
    with pytest.raises(tf.errors.InvalidArgumentError, match=ends_with(OperationCode.NO_SUCH_SET, f"id {number}")):
        hvd.size_op(number)


def test_process_sets(tf_pair: World) -> None:
    tf_pair.run(_sets)


def _join() -> int:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    found = [float(hvd.allreduce(tf.constant(2.0), name="batch")) for _ in range(1 + hvd.rank())]
    assert found == [2.0, 1.0][: 1 + hvd.rank()]
    return int(tf.function(hvd.join)())


def test_join(tf_pair: World) -> None:
    assert tf_pair.run(_join) == [1, 1]


def _barrier() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.barrier()
    alone = hvd.add_process_set([0])
    try:
        if hvd.rank() == 0:
            hvd.barrier(alone)
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match=ends_with(OperationCode.NOT_IN_SET)):
                hvd.barrier(process_set=alone)
    finally:
        hvd.remove_process_set(alone)
    with pytest.raises(NotImplementedError, match=ends_with(OperationCode.NOT_COMPILABLE)):
        tf.function(hvd.barrier)()


def test_barrier(tf_pair: World) -> None:
    tf_pair.run(_barrier)


def _objects_and_variables() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    rank = hvd.rank()
    assert hvd.broadcast_object({"of": rank}, root_rank=1) == {"of": 1}
    assert hvd.broadcast_object_fn(root_rank=1, name="fn")("x" * 2000 * rank) == "x" * 2000
    assert hvd.allgather_object("x" * rank) == ["", "x"]
    variables = [tf.Variable([rank, 1]), tf.Variable(float(rank)), tf.Variable([rank == 1]), tf.Variable([5 + rank])]
    before = variables[0].read_value()
    hvd.broadcast_variables(variables, root_rank=1)
    assert [one.numpy().tolist() for one in variables] == [[1, 1], 1.0, [True], [6]]
    assert before.numpy().tolist() == [rank, 1], "what was read before is what it was"
    variables[1].assign_add(1.0)
    assert float(variables[1]) == 2.0

    @tf.function
    def again() -> None:
        hvd.broadcast_(variables, 0, name="again")

    variables[3].assign([7 - rank])
    again()
    assert variables[3].numpy().tolist() == [7]


def test_objects_and_variables(tf_pair: World) -> None:
    tf_pair.run(_objects_and_variables)


def _results_stay() -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    for elements in (3, 1 << 20):  # a small one travels another way
        variable = tf.Variable(tf.fill([elements], 1.0 + hvd.rank()))
        read = variable.read_value()
        result = hvd.broadcast(variable, 0)
        variable.assign_add(tf.ones([elements]))
        hvd.broadcast_([variable], 1)
        variable.assign_sub(tf.fill([elements], 9.0))
        for tensor, value in ((read, 1.0 + hvd.rank()), (result, 1.0), (variable, -6.0)):
            assert set(tensor.numpy().tolist()) == {value}


def test_what_was_read_or_received_stays_when_a_variable_changes(tf_pair: World) -> None:
    tf_pair.run(_results_stay)


def _v1(resource: bool) -> None:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    v1, rank = tf.compat.v1, hvd.rank()
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None])
        weights = v1.get_variable("w", initializer=tf.constant([1.0 + rank, 2.0]), use_resource=resource)
        loss = tf.reduce_sum(hvd.allreduce(weights * 2.0) * hvd.broadcast(x, 0))
        gathered = hvd.allgather(x)
        gradient = v1.gradients(loss, weights)[0]
        step = v1.assign_sub(weights, hvd.allreduce(gradient))
        with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
            assert session.run(weights).tolist() == [1.0, 2.0]
            feed = {x: [1.0 + rank, 1.0]}
            assert session.run(gathered, feed).tolist() == [1.0, 1.0, 2.0, 1.0]
            assert session.run(step, feed).tolist() == [-1.0, 0.0]
            assert session.run(loss, feed) == -2.0


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_sessions_of_v1(tf_pair: World, resource: bool) -> None:
    tf_pair.run(_v1, resource)


def _another_world() -> list[int]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return hvd.allreduce(x, op=hvd.Sum), hvd.size_op() + 0 * hvd.rank_op()

    x = tf.constant(1.0)
    step(x)
    hvd.shutdown()
    for call in (lambda: step(x), lambda: hvd.allreduce(x), hvd.size_op):
        with pytest.raises(tf.errors.FailedPreconditionError, match=ends_with(TrainingCode.NOT_INITIALIZED)):
            call()
    hvd.init()
    total, size = step(x)  # the graph was traced in the world before
    return [int(total), int(size)]


def test_a_graph_outlives_a_world(tf_pair: World) -> None:
    assert tf_pair.run(_another_world) == [[2, 2], [2, 2]]


def _names() -> None:
    import inspect

    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.mpi_ops import allgather, rank

    assert float(hvd.mpi_ops._allreduce(tf.constant(1.0), op=hvd.mpi_ops.Sum)) == 2.0
    assert (hvd.mpi_ops.allgather, rank) == (allgather, hvd.rank)
    assert hvd.check_num_rank_power_of_2(2)
    expected = {
        hvd.allreduce: "tensor average device_dense device_sparse compression op prescale_factor postscale_factor name "
        "process_set ignore_name_scope",
        hvd.grouped_allreduce: "tensors average device_dense device_sparse compression op prescale_factor "
        "postscale_factor process_set ignore_name_scope name",
        hvd.reducescatter: "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
        "postscale_factor",
        hvd.allgather: "tensor name ignore_name_scope process_set",
        hvd.broadcast: "tensor root_rank name ignore_name_scope process_set",
        hvd.broadcast_: "variables root_rank name process_set",
        hvd.alltoall: "tensor splits name ignore_name_scope process_set",
        hvd.size_op: "process_set_id name",
        hvd.broadcast_variables: "variables root_rank process_set inplace",
        hvd.broadcast_object: "obj root_rank session name process_set",
        hvd.allgather_object: "obj session name process_set",
    }
    for function, parameters in expected.items():
        assert " ".join(inspect.signature(function).parameters) == parameters, function


def test_names_and_signatures(tf_pair: World) -> None:
    tf_pair.run(_names)


def _name_scopes() -> list[str]:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("layer"):
            inside = hvd.allreduce(x, name="loss") + hvd.allreduce(x, name="loss")
            return inside + hvd.allreduce(x, name="bare", ignore_name_scope=True) + hvd.allreduce(x * 2.0)

    step(tf.constant(1.0))
    nodes = step.get_concrete_function(tf.constant(1.0)).graph.get_operations()
    return [node.get_attr("tensor_name").decode() for node in nodes if node.type == "HorovodAllreduce"]


def test_names_on_the_wire(tf_pair: World) -> None:
    names = ["allreduce.layer/loss", "allreduce.layer/loss_1", "allreduce.bare"]
    assert tf_pair.run(_name_scopes) == [[*names, "allreduce.layer/HorovodAllreduce_layer_mul_0"]] * 2
