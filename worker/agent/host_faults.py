"""What keeps a host from starting any job: too little free space on the agent's disk, and errors of its system."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from horovod.worker.agent.log import SEGMENT_BYTES

SEGMENTS = 2  # segments of each rank's log that are allocated when the rank starts
BESIDE_BYTES = 512 << 10  # disk space for everything else in a job's folder

# After one of these errors the job is tried on another host, which may have what this one lacks. Any other error, as of
# a folder that does not exist, is the job's own fault.
HOST_ERRORS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    }
)  # fmt: skip


def needed_bytes(ranks: int) -> int:
    """The free disk space without which a job with so many ranks on this host is not started."""
    return ranks * SEGMENTS * SEGMENT_BYTES + BESIDE_BYTES


def free_bytes(folder: Path) -> int:
    """The free space of the disk of `folder` that this process may use."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def bytes_in(folder: Path) -> int:
    """How much of the disk the files in the folder take."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total
