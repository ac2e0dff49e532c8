"""What a process holds: descriptors, threads, mappings, memory. Nothing leaks when none of them grows.

A thread that has been joined is in /proc for a moment longer, and the far end of a connection closes when its process
gets to it. So a number may be too high when it is read, before and after: what is asked for is that it comes back, not
that it is equal at one moment. A test makes what it tests often enough for a leak to show.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

# What the allocator may keep without anybody leaking; a leak of 200 bytes shows in 100,000 steps.
RESIDENT_SLACK_BYTES = 16 << 20
SETTLE_SECONDS = 60.0  # a busy machine may need it; nobody waits longer than until the condition is true


def eventually(condition: Callable[[], bool], seconds: float = SETTLE_SECONDS) -> bool:
    """Polls what has no event, first often and then less; False when it does not come true in time."""
    end = time.monotonic() + seconds
    pause = 0.001
    while not condition():
        if time.monotonic() > end:
            return False
        if pause > 0.02:  # it takes long with all that is imported here
            gc.collect()
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def held() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": descriptors(),
        "threads": threads(),
        "segments": sum("memfd:horovod" in line for line in maps),
        "mappings": len(maps),
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def leaks(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Names with (before, now) of what has grown and stays so."""
    # The allocator and the C library map a little now and then.
    slack = {"mappings": 8, "resident_bytes": RESIDENT_SLACK_BYTES}
    grown: dict[str, tuple[int, int]] = {}

    def none_grown() -> bool:
        now = held()
        grown.clear()
        grown.update({n: (before[n], now[n]) for n in before if now[n] > before[n] + slack.get(n, 0)})
        return not grown

    eventually(none_grown)
    return grown
