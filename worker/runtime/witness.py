"""What identifies this process, so that others can tell whether it lives; and whether others of its host live."""

from __future__ import annotations

import os
import select
import time

from horovod.base.processes import process_namespace, start_time
from horovod.protos.v1 import membership_pb2


def own_identity() -> membership_pb2.ProcessIdentity:
    started = start_time(os.getpid())
    return membership_pb2.ProcessIdentity(namespace=process_namespace() if started else "", start_time=started)


def lives(pid: int, started: int) -> bool | None:
    """Whether `pid` is still the process that began at `started` and has not ended; also one that is stopped lives.

    None where this process can't know.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # too many open files, or a kernel before 5.3
        return None
    try:
        # In this order: if it is the right one now, the descriptor is its, and tells of its end.
        if (found := start_time(pid)) != started:
            return None if found == 0 else False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(descriptor)


def own_age_seconds() -> float:
    """How long ago this process was started; 0 where that is not known."""
    started = start_time(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started) if started else 0.0
