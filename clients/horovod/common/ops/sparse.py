"""The sum or average of sparse tensors, by gathering indices and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from horovod.base.errors import OperationCode, coded
from horovod.common.basics import Adasum, Average, Sum
from horovod.common.ops.collectives import Collectives
from horovod.common.ops.handles import synchronize
from horovod.common.ops.specs import set_size
from horovod.common.process_sets import ProcessSet

T = TypeVar("T")


def start_sparse(
    collectives: Collectives[T], indices: T, values: T, name: str, op: int, process_set: ProcessSet
) -> Callable[[], tuple[T, T, int]]:
    """Starts `<name>.indices` and `<name>.values`, a row of each for an entry.

    The function that it returns waits for the indices and values of all ranks, and says by what to divide the values.
    """
    if op == Adasum:
        raise NotImplementedError(
            coded(
                OperationCode.UNDEFINED_REDUCTION,
                "The Adasum reduction does not support sparse tensors; see sparse_as_dense.",
            )
        )
    if op not in (Average, Sum):
        raise ValueError(
            coded(
                OperationCode.UNDEFINED_REDUCTION, "sparse_allreduce_async supports op=hvd.Average and op=hvd.Sum only."
            )
        )
    all_indices = collectives.allgather_async(indices, f"{name}.indices", process_set)
    all_values = collectives.allgather_async(values, f"{name}.values", process_set)
    members = set_size(process_set) if op == Average else 1

    def wait() -> tuple[T, T, int]:
        stream = collectives.framework.current_stream
        found = synchronize(all_values, stream)
        return synchronize(all_indices, stream), found, members

    return wait
