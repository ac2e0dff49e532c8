"""The benchmark of jobs on many agents, from end to end, with a few of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import NetworkError, check_possible

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("options", [(), ("--namespaces",)])
def test_figures_of_a_few_agents(options: tuple[str, ...]) -> None:
    if options:
        try:
            check_possible()
        except NetworkError as error:
            pytest.skip(str(error))
    command = [sys.executable, "benchmarks/agents_start.py", "--agents", "3", "--jobs", "2", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["agents"], len(found["jobs"])) == (3, 2)
    assert all(value >= 0 for job in found["jobs"] for value in job.values())
