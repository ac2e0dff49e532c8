"""benchmarks/threads.py trains with PyTorch's threads and with those that the launcher gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.world import ROOT
from horovod.worker.agent.cores_and_gpus import usable_cores


def test_threads_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "threads.py"), "--quick", "--json", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}  # which decide for neither
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    found = {name: rounds[0] for name, rounds in document["rounds"].items()}
    assert set(found) == {"PyTorch's", "horovodrun's"}
    assert all(one["images_per_second"] > 0 for one in found.values())
    assert found["horovodrun's"]["threads"] == max(1, int(usable_cores() // 2))
    assert "images/s" in done.stdout
