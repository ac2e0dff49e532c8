"""benchmarks/parquet_reader.py reads the same rows in each way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.world import ROOT

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("fsspec")


def test_the_reader_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "parquet_reader.py"), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = json.loads(file.read_text())["rounds"]
    assert set(rounds) == {
        "ParquetReader",
        "ParquetReader, columns",
        "ParquetReader, cached",
        "DataLoader of pandas",
        "rows of Arrow",
    }
    assert all(one["rows_per_second"] > 0 and one["cpu_per_100k"] >= 0 for way in rounds.values() for one in way)
    assert "rows/s" in done.stdout
