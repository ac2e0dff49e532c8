"""Waiting for asynchronous operations; horovod.common.ops.handles says what handles are."""

from __future__ import annotations

from typing import Any

from horovod.common.ops import handles
from horovod.torch.tensors import TorchFramework

__all__ = ["poll", "synchronize"]

_synchronize = handles.synchronize
_current_stream = TorchFramework.current_stream


def poll(handle: Any) -> bool:
    """True when `synchronize(handle)` would return at once.

        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        >>> while not hvd.poll(handle):
        ...     pass  # something else to do meanwhile
        >>> hvd.synchronize(handle)
        tensor([2., 2.])

    Raises:
        ValueError: `handle` is not a handle, or was synchronized before.
    """
    return handles.poll(handle)


def synchronize(handle: Any) -> Any:
    """Waits for an asynchronous operation and returns its result: a tensor, or for grouped calls a tuple of tensors.

    On a GPU, work queued on the current stream from now on sees the result; this thread does not wait for it.
    `handle` is what a function ..._async returned. Returns None for an unknown handle or one that was synchronized
    before. Example, on two ranks:

        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        >>> hvd.synchronize(handle)
        tensor([2., 2.])
        >>> hvd.synchronize(handle) is None
        True

    Raises:
        HorovodInternalError: the operation failed (a rank was lost, or the ranks do not agree on it). The handle is
            forgotten then.
    """
    return _synchronize(handle, _current_stream)
