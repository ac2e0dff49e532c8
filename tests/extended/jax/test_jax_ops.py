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
