"""hvd.barrier: no rank passes before all have arrived."""

from __future__ import annotations

from horovod.common.ops import collectives
from horovod.common.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until every rank of `process_set` has called it.

    >>> hvd.barrier()
    """
    collectives.barrier(process_set)
