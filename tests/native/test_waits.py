"""The time limits of the engine stand in one table (csrc/base/limits.h), and it waits in one way (csrc/base/wait.h)."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from native_builds import ROOT

CSRC = ROOT / "csrc"
# A constant whose name ends in a unit of time, and a number that <chrono> gives a unit.
LIMIT = re.compile(r"\bk[A-Z]\w*(Ns|Us|Ms|Seconds|NS|US|MS)\s*(=|\{)|\b(micro|milli|nano)?seconds\(\d")
CALLS = re.compile(r"\b(sched_yield|nanosleep|usleep|sleep_for|sleep_until_time|cpu_pause|futex_wait)\(")


def found(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    """The lines of code that match, by file."""
    lines: dict[str, list[str]] = {}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in (".h", ".cc", ".cu"):
            code = [line.split("//")[0] for line in path.read_text().splitlines()]
            if matching := [line.strip() for line in code if pattern.search(line)]:
                lines[str(Path(path).relative_to(CSRC))] = matching
    return lines


def test_time_limits_stand_in_one_table() -> None:
    limits = found(LIMIT)
    assert len(limits.pop("base/limits.h")) > 20
    assert not limits, "move these to csrc/base/limits.h, with a sentence that says why"


def test_every_limit_is_used_and_explained() -> None:
    table = (CSRC / "base/limits.h").read_text().splitlines()
    sources = "\n".join(path.read_text() for path in CSRC.rglob("*.*") if path.name != "limits.h")
    names = 0
    for above, line in itertools.pairwise(table):
        if match := re.search(r"constexpr \w+ (k\w+)", line):
            names += 1
            assert f"limits::{match[1]}" in sources, f"nothing uses {match[1]}"
            assert above.startswith(("//", "inline constexpr")), f"a comment above {match[1]} says why"
    assert names > 20


def test_threads_wait_in_one_way() -> None:
    assert set(found(CALLS)) == {"base/futex.h", "base/wait.h"}, "wait with what csrc/base/wait.h has"
