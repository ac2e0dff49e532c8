"""hvd.sparse_allreduce_async: the sum or average of sparse tensors, by gathering indices and values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.base.errors import OperationCode, coded
from horovod.common.ops.sparse import start_sparse
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.tensors import COLLECTIVES


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the reduction of a sparse COO tensor; call the returned function to wait for the sparse result.

    The result holds the entries of all ranks one after the other: duplicates are left for `.coalesce()`. Example, on
    ranks 0 and 1:

        >>> mine = torch.sparse_coo_tensor([[0, 1 + hvd.rank()]], [1.0, 2.0], (4,), check_invariants=True)
        >>> wait = hvd.sparse_allreduce_async(mine, name="embedding", op=hvd.Sum)
        >>> wait().to_dense()
        tensor([2., 2., 2., 0.])
    """
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(
            coded(
                OperationCode.UNSUPPORTED_LAYOUT,
                f"sparse_allreduce_async needs a sparse COO tensor, not one of layout {tensor.layout}.",
            )
        )
    size = tensor.size()
    indices, values = tensor._indices().t().contiguous(), tensor._values().detach().contiguous()
    gathered = start_sparse(COLLECTIVES, indices, values, name, op, process_set)

    def wait() -> torch.Tensor:
        indices, values, members = gathered()
        if members > 1:
            values = values / members
        # On a GPU the check would read the indices, for which the host would wait until the device has come so far.
        return torch.sparse_coo_tensor(indices.t(), values, size, check_invariants=not values.is_cuda)

    return wait
