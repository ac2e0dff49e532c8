"""What must come out of each type of operation and each reduction: one row for each, with NumPy.

test_every_operation.py runs all of them, and fails where a type or a reduction has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod._core import OpType, ReduceOp

Arrays = Sequence[np.ndarray]  # what the ranks bring, in their order

# (what the ranks bring, this rank, the root) -> what this rank gets. Reductions are sums here.
OUTCOMES: dict[OpType, Callable[[Arrays, int, int], np.ndarray]] = {
    OpType.ALLREDUCE: lambda given, rank, root: sum(given[1:], given[0]),
    OpType.ALLGATHER: lambda given, rank, root: np.concatenate(given),
    OpType.BROADCAST: lambda given, rank, root: given[root],
    OpType.ALLTOALL: lambda given, rank, root: np.concatenate([np.array_split(one, len(given))[rank] for one in given]),
    OpType.REDUCESCATTER: lambda given, rank, root: np.array_split(sum(given[1:], given[0]), len(given))[rank],
}

# (one rank's, the next rank's) -> both together; None: an end of its own, or no reduction of elements.
REDUCTIONS: dict[ReduceOp, Callable[[Any, Any], Any] | None] = {
    ReduceOp.AVERAGE: None,
    ReduceOp.SUM: np.add,
    ReduceOp.ADASUM: None,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
