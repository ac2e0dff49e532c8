"""What /proc tells of another process (proc(5)), and standard streams that this one was started without."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_STATES_STOPPED = ("T", "t")  # states of a process that a signal or a debugger has stopped
_PARENT = 4  # places of fields in /proc/PID/stat
_START_TIME = 22
_STACK = 28


def start_time(pid: int) -> int:
    """In ticks since boot; 0 where it is not known."""
    return _numbers(pid, _START_TIME)[0]


def start_and_stack(pid: int) -> tuple[int, int]:
    """When the process started, and where its stack is, to which exec gives another place; 0 is not known."""
    started, stack = _numbers(pid, _START_TIME, _STACK)
    return started, stack


def parent_of(pid: int) -> int:
    """The process that started `pid`, or took it over when that ended; 0 where it is not known."""
    return _numbers(pid, _PARENT)[0]


def _numbers(pid: int, *fields: int) -> list[int]:
    """Fields of /proc/PID/stat, of one moment. The second one, a name, may have blanks and brackets of its own."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return [int(found[field - 3]) for field in fields]
    except (OSError, ValueError, IndexError):
        return [0] * len(fields)


def process_namespace() -> str:
    """Equal for two processes exactly when they see each other's pids: kernel and pid namespace. "": not known."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def stopped_turns(pid: int) -> int | None:
    """How often the process was given a processor so far, if it is stopped; None where it is not, or can't be seen.

    A process that was continued and stopped again has had a turn between, as the signal is taken by a thread of it.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, ValueError):
        return None
    fields = dict(line.partition(":")[::2] for line in lines)
    if fields.get("State", "").strip()[:1] not in _STATES_STOPPED:
        return None
    turns = (fields.get(f"{kind}_ctxt_switches", "0") for kind in ("voluntary", "nonvoluntary"))
    return sum(int(count) for count in turns)


_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def open_missing_streams() -> None:
    """Opens /dev/null in place of those that are closed. Call it first of all, before this process opens anything.

    Python has None for a stream whose descriptor is closed. The next file or connection would get its number, and what
    this process or a child writes as its output would go there.
    """
    for number, name, mode in _STREAMS:
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
