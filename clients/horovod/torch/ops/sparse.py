"""hvd.sparse_allreduce_async: the sum or average of sparse tensors, by gathering indices and values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.common.basics import Adasum, Average, Sum
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.handles import synchronize
from horovod.torch.ops.allgather import allgather_async
from horovod.torch.ops.submit import set_size


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the reduction of a sparse COO tensor; call the returned function to wait for the sparse result.

    The result holds the entries of all ranks one after the other: duplicates are left for `.coalesce()`. All ranks must
    pass the same size; the number of entries may differ, also be zero.

    Args:
        tensor: sparse COO.
        name: required; two operations `<name>.indices` and `<name>.values` are started.
        op: hvd.Average (entries are divided by the number of ranks) or hvd.Sum.
        process_set: the ranks that take part.
    """
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async needs a sparse COO tensor, not one of layout {tensor.layout}.")
    if op == Adasum:
        raise NotImplementedError("The Adasum reduction does not support sparse tensors; see sparse_as_dense.")
    if op not in (Average, Sum):
        raise ValueError("sparse_allreduce_async supports op=hvd.Average and op=hvd.Sum only.")
    size = tensor.size()
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values().detach().contiguous(), f"{name}.values", process_set)
    members = set_size(process_set) if op == Average else 1

    def wait() -> torch.Tensor:
        all_values = synchronize(values)
        all_indices = synchronize(indices)
        if members > 1:
            all_values = all_values / members
        return torch.sparse_coo_tensor(all_indices.t(), all_values, size, check_invariants=True)

    return wait
