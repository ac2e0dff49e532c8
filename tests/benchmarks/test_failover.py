"""benchmarks/failover.py runs and its ranks name whom it killed; how long that takes is for the benchmark to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from native_builds import gpu_libraries

from benchmarks import failover

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "failover.py"


def rows_of(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    result = tmp_path / "result.json"
    command = [sys.executable, str(COMMAND), "--repeats", "1", "--limit", "60", "--json", str(result), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(result.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_one_death_of_each_kind(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert [row["transport"] for row in rows] == ["shm"] * 3 + ["tcp"] * 3
    assert all(len(row["seconds"]) == 1 and row["seconds"][0] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.xdist_group("gpu")
def test_one_death_of_each_kind_with_gpus(tmp_path: Path) -> None:
    """Those of the libraries that stand in for CUDA's; the command is the same on real ones."""
    rows = rows_of(tmp_path, "--transports", "gpu", "--gpu-libraries", ",".join(map(str, gpu_libraries())))
    assert [row["transport"] for row in rows] == ["gpu"] * 3
    assert all(len(row["seconds"]) == 1 and row["seconds"][0] > 0 for row in rows)


def test_no_gpu_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CUDA_LIBRARY", "")
    monkeypatch.setenv("HOROVOD_NCCL_LIBRARY", "")
    assert failover.main(["--transports", "gpu", "--gpu-libraries", "/nowhere/a,/nowhere/b"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("No tensors can be on a GPU here: there is no NVIDIA driver on this host: /nowhere/a")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--transports", "shm,pigeon"), "'pigeon' is no transport; there are shm, tcp, gpu."),
        (("--gpu-libraries", "one"), "'one' are not two files"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        failover.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
