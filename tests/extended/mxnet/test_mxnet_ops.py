"""The operations on MXNet's arrays, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_codes import ends_with
from worlds import World

from horovod.base.errors import ErrorCode, OperationCode, TrainingCode

DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"]


def _every_dtype(dtypes: list[str]) -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    rank = hvd.rank()
    for dtype in dtypes:
        mine = mx.nd.array([1, 2 + rank], dtype=dtype)
        other = mx.nd.array([1, 3 - rank], dtype=dtype)
        expected = (np.array([1, 2 + rank]).astype(dtype), np.array([1, 3 - rank]).astype(dtype))
        total = hvd.allreduce(mine, op=hvd.Max if dtype == "bool" else hvd.Sum)
        both = expected[0] | expected[1] if dtype == "bool" else expected[0] + expected[1]
        assert (np.dtype(total.dtype), total.asnumpy().tolist()) == (np.dtype(dtype), both.tolist()), dtype
        assert mine.asnumpy().tolist() == expected[0].tolist()
        gathered = hvd.allgather(mine.reshape((2, 1))[rank:])  # two rows of rank 0, one of rank 1
        assert gathered.asnumpy().tolist() == np.array([[1], [2], [3]]).astype(dtype).tolist(), dtype
        sent = hvd.broadcast(mine, root_rank=1)
        assert sent.asnumpy().tolist() == np.array([1, 3]).astype(dtype).tolist(), dtype
        if dtype != "bool":
            scattered = hvd.reducescatter(mx.nd.array([1, 2, 3], dtype=dtype), op=hvd.Sum)
            assert scattered.asnumpy().tolist() == [[2, 4], [6]][rank], dtype
        assert hvd.broadcast_(other, root_rank=0) is other
        assert other.asnumpy().tolist() == np.array([1, 3]).astype(dtype).tolist(), dtype
    bfloat16 = np.dtype([("bfloat16", np.uint16)])
    small = hvd.allreduce(mx.nd.amp_cast(mx.nd.array([1, 2 + rank]), dtype=bfloat16), op=hvd.Sum)
    assert mx.nd.amp_cast(small, dtype="float32").asnumpy().tolist() == [2, 5]


def test_every_dtype(mxnet_pair: World) -> None:
    mxnet_pair.run(_every_dtype, DTYPES)


def _in_place_and_in_order() -> None:
    """MXNet computes later: a call waits for what was queued before, and what is queued after sees its result."""
    import mxnet as mx

    import horovod.mxnet as hvd

    rank = hvd.rank()
    one = mx.nd.ones((300, 300))
    for _ in range(5):
        slow = mx.nd.dot(one, one) / 300  # ones again
        slow *= rank + 1
        read_before = slow + 1
        assert hvd.allreduce_(slow, op=hvd.Sum, priority=-1) is slow
        read_after = slow + 1
        slow += 1
        assert (read_before == rank + 2).asnumpy().all()
        assert (read_after == 4).asnumpy().all()
        assert (slow == 4).asnumpy().all()
    rows = mx.nd.arange(6).reshape((3, 2))
    hvd.allreduce_(rows[1:3], op=hvd.Sum)  # a part of an array, in the same memory
    assert rows.asnumpy().tolist() == [[0, 1], [4, 6], [8, 10]]
    with mx.autograd.record():  # of oneDNN's arrays, which may lie in memory in an order of its own
        options = {"no_bias": True, "kernel": (3, 3), "num_filter": 16}
        out = mx.nd.Convolution(mx.nd.ones((1, 8, 6, 6)), mx.nd.ones((16, 8, 3, 3)), **options)
    assert (hvd.allreduce(out, op=hvd.Sum) == 144).asnumpy().all()


def _values() -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    rank = hvd.rank()
    mine = mx.nd.array([2.0 + rank, 4.0])
    assert hvd.allreduce(mine).asnumpy().tolist() == [2.5, 4]
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(mine, average=False, name="sum").asnumpy().tolist() == [5, 8]
    for op, expected in ((hvd.Min, [2, 4]), (hvd.Max, [3, 4]), (hvd.Product, [6, 16])):
        assert hvd.allreduce(mine, op=op).asnumpy().tolist() == expected
    assert hvd.allreduce(mine, op=hvd.Sum, prescale_factor=3, postscale_factor=0.5).asnumpy().tolist() == [7.5, 12]
    third = hvd.allreduce(mx.nd.full(2, 1 / 3), compression=hvd.Compression.fp16)
    assert third.dtype == np.float32
    assert (abs(third - 1 / 3) < 1e-3).asnumpy().all()
    assert not (third == 1 / 3).asnumpy().any()
    halves = hvd.grouped_reducescatter([mine, mx.nd.ones(2, dtype="int32")], compression=hvd.Compression.fp16)
    assert [(one.dtype, one.asnumpy().tolist()) for one in halves] == [
        (np.float32, [[2.5], [4]][rank]),
        (np.int32, [1]),
    ]
    for array in (mx.nd.array, mx.np.array):
        for dtype in (np.float16, np.float32, np.float64):
            coarse = hvd.allreduce(array([1 + 1 / 256, 2.0**-100], dtype=dtype), compression=hvd.Compression.bf16)
            assert (coarse.dtype, coarse.asnumpy().tolist()) == (dtype, [1, 2**-100 if dtype != np.float16 else 0])
    assert hvd.allreduce(mine, op=hvd.Adasum).shape == (2,)
    group = [mx.nd.ones(2), mx.nd.array([rank], dtype="int32"), mx.nd.ones(1)]
    reduced = hvd.grouped_allreduce(group, op=hvd.Sum, name="group")
    assert [one.asnumpy().tolist() for one in reduced] == [[2, 2], [1], [2]]
    in_place = hvd.grouped_allreduce_(group, op=hvd.Sum)
    assert all(one is other for one, other in zip(in_place, group, strict=True))
    assert [one.asnumpy().tolist() for one in group] == [[2, 2], [1], [2]]
    assert hvd.grouped_allreduce([]) == []
    gathered = hvd.grouped_allgather([mx.nd.array([rank]), mx.nd.ones((rank + 1, 2))])
    assert [one.asnumpy().tolist() for one in gathered] == [[0, 1], [[1, 1]] * 3]
    scattered = hvd.grouped_reducescatter([mx.nd.ones(2), mx.nd.ones((4, 1))], op=hvd.Sum)
    assert [one.asnumpy().tolist() for one in scattered] == [[2], [[2], [2]]]
    sent = mx.nd.array([10, 11, 12]) + 100 * rank
    for splits in ([1, 2], mx.nd.array([1, 2], dtype="int32")):
        rows, received = hvd.alltoall(sent, splits=splits)
        assert rows.asnumpy().tolist() == ([10, 110] if rank == 0 else [11, 12, 111, 112])
        assert (received.asnumpy().dtype, received.asnumpy().tolist()) == ("int32", [[1, 1], [2, 2]][rank])
    assert hvd.alltoall(sent[:2]).asnumpy().tolist() == [10 + rank, 110 + rank]
    assert hvd.broadcast_object({"of": rank}, root_rank=1, name="who") == {"of": 1}
    assert hvd.allgather_object("x" * rank) == ["", "x"]
    hvd.barrier()
    assert hvd.join() in (0, 1)


def _arrays_of_numpy() -> None:
    """mx.np, with scalars and arrays without elements."""
    import mxnet as mx

    import horovod.mxnet as hvd

    rank = hvd.rank()
    mx.npx.set_np()
    try:
        scalar = hvd.allreduce(mx.np.array(rank, dtype="float32"), op=hvd.Sum)
        assert (type(scalar), scalar.shape, scalar.item()) == (mx.np.ndarray, (), 1)
        rows = hvd.allgather(mx.np.ones((2 * rank, 3)))
        assert (type(rows), rows.shape) == (mx.np.ndarray, (2, 3))
        assert hvd.allgather(mx.np.ones((0, 3))).shape == (0, 3)
        assert hvd.reducescatter(mx.np.ones((1, 2)), op=hvd.Sum).tolist() == [[[2, 2]], []][rank]
        rows, received = hvd.alltoall(mx.np.ones(1), splits=[1, 0])
        assert (rows.shape, received.tolist()) == ([(2,), (0,)][rank], [[1, 1], [0, 0]][rank])
    finally:
        mx.npx.reset_np()
    rows, received = hvd.alltoall(mx.nd.ones(1), splits=[1, 0])  # without NumPy's shapes as well
    assert rows.size == [2, 0][rank]


def test_values(mxnet_pair: World) -> None:
    mxnet_pair.run(_in_place_and_in_order)
    mxnet_pair.run(_values)
    mxnet_pair.run(_arrays_of_numpy)


def _set_of_one(rank: int) -> Any:
    import mxnet as mx

    import horovod.mxnet as hvd

    alone = hvd.add_process_set([rank])
    try:
        if hvd.rank() != rank:
            with pytest.raises(ValueError, match=ends_with(OperationCode.NOT_IN_SET)):
                hvd.allreduce(mx.nd.ones(1), process_set=alone)
            return None
        return hvd.allreduce(mx.nd.ones(1), op=hvd.Sum, process_set=alone).asnumpy().tolist()
    finally:
        hvd.remove_process_set(alone)


def test_process_sets(mxnet_pair: World) -> None:
    assert mxnet_pair.run(_set_of_one, 1) == [None, [1.0]]


BY_POSITION = {
    "allreduce": "tensor average name priority prescale_factor postscale_factor process_set op",
    "allreduce_": "tensor average name priority prescale_factor postscale_factor process_set op",
    "grouped_allreduce": "tensors average name priority prescale_factor postscale_factor process_set op",
    "grouped_allreduce_": "tensors average name priority prescale_factor postscale_factor process_set op",
    "allgather": "tensor name priority process_set",
    "grouped_allgather": "tensors name priority process_set",
    "broadcast": "tensor root_rank name priority process_set",
    "broadcast_": "tensor root_rank name priority process_set",
    "alltoall": "tensor splits name priority process_set",
    "reducescatter": "tensor op name priority process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors op name priority process_set prescale_factor postscale_factor",
    "broadcast_object": "obj root_rank name",
    "allgather_object": "obj name",
    "broadcast_parameters": "params root_rank prefix",
    "DistributedOptimizer": "optimizer gradient_predivide_factor num_groups process_set",
    "DistributedTrainer": "params optimizer optimizer_params compression gradient_predivide_factor prefix num_groups "
    "process_set",
}


def test_older_scripts_give_arguments_by_position() -> None:
    from frameworks_page import options  # late: the ranks, which import this file, have no docs/tools

    for name, arguments in BY_POSITION.items():
        found = [option for option in options("horovod.mxnet", name) if option != "self"]
        assert " ".join(found).startswith(arguments), name


def _caught_as_mxnet_errors(mx: Any, hvd: Any, ones: Any) -> list[tuple[type[Exception], ErrorCode, Any]]:
    uneven, names = mx.nd.ones(2 + hvd.rank()), mx.nd.ones((2, 2 + hvd.rank()))
    rows = uneven.reshape((-1, 1)).tostype("row_sparse")
    refused, failed = ValueError, hvd.HorovodInternalError
    return [
        (refused, OperationCode.WRONG_SPLITS, lambda: hvd.alltoall(ones, splits=[1])),
        (refused, OperationCode.WRONG_SPLITS, lambda: hvd.alltoall(mx.nd.ones(3))),
        (refused, OperationCode.WRONG_SPLITS, lambda: hvd.alltoall_async(ones, splits=[1])),
        (failed, OperationCode.MISMATCHED, lambda: hvd.alltoall(names, splits=[1, 1])),
        (failed, OperationCode.MISMATCHED, lambda: hvd.synchronize(hvd.allreduce_async(uneven))),
        (failed, OperationCode.MISMATCHED, lambda: hvd.grouped_allreduce([uneven, ones])),
        (failed, OperationCode.MISMATCHED, lambda: hvd.allgather(names)),
        (failed, OperationCode.MISMATCHED, lambda: hvd.reducescatter(uneven)),
        (failed, OperationCode.MISMATCHED, lambda: hvd.broadcast_parameters({"weight": uneven})),
        (failed, OperationCode.MISMATCHED, lambda: hvd.broadcast_(uneven, root_rank=0)),
        (refused, OperationCode.INVALID_ROOT, lambda: hvd.broadcast(ones, root_rank=2)),
        (refused, OperationCode.UNSUPPORTED_LAYOUT, lambda: hvd.allreduce(rows)),
        (refused, OperationCode.UNSUPPORTED_LAYOUT, lambda: hvd.sparse_allreduce_async(ones, "dense", hvd.Sum)),
    ]


def _refusals() -> None:
    import mxnet as mx

    import horovod.mxnet as hvd

    ones = mx.nd.ones(2)
    for code, call in (
        (OperationCode.NOT_A_TENSOR, lambda: hvd.allreduce([1.0])),
        (OperationCode.NOT_A_TENSOR, lambda: hvd.allreduce_(np.ones(2), name="mine")),
        (OperationCode.UNSUPPORTED_LAYOUT, lambda: hvd.allreduce(ones.reshape((1, 2)).tostype("row_sparse"))),
        (OperationCode.UNKNOWN_REDUCTION, lambda: hvd.allreduce(ones, op=17)),
        (OperationCode.INVALID_ROOT, lambda: hvd.broadcast(ones, root_rank=2)),
        (OperationCode.WRONG_SPLITS, lambda: hvd.alltoall(ones, splits=[1])),
        (OperationCode.WRONG_SPLITS, lambda: hvd.alltoall(mx.nd.ones(3))),
        (OperationCode.WRONG_SPLITS, lambda: hvd.alltoall(ones, splits=mx.nd.ones(2))),
        (TrainingCode.INVALID_ARGUMENT, lambda: hvd.allreduce(ones, process_set=[0])),
        (TrainingCode.INVALID_ARGUMENT, lambda: hvd.broadcast_parameters([ones])),
        (TrainingCode.INVALID_GROUPS, lambda: hvd.DistributedOptimizer(mx.optimizer.SGD(), num_groups=-1)),
    ):
        with pytest.raises(ValueError, match=ends_with(code)):
            call()
    for error, code, call in _caught_as_mxnet_errors(mx, hvd, ones):
        with pytest.raises(mx.MXNetError, match=ends_with(code)) as raised:
            call()
        assert isinstance(raised.value, error), code
    mx.npx.set_np()
    try:
        with pytest.raises(ValueError, match=ends_with(OperationCode.NO_ROWS)):
            hvd.reducescatter(mx.np.ones(()))
    finally:
        mx.npx.reset_np()
    with pytest.raises(hvd.HorovodInternalError, match=ends_with(OperationCode.MISMATCHED)):
        hvd.allreduce(mx.nd.ones(2 + hvd.rank()))
    assert hvd.allreduce(ones).asnumpy().tolist() == [1, 1]


def test_what_cannot_be_done_says_so_with_its_code(mxnet_pair: World) -> None:
    mxnet_pair.run(_refusals)
