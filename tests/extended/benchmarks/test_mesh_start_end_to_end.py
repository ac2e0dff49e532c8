"""Real worlds of many ranks: how many connections each has."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("ranks", "more"), [("16,64", ("--full-mesh-members", "8")), ("65", ())], ids=["asked", "default"]
)
def test_connections_of_a_rank_grow_with_the_logarithm(ranks: str, more: tuple[str, ...]) -> None:
    """And an allreduce, which the benchmark checks in each rank, gets by with them."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "mesh_start.py"),
        "--ranks",
        ranks,
        *more,
        "--allreduce",
        "1K,1M",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for count, line in zip(map(int, ranks.split(",")), done.stdout.splitlines()[1:], strict=True):
        assert line.split()[0] == str(count)
        assert 0 < int(line.split()[1]) <= 2 * math.ceil(math.log2(count))
