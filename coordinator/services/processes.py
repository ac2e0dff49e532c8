"""The members' processes that this coordinator can see: it learns of their end at once, and can vouch that they live.

That needs the same kernel and the same pid namespace. A pidfd is bound to the process and not to its number, so a
process that is stopped, or swapped out for minutes, is still known to be there (pidfd_open(2)).
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from horovod.base.processes import stopped_turns
from horovod.coordinator.core.world.life import EXECUTED, PROCESS_ENDED
from horovod.protos.v1 import membership_pb2

_START_TIME, _STACK = 22, 28  # fields of /proc/PID/stat (proc(5)); exec gives the process another stack


@dataclass
class _Watched:
    pid: int
    descriptor: int
    stack: int  # 0: this coordinator may not read the address


class ProcessWatch:
    """Used in one event loop."""

    def __init__(self, ended: Callable[[str, str], None]) -> None:
        """ended: called once with the id of a member whose process has ended, and the cause."""
        self._ended = ended
        self._namespace = own_namespace()
        self._watched: dict[str, _Watched] = {}  # member id -> its process

    def watch(self, member_id: str, pid: int, process: membership_pb2.ProcessIdentity) -> None:
        """Does nothing for a process that is not visible here, or is not the one that the member says."""
        if member_id in self._watched or not self._namespace or process.namespace != self._namespace or pid <= 0:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError):  # it has ended, there are too many open files, or the kernel is older than 5.3
            return
        # Read after pidfd_open: if these are the right process's, the descriptor is, too.
        start_time, stack = _look(pid)
        if start_time == 0 or start_time != process.start_time:
            os.close(descriptor)
            return
        self._watched[member_id] = _Watched(pid, descriptor, stack)
        asyncio.get_running_loop().add_reader(descriptor, self._end, member_id, PROCESS_ENDED)

    def lives(self, member_id: str) -> bool:
        """True when the member's process is known to live. Tells of the end of one that runs another program by now."""
        one = self._watched.get(member_id)
        if one is None:
            return False
        if one.stack and _look(one.pid)[1] not in (0, one.stack):
            self._end(member_id, EXECUTED)
            return False
        return True

    def look(self, member_ids: Iterable[str]) -> tuple[set[str], dict[str, int]]:
        """Of these members, those whose processes are seen and not stopped, and those whose processes are: with how
        often each was given a processor so far.
        """
        runs, stopped = set(), {}
        for member_id in member_ids:
            if (one := self._watched.get(member_id)) is None:
                continue
            if (turns := stopped_turns(one.pid)) is None:
                runs.add(member_id)
            else:
                stopped[member_id] = turns
        return runs, stopped

    def forget(self, member_id: str) -> None:
        if one := self._watched.pop(member_id, None):
            asyncio.get_running_loop().remove_reader(one.descriptor)
            os.close(one.descriptor)

    def close(self) -> None:
        for member_id in list(self._watched):
            self.forget(member_id)

    def _end(self, member_id: str, cause: str) -> None:
        self.forget(member_id)
        self._ended(member_id, cause)


def own_namespace() -> str:
    """Equal for processes that see each other's pids, as worker/runtime/host.py makes it; "" where it is not known."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _look(pid: int) -> tuple[int, int]:
    """When the process started, and where its stack is; 0 is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[_START_TIME - 3]), int(fields[_STACK - 3])
    except (OSError, ValueError, IndexError):
        return 0, 0
