"""Python objects over the wire, as cloudpickle in bytes. Only what authenticated peers sent is unpickled."""

from __future__ import annotations

from typing import TypeVar

from horovod.common.ops import objects
from horovod.common.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object that rank `root_rank` passed, on every rank. The root gets its own object back, unchanged.

    The others pass anything (usually None). The object is pickled with cloudpickle. Example, on ranks 0 and 1:

        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
        {'epoch': 3}

    Args:
        obj: on the root, what to send.
        root_rank: a global rank.
        name: matches the call across ranks; the default is the same for all objects.
        process_set: the ranks that take part.

    Raises:
        ValueError: a root that is not a rank of the set, a bad process set, an object that root can't pickle.
        HorovodInternalError: a rank was lost.
        Exception: on the root, what pickling raises; the other ranks get ValueError with its text.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """The objects of all ranks as a list, ordered by rank. Objects may differ in type and size.

        >>> hvd.allgather_object("x" * hvd.rank())
        ['', 'x']

    Args:
        obj: this rank's object; pickled with cloudpickle.
        name: matches the call across ranks; the default is the same for all objects.
        process_set: the ranks that take part.

    Raises:
        ValueError: a bad process set, or another rank's object can't be pickled; the message says which and why.
        HorovodInternalError: a rank was lost.
        Exception: what pickling raises on this rank.
    """
    return objects.allgather_object(obj, name, process_set)
