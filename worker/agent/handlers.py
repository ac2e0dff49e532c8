"""Which processes of a rank have a handler for a signal.

A rank may be a program below a shell, and may have started others, such as the workers of a DataLoader. A signal for
all of them ends those that have no handler, and with a DataLoader's worker the step that waits for its rows.
"""

from __future__ import annotations

import contextlib

from horovod.worker.agent.guardian import session_members


def handlers_of(leader: int, signum: int) -> list[int]:
    """In the session of `leader`, from it on downwards, the first process of each branch that has a handler for it."""
    children: dict[int, list[int]] = {}
    for pid in session_members(leader):
        with contextlib.suppress(OSError, ValueError, IndexError):
            children.setdefault(_parent(pid), []).append(pid)
    found, left = [], [leader]
    while left:
        pid = left.pop()
        if _catches(pid, signum):
            found.append(pid)
        else:
            left += children.get(pid, ())
    return found


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def _catches(pid: int, signum: int) -> bool:
    """proc(5): "SigCgt" is a mask of the signals that are caught."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False
