"""benchmarks/failover.py runs and its ranks name whom it killed; how long that takes is for the benchmark to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "failover.py"


@pytest.mark.slow
def test_one_death_of_each_kind(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(COMMAND), "--repeats", "1", "--limit", "60", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert [row["transport"] for row in rows] == ["shm"] * 3 + ["tcp"] * 3
    assert all(len(row["seconds"]) == 1 and row["seconds"][0] > 0 for row in rows)
