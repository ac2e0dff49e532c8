"""The benchmark of jobs on many agents, from end to end, with a few of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_figures_of_a_few_agents() -> None:
    command = [sys.executable, "benchmarks/agents_start.py", "--agents", "3", "--jobs", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["agents"], len(found["jobs"])) == (3, 2)
    assert all(value >= 0 for job in found["jobs"] for value in job.values())
