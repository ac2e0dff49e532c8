"""benchmarks/failover.py runs and its ranks name whom it killed; how long that takes is for the benchmark to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from native_builds import ROOT, gpu_libraries

COMMAND = ROOT / "benchmarks" / "failover.py"


def rows_of(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    result = tmp_path / "result.json"
    command = [sys.executable, str(COMMAND), "--repeats", "1", "--limit", "60", "--json", str(result), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(result.read_text())["rows"]
    return rows


def test_one_death_of_each_kind(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert [row["transport"] for row in rows] == ["shm"] * 3 + ["tcp"] * 3
    assert all(len(row["seconds"]) == 1 and row["seconds"][0] > 0 for row in rows)


def test_one_death_of_each_kind_with_gpus(tmp_path: Path) -> None:
    """Those of the libraries that stand in for CUDA's; the command is the same on real ones."""
    rows = rows_of(tmp_path, "--transports", "gpu", "--gpu-libraries", ",".join(map(str, gpu_libraries())))
    assert [row["transport"] for row in rows] == ["gpu"] * 3
    assert all(len(row["seconds"]) == 1 and row["seconds"][0] > 0 for row in rows)
