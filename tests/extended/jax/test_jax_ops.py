"""The operations on JAX's arrays outside of compiled functions, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import OperationCode, TrainingCode

DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def _every_dtype(dtypes: list[str]) -> None:
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank = hvd.rank()
    for dtype in dtypes:
        mine = jnp.asarray([1, 2 + rank], dtype)
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert (total.dtype, total.astype("float32").tolist()) == (mine.dtype, [2, 5]), dtype
        gathered = hvd.allgather(mine[:, None][rank:])  # two rows of rank 0, one of rank 1
        assert (gathered.dtype, gathered.astype("float32").tolist()) == (mine.dtype, [[1], [2], [3]]), dtype
        sent = hvd.broadcast(mine, root_rank=1)
        assert (sent.dtype, sent.astype("float32").tolist()) == (mine.dtype, [1, 3]), dtype
        assert mine.astype("float32").tolist() == [1, 2 + rank]
        scattered = hvd.reducescatter(jnp.asarray([1, 2, 3], dtype), op=hvd.Sum)
        assert scattered.astype("float32").tolist() == [[2, 4], [6]][rank], dtype


def test_every_dtype(jax_pair: World) -> None:
    jax_pair.run(_every_dtype, [*DTYPES, *FLOAT8])


def _shapes_and_values() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank = hvd.rank()
    assert hvd.allreduce(float(rank)) == 0.5  # what jnp.asarray takes
    assert hvd.allreduce(np.array([rank, 1]), op=hvd.Max).tolist() == [1, 1]
    assert hvd.allreduce(jnp.array([True, rank == 0]), op=hvd.Min).tolist() == [True, False]
    assert hvd.allreduce(jnp.zeros((0, 3))).shape == (0, 3)
    assert hvd.allgather(jnp.zeros((0, 3))).shape == (0, 3)
    big = jnp.arange(100_000.0).reshape(100, 1000).T  # not as it lies in memory
    np.testing.assert_array_equal(hvd.allreduce(big, op=hvd.Sum), 2 * np.asarray(big))
    np.testing.assert_allclose(hvd.allreduce(jnp.full(3, 1 / 3), compression=hvd.Compression.fp16), 1 / 3, rtol=1e-3)
    assert hvd.allreduce(jnp.ones(2), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5).tolist() == [3, 3]
    with jax.enable_x64(True):
        assert hvd.allreduce(jnp.array([2**40 + rank]), op=hvd.Sum).tolist() == [2**41 + 1]


def _of_64_bits() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank, big = hvd.rank(), 2**40
    for dtype, one in (("int64", big), ("uint64", 2**63), ("float64", 1 + 2.0**-40)):
        mine = np.array([one, rank], dtype)
        for found, expected in (
            (hvd.allreduce(mine, op=hvd.Max), np.array([one, 1], dtype)),
            (hvd.grouped_allreduce([mine, jnp.ones(1)], op=hvd.Min)[0], np.array([one, 0], dtype)),
            (hvd.allgather(mine), np.array([one, 0, one, 1], dtype)),
            (hvd.broadcast(mine, root_rank=1), np.array([one, 1], dtype)),
            (hvd.reducescatter(mine, op=hvd.Sum), np.array([2 * mine[0], 1], dtype)[rank : rank + 1]),
            (hvd.alltoall(mine), np.array([[one, one], [0, 1]], dtype)[rank]),
            (hvd.alltoall(mine, splits=[1, 1])[0], np.array([[one, one], [0, 1]], dtype)[rank]),
            (hvd.broadcast_parameters([mine], root_rank=1)[0], np.array([one, 1], dtype)),
        ):
            assert (type(found), found.dtype) == (np.ndarray, mine.dtype)
            np.testing.assert_array_equal(found, expected)
        scalar = hvd.allreduce(mine[0], op=hvd.Max)
        assert (type(scalar), scalar) == (type(mine[0]), mine[0])
    found = hvd.allreduce({"count": np.int64(big + rank), "loss": jnp.float32(rank)}, op=hvd.Sum)
    assert (found["count"], type(found["count"]), found["loss"].dtype) == (2 * big + 1, np.int64, "float32")
    with jax.enable_x64(True):
        wide = jnp.array([big + rank])
        assert isinstance(hvd.allreduce(np.array([big]), op=hvd.Max), jax.Array)
    assert hvd.broadcast(wide, root_rank=1).tolist() == [big + 1]
    assert hvd.broadcast_parameters({"w": wide}, root_rank=1)["w"].tolist() == [big + 1]
    # In a compiled function nothing has 64 bits.
    assert jax.jit(lambda: hvd.allreduce(np.arange(2), op=hvd.Sum))().tolist() == [0, 2]
    assert jax.jit(lambda: hvd.allreduce(np.array(0.1)))() == np.float32(0.1)
    for call in (
        lambda: hvd.allreduce(big),
        lambda: hvd.allreduce([1, big]),
        jax.jit(lambda: hvd.allreduce(np.array([big]))),
        jax.jit(lambda: hvd.allreduce(np.array(1e300))),
    ):
        with pytest.raises(ValueError, match=ends_with(OperationCode.UNSUPPORTED_DTYPE, "jax_enable_x64")):
            call()


def test_64_bits_stay_64_bits(jax_pair: World) -> None:
    jax_pair.run(_of_64_bits)


def _trees() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank = hvd.rank()

    def tree(first: Any) -> Any:
        return {"a": [first, jnp.full((2, 2), 10 * rank)], "b": (jnp.bfloat16(rank),), "none": {}}

    def seen(found: Any) -> Any:
        assert jax.tree.structure(found) == jax.tree.structure(tree(0))
        assert [one.dtype for one in jax.tree.leaves(found)] == ["float32", "int32", "bfloat16"]
        return [one.tolist() for one in jax.tree.leaves(found)]

    mine = tree(jnp.array([1.0 + rank, 4.0]))
    rows = jax.tree.map(lambda one: jnp.stack([one, one]), mine)
    for under in (lambda function: function, jax.jit):
        total = [[3, 8], [[10, 10], [10, 10]], 1]
        assert seen(under(lambda one: hvd.allreduce(one, op=hvd.Sum))(mine)) == total
        assert seen(under(lambda one: hvd.allreduce(one, op=hvd.Sum, name="named"))(mine)) == total
        assert seen(under(lambda one: hvd.broadcast(one, 1))(mine)) == [[2, 4], [[10, 10], [10, 10]], 1]
        assert seen(under(lambda one: hvd.broadcast(one, 0, name="named"))(mine)) == [[1, 4], [[0, 0], [0, 0]], 0]
        assert [len(one) for one in seen(under(hvd.allgather)(rows))] == [4, 4, 4]
        assert seen(under(lambda one: hvd.reducescatter(one, op=hvd.Sum))(rows)) == [[one] for one in total]
        assert under(hvd.allreduce)({}) == {}
        assert [one.tolist() for one in under(hvd.allreduce)([jnp.array(1.0), jnp.array(rank * 4.0)])] == [1, 2]
        halved = under(lambda one: hvd.allreduce(one, compression=hvd.Compression.fp16))({"x": jnp.ones(2)})
        assert (halved["x"].dtype, halved["x"].tolist()) == ("float32", [1, 1])
    combined = hvd.allreduce({"x": jnp.ones(3), "y": jnp.array([2.0 + rank])}, op=hvd.Adasum)
    np.testing.assert_allclose(combined["x"], 1.0)
    np.testing.assert_allclose(combined["y"], hvd.allreduce(jnp.array([2.0 + rank]), op=hvd.Adasum))

    def loss(one: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(hvd.allreduce(one)))

    gradient = jax.jit(jax.grad(loss))({"x": jnp.array(1.0 + rank), "y": [jnp.array(2.0)]})
    assert (gradient["x"], gradient["y"][0]) == (3, 4)


def test_trees(jax_pair: World) -> None:
    jax_pair.run(_trees)


def _wrong_leaves() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    ones, kinds = jnp.ones(2), (hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda tree: hvd.broadcast(tree, 0))
    for leaf in (None, "text", object()):
        for function in kinds:
            with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_A_TENSOR, "['a'][1]")):
                function({"a": [ones, leaf]})
        with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_A_TENSOR, "['a'][1]")):
            jax.jit(lambda one, leaf=leaf: hvd.allreduce({"a": [one, leaf]}))(ones)
        for grouped in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_A_TENSOR, "[1]", grouped.__name__)):
                grouped([ones, leaf])
        with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_A_TENSOR)):
            hvd.allreduce(leaf)
    with pytest.raises(ValueError, match=ends_with(OperationCode.UNSUPPORTED_DTYPE, "['z']", "complex64")):
        hvd.allreduce({"z": jnp.ones(1, "complex64"), "a": ones}, name="mine")


def test_wrong_leaves_are_named_by_their_path(jax_pair: World) -> None:
    jax_pair.run(_wrong_leaves)


def _groups_and_rows() -> None:
    import jax.numpy as jnp

    import horovod.jax as hvd

    rank = hvd.rank()
    group = hvd.grouped_allreduce([jnp.ones(2), jnp.array(rank), jnp.ones(1)], op=hvd.Sum)
    assert [one.tolist() for one in group] == [[2, 2], 1, [2]]
    assert hvd.grouped_allreduce([]) == []
    gathered = hvd.grouped_allgather([jnp.array([rank]), jnp.ones(rank)])
    assert [one.tolist() for one in gathered] == [[0, 1], [1]]
    scattered = hvd.grouped_reducescatter([jnp.ones(2), jnp.ones((4, 1))], op=hvd.Sum)
    assert [one.tolist() for one in scattered] == [[2], [[2], [2]]]
    rows, received = hvd.alltoall(jnp.array([10, 11, 12]) + 100 * rank, splits=[1, 2])
    assert rows.tolist() == ([10, 110] if rank == 0 else [11, 12, 111, 112])
    assert received.tolist() == ([1, 1] if rank == 0 else [2, 2])
    assert hvd.alltoall(jnp.array([10, 20]) + rank).tolist() == [10 + 10 * rank, 11 + 10 * rank]
    assert hvd.broadcast_object({"of": rank}, root_rank=1) == {"of": 1}
    assert hvd.allgather_object("x" * rank) == ["", "x"]
    hvd.barrier()
    assert hvd.join() in (0, 1)


def test_shapes_and_values(jax_pair: World) -> None:
    jax_pair.run(_shapes_and_values)
    jax_pair.run(_groups_and_rows)


def _set_of_one(rank: int) -> Any:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    alone = hvd.add_process_set([rank])
    try:
        if hvd.rank() != rank:
            with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_IN_SET)):
                hvd.allreduce(jnp.ones(1), process_set=alone)
            return None
        compiled = jax.jit(lambda x: hvd.allgather(hvd.allreduce(x, op=hvd.Sum, process_set=alone), process_set=alone))
        return hvd.allreduce(jnp.ones(1), op=hvd.Sum, process_set=alone).tolist() + compiled(jnp.ones(1)).tolist()
    finally:
        hvd.remove_process_set(alone)


def test_process_sets(jax_pair: World) -> None:
    assert jax_pair.run(_set_of_one, 1) == [None, [1.0, 1.0]]


def _refusals() -> None:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    ones = jnp.ones(2)
    for code, call in (
        (OperationCode.NOT_A_TENSOR, lambda: hvd.allreduce("text", name="mine")),
        (OperationCode.UNSUPPORTED_DTYPE, lambda: hvd.allgather(jnp.ones(2, "complex64"))),
        (OperationCode.UNKNOWN_REDUCTION, lambda: hvd.allreduce(ones, op=17)),
        (OperationCode.NO_ROWS, lambda: hvd.reducescatter(jnp.ones(()))),
        (OperationCode.INVALID_ROOT, lambda: hvd.broadcast(ones, root_rank=2)),
        (OperationCode.WRONG_SPLITS, lambda: hvd.alltoall(ones, splits=[1])),
        (OperationCode.WRONG_SPLITS, lambda: hvd.alltoall(ones, splits=[0.5, 1.5])),
        (OperationCode.WRONG_SPLITS, lambda: jax.jit(hvd.alltoall)(jnp.ones(3))),
        (TrainingCode.INVALID_ARGUMENT, lambda: hvd.allreduce(ones, process_set=[0])),
    ):
        with pytest.raises(ValueError, match=ends_with(code)):
            call()
    with pytest.raises(NotImplementedError, match=ends_with(OperationCode.NOT_COMPILABLE)):
        jax.jit(lambda x: hvd.alltoall(x, splits=[1, 1]))(ones)
    with pytest.raises(hvd.HorovodInternalError, match=ends_with(OperationCode.MISMATCHED)):
        hvd.allreduce(jnp.ones(2 + hvd.rank()))
    assert hvd.allreduce(ones).tolist() == [1, 1]


def test_what_cannot_be_done_says_so_with_its_code(jax_pair: World) -> None:
    jax_pair.run(_refusals)
