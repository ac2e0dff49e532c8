"""benchmarks/training.py trains every model with every library and reports what it has compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.models import MODELS
from benchmarks.world import ROOT


def test_training_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "results" / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "training.py"), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    assert [row["operation"] for row in document["rows"]] == list(MODELS)
    for row in document["rows"]:
        assert set(row["distance_from_one_process"]) == {"ddp", "horovod", "each other"}
        assert max(row["distance_from_one_process"].values()) < 1e-3
        assert set(row["figures"]) == {"alone", "ddp", "horovod", "apart"}
        assert None not in row["waiting"].values()
        assert all(figure["values_checked"] >= row["parameters"] for figure in row["figures"].values())
        assert all(rate > 0 for rate in row["samples_per_second"].values())
