"""Random runs of elastic jobs: whatever happens to one, no committed work is lost or done again unsaid."""

from __future__ import annotations

import os
from pathlib import Path

import elastic_runs
import etcd_server
import pytest

RUNS = {"here": 6, "agents": 3, "hand": 6}  # or as many of each as ELASTIC_RUNS says


@pytest.mark.parametrize(
    ("kind", "seed"),
    [(kind, seed) for kind, count in RUNS.items() for seed in range(int(os.environ.get("ELASTIC_RUNS", count)))],
)
def test_no_committed_work_is_lost_or_repeated(tmp_path: Path, kind: str, seed: int) -> None:
    if kind == "hand" and etcd_server.missing():
        pytest.skip(etcd_server.missing())
    elastic_runs.play(tmp_path, kind, seed)
