"""Workers of a DataLoader, however they are started, read their rank's share of a dataset."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sharded_dataset import ITEMS


def test_every_item_is_read_once_with_each_kind_of_worker():
    script = Path(__file__).with_name("sharded_dataset.py")
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.partition(">:")[2] or line for line in done.stdout.splitlines()]
    assert lines == [f"{method} {list(range(ITEMS))}" for method in ("fork", "spawn", "forkserver")]
