"""NumPy as a framework of Horovod: the smallest adapter, and a script of its operations that two ranks run."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from horovod._core import DType, Output, TensorReader
from horovod.base.errors import OperationCode, code_of
from horovod.common import basics as hvd
from horovod.common.ops import collectives, objects
from horovod.common.ops.compression import CastCompressor, compressed, compressed_group
from horovod.common.ops.framework import Framework, Span
from horovod.common.ops.grouped import GroupedCollectives
from horovod.common.ops.handles import PartedHandle, poll, synchronize
from horovod.common.ops.sparse import start_sparse
from horovod.common.process_sets import ProcessSet, global_process_set

DTYPES = {np.dtype(dtype.name.lower()): dtype for dtype in DType if hasattr(np, dtype.name.lower())}
KINDS = {int(dtype): kind for kind, dtype in DTYPES.items()}


class NumpyFramework:
    def __init__(self) -> None:
        self.reader = TensorReader((), self.view)

    def view(self, tensor: np.ndarray) -> Span:
        dtype = self.dtype(tensor)
        if dtype is None:
            raise ValueError(f"An array of {tensor.dtype} can't be sent.")
        if not tensor.flags.c_contiguous:
            raise ValueError("The array must be contiguous.")
        return tensor.ctypes.data, tensor.ctypes.data, dtype, tensor.shape

    def dtype(self, tensor: np.ndarray) -> int | None:
        return DTYPES.get(self._checked(tensor).dtype)

    def shape(self, tensor: np.ndarray) -> tuple[int, ...]:
        return self._checked(tensor).shape

    def device(self, tensor: np.ndarray) -> str:
        self._checked(tensor)
        return "host"

    def _checked(self, tensor: np.ndarray) -> np.ndarray:
        if not isinstance(tensor, np.ndarray):
            raise ValueError(f"A NumPy array is required, not {type(tensor).__name__}.")
        return tensor

    def allocate(self, tensor: np.ndarray, *, filled: bool = False) -> np.ndarray:
        self._checked(tensor)
        return tensor.copy() if filled else np.empty_like(tensor)

    def adopt(self, output: Output | np.ndarray) -> np.ndarray:
        assert isinstance(output, Output)
        return np.frombuffer(output, KINDS[output.dtype]).reshape(output.shape)

    def current_stream(self, device: int) -> int:
        return 0


class Half(CastCompressor):
    dtype = np.dtype(np.float16)

    @staticmethod
    def is_floating(tensor: np.ndarray) -> bool:
        return tensor.dtype.kind == "f"

    @staticmethod
    def cast(tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return tensor.astype(dtype)


FRAMEWORK: Framework[np.ndarray] = NumpyFramework()
OPS = GroupedCollectives(FRAMEWORK)


def same(found: Any, *expected: Any) -> None:
    for array, values in zip(found if isinstance(found, (tuple, list)) else [found], expected, strict=True):
        assert array.tolist() == values, (array, values)


def refused(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except (ValueError, NotImplementedError, hvd.HorovodInternalError) as error:
        return str(error)
    raise AssertionError("it was not refused")


def sums_and_averages(rank: int) -> None:
    mine = np.array([1.0, rank])
    plain = (1.0, 1.0, global_process_set)
    same(OPS.allreduce(mine, hvd.Average, None, *plain), [1.0, 0.5])
    same(mine, [1.0, rank])
    same(OPS.allreduce(mine, hvd.Max, "max", *plain), [1.0, 1.0])
    same(OPS.allreduce_(np.array([rank + 1]), hvd.Sum, "sum", 2.0, 1.0, global_process_set), [6])
    handle = OPS.allreduce_async(mine, hvd.Sum, "handle", *plain)
    same(synchronize(handle, FRAMEWORK.current_stream), [2.0, 1.0])
    assert code_of(refused(poll, handle)) is OperationCode.CLEARED_HANDLE
    same(OPS.reducescatter(np.arange(3.0), hvd.Sum, None, *plain), [0.0, 2.0] if rank == 0 else [4.0])
    # two dtypes: two operations behind one handle
    group = [np.ones(2), np.array([rank]), np.ones(1)]
    assert isinstance(OPS.start_allreduces(group, False, hvd.Sum, "mixed", *plain), PartedHandle)
    same(OPS.wait(OPS.start_allreduces, group, True, hvd.Sum, None, *plain), [2.0, 2.0], [1], [2.0])
    same(group, [2.0, 2.0], [1], [2.0])
    scattered = OPS.wait(OPS.start_reducescatters, [np.arange(2)], hvd.Average, None, *plain)
    same(scattered, [rank])
    assert code_of(refused(OPS.allreduce, mine, 17, None, *plain)) is OperationCode.UNKNOWN_REDUCTION
    undefined = refused(OPS.allreduce, np.arange(2), hvd.Adasum, None, *plain)
    assert code_of(undefined) is OperationCode.UNDEFINED_REDUCTION
    assert refused(OPS.allreduce, mine.astype("c8"), hvd.Sum, "c", *plain).endswith("given as 'allreduce.c'.")
    assert code_of(refused(OPS.reducescatter, np.array(1.0), hvd.Sum, None, *plain)) is OperationCode.NO_ROWS


def rows(rank: int) -> None:
    everyone = global_process_set
    same(OPS.allgather(np.full((rank + 1, 2), rank), None, everyone), [[0, 0], [1, 1], [1, 1]])
    same(OPS.wait(OPS.start_allgathers, [np.array([rank]), np.ones(rank)], "g", everyone), [0, 1], [1.0])
    output, received = OPS.alltoall(np.array([10, 11, 12]) + 100 * rank, [1, 2], None, everyone)
    same(output, [10, 110] if rank == 0 else [11, 12, 111, 112])
    assert received == ([1, 1] if rank == 0 else [2, 2])
    assert code_of(refused(OPS.alltoall, np.ones(2), [1], None, everyone)) is OperationCode.WRONG_SPLITS
    mine = np.array([rank])
    same(OPS.broadcast(mine, 1, None, everyone), [1])
    same(mine, [rank])
    same(OPS.broadcast_(mine, 1, "b", everyone), [1])
    assert code_of(refused(OPS.broadcast, mine, 2, None, everyone)) is OperationCode.INVALID_ROOT
    gathered = start_sparse(OPS, np.array([[rank]]), np.array([[2.0, 4.0]]), "sparse", hvd.Average, everyone)
    same(gathered()[:2], [[0], [1]], [[2.0, 4.0], [2.0, 4.0]])


def all_the_rest(rank: int, alone: ProcessSet) -> None:
    third = np.array([1 / 3, rank])
    plain = (hvd.Sum, "half", 1.0, 1.0, global_process_set)
    result = compressed(Half, third, OPS.allreduce, *plain)
    assert result.dtype == np.float64
    assert result[0] == 2 * float(np.float16(1 / 3))
    group = compressed_group(
        Half, [third, np.array([rank])], lambda t: OPS.wait(OPS.start_allreduces, t, False, *plain)
    )
    assert [array.dtype.kind for array in group] == ["f", "i"]
    if rank == 1:
        same(OPS.allreduce(np.ones(1), hvd.Sum, "alone", 1.0, 1.0, alone), [1.0])
    else:
        said = refused(OPS.allreduce, np.ones(1), hvd.Sum, "alone", 1.0, 1.0, alone)
        assert code_of(said) is OperationCode.NOT_IN_SET
        assert "Rank 0" in said
    assert objects.broadcast_object({"of": rank}, 1, None, global_process_set) == {"of": 1}
    assert objects.allgather_object("x" * rank * 2000, None, global_process_set) == ["", "x" * 2000]
    collectives.barrier(global_process_set)
    assert collectives.join(-1) in (0, 1)


def main() -> None:
    alone = ProcessSet([1])
    hvd.init(process_sets=[alone])
    sums_and_averages(hvd.rank())
    rows(hvd.rank())
    all_the_rest(hvd.rank(), alone)
    hvd.shutdown()
    assert "torch" not in sys.modules
    print("all of them")


if __name__ == "__main__":
    main()
