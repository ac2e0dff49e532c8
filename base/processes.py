"""What /proc tells of another process (proc(5))."""

from __future__ import annotations

from pathlib import Path

_STATES_STOPPED = ("T", "t")  # by a signal, by a debugger


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
