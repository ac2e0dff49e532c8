"""What /proc tells of another process (proc(5))."""

from __future__ import annotations

from pathlib import Path

_STATES_STOPPED = ("T", "t")  # states of a process that a signal or a debugger has stopped
_PARENT = 4  # places of fields in /proc/PID/stat
_START_TIME = 22


def start_time(pid: int) -> int:
    """In ticks since boot; 0 where it is not known."""
    return _number(pid, _START_TIME)


def parent_of(pid: int) -> int:
    """The process that started `pid`, or took it over when that ended; 0 where it is not known."""
    return _number(pid, _PARENT)


def _number(pid: int, field: int) -> int:
    """A field of /proc/PID/stat. The second one, a name, may have blanks and brackets of its own."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field - 3])
    except (OSError, ValueError, IndexError):
        return 0


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
