"""hvd.join: for ranks that run out of data before the others."""

from __future__ import annotations

from horovod.common.ops import collectives


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and blocks until all ranks of the world have called it.

    Meanwhile it contributes zeros to every allreduce of the others in the global process set, so that they can train
    on; Average still divides by the number of all ranks. Operations that this rank has started complete first. Any
    other operation in the global process set fails with "<Operation> is not supported with Join at this time." on the
    ranks that call it; so sparse gradients need DistributedOptimizer(sparse_as_dense=True).

    Returns:
        The rank that joined last. It has seen the most steps: a good root for broadcasting the final state.

    Example, on two ranks of which one has more data:

        >>> for batch in [2.0] if hvd.rank() == 0 else [2.0, 4.0]:
        ...     average = hvd.allreduce(torch.tensor([batch]), name="average")
        >>> average
        tensor([2.])  # on rank 0; tensor([2.]) on rank 1
        >>> last = hvd.join()
        >>> last
        1
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    """
    return collectives.join(device)
