"""The sum or average of arrays of the storage type row_sparse, as embeddings have for gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np

from horovod.base.errors import OperationCode, coded
from horovod.common.ops.sparse import start_sparse
from horovod.common.process_sets import ProcessSet
from horovod.mxnet.arrays import COLLECTIVES
from horovod.mxnet.errors import lost_ranks, mxnet_errors


def start(tensor: Any, name: str, op: int, process_set: ProcessSet) -> Callable[[], Any]:
    """Sends the rows of all ranks to all; the function that it returns waits for them and makes the new array."""
    if getattr(tensor, "stype", None) != "row_sparse":
        found = type(tensor).__name__ + (f" of {tensor.stype}" if isinstance(tensor, mx.nd.NDArray) else "")
        raise ValueError(
            coded(
                OperationCode.UNSUPPORTED_LAYOUT,
                f"sparse_allreduce_async takes arrays of the storage type row_sparse, not a {found}. Use hvd.allreduce "
                "for others.",
            )
        )
    with lost_ranks():
        indices, values = tensor.indices, tensor.data
    finish = start_sparse(COLLECTIVES, indices, values, name, op, process_set)

    @mxnet_errors
    def wait() -> Any:
        indices, values, members = finish()
        # MXNet wants each row once, in order.
        rows, places = np.unique(indices.asnumpy(), return_inverse=True)
        found = values.asnumpy()
        total = np.zeros((len(rows), *found.shape[1:]), found.dtype)
        np.add.at(total, places, found)
        if members != 1:
            total = (total / members).astype(found.dtype)
        return mx.nd.sparse.row_sparse_array((total, rows), shape=tensor.shape, dtype=found.dtype)

    return wait
