"""hvd.barrier: nobody passes before everybody arrived."""

from __future__ import annotations

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.ops.submit import BARRIER, run, set_id


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until every rank of `process_set` has called it.

        >>> hvd.barrier()

    Raises:
        ValueError: a set that is not registered or that this rank is not a member of.
        HorovodInternalError: a rank was lost meanwhile.
    """
    number = 0 if process_set is global_process_set else set_id(process_set, "Barrier")
    run(None, BARRIER, "barrier.noname", (), set_id=number)
