"""benchmarks/elastic.py runs, and its figures have all their parts; how long they are is for the benchmark to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from native_builds import ROOT


def test_two_kills_and_those_who_come_instead(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "elastic.py"), "--np", "2,3", "--kills", "2"]
    done = subprocess.run([*command, "--json", str(result)], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert [(row["np"], row["event"]) for row in rows] == [
        (size, event) for size in (2, 3) for event in ("lost", "newcomer")
    ]
    for row in rows:
        assert len(row["parts"]) == 2
        assert all(seconds > 0 for parts in row["parts"] for seconds in parts.values())
