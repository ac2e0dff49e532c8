"""What a process holds: descriptors, threads, mappings, memory. Equal before and after means that nothing leaks."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# What the allocator may keep without anybody leaking; a leak of 200 bytes shows in 100,000 steps.
RESIDENT_SLACK_BYTES = 16 << 20


def counters() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": sum("memfd:horovod" in line for line in maps),
        "mappings": len(maps),
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def leaks(before: dict[str, int], after: dict[str, int], mappings_slack: int = 8) -> dict[str, tuple[int, int]]:
    """Names with (before, after) of what grew. The allocator and the C library map a little now and then."""
    slack = {"mappings": mappings_slack, "resident_bytes": RESIDENT_SLACK_BYTES}
    return {name: (before[name], after[name]) for name in before if after[name] > before[name] + slack.get(name, 0)}
