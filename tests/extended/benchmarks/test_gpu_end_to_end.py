"""benchmarks/gpu.py: the whole of it on the CPU, as its rehearsal; with a GPU, a quick run of the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import switch_point
from benchmarks.world import ROOT

WITH_GPU = torch.cuda.is_available()


def check_document(file: Path, ranks: set[int]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["failures"] == []
    assert {row["ranks"] for row in document["rows"]} == ranks
    for row in document["rows"]:
        wanted = {"horovod", "nccl", "group"} if row["operation"] == "resnet50" else {"horovod", "nccl"}
        assert set(row["figures"]) == set(row["host"]["seconds"]) == wanted
        for figure in row["figures"].values():
            assert figure["values_checked"] > 0
            assert len(figure["host_rounds"]) == len(figure["rounds"])
            assert all(host <= whole for host, whole in zip(figure["host_rounds"], figure["rounds"], strict=True))
        assert (row["host"]["beyond_group"] is not None) == (row["operation"] == "resnet50")
    for row in document["training"]:
        assert set(row["figures"]) == {"alone", "ddp", "horovod", "apart"}
        assert all(rate > 0 for rate in row["samples_per_second"].values())
    for figures in document["packing"].values():
        assert {"copy", "pack foreach"} <= set(figures["seconds"])
        assert ("pack" in figures["seconds"]) == (not document["rehearsal"])
    swept = document["switch_point"]
    assert len(swept["rows"]) == len(switch_point.cases(2, quick=True))
    for row in swept["rows"]:
        assert set(row["figures"]) == {"horovod", "apart"}
        assert all(figure["values_checked"] > 0 for figure in row["figures"].values())
    assert set(swept) == {"rows", "wins_from", "threshold_bytes", "count", "loss", "loss_of_the_default"}
    assert set(document["copy_bytes_per_second"]) == {"on the device", "to the host", "from the host"}
    return document


def run(file: Path, *options: str, timeout: float = 300) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--json", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(320)
def test_rehearsal_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "results" / "out.json"
    sizes, operations = ("--sizes", "4,64K"), ("--ops", "allreduce,allgather,resnet50")
    run(file, "--rehearsal", *sizes, *operations, "--models", "transformer")
    document = check_document(file, {1, 2})
    assert document["rehearsal"] is True
    assert len(document["rows"]) == 2 * 5
    assert [(row["operation"], row["ranks"]) for row in document["training"]] == [
        ("transformer", 1),
        ("transformer", 2),
    ]


@pytest.mark.timeout(920)  # more than twenty processes begin to use the GPU
@pytest.mark.skipif(not WITH_GPU, reason="no CUDA device on this machine")
def test_a_quick_run_on_gpus(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    run(file, "--quick", "--sizes", "4,1M", "--ops", "allreduce,resnet50", timeout=900)
    document = check_document(file, {1, max(2, torch.cuda.device_count())})
    assert document["rehearsal"] is False
    assert document["machine"]["gpus"]
