"""The benchmark of the control plane, from end to end: a real coordinator and simulated members."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("relay", [False, True])
def test_figures_of_small_worlds(tmp_path: Path, relay: bool) -> None:
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        "benchmarks/control_plane.py",
        "--members",
        "16,64",
        "--tensors",
        "50",
        "--json",
        figures,
        *(["--relay"] if relay else []),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    small, large = json.loads(figures.read_text())
    assert (small["members"], large["members"]) == (16, 64)
    assert large["world_bytes"] < 4.5 * small["world_bytes"]
    assert 0 < large["memory_mb"] < 500
