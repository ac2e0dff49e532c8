"""Unmodified Lightning, accelerate, transformers, torchmetrics and torchdata have the same losses and weights with our
backend and with gloo, bit for bit, on two ranks that torchrun starts (distributed_trainers.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "distributed_trainers.py"
LIBRARIES = ["lightning", "lightning__fully_sharded", "accelerate", "transformers", "torchmetrics", "torchdata"]
pytestmark = pytest.mark.timeout(300)  # each rank imports all of them


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("found")
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAM, folder],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_START_TIMEOUT": "200", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_finds_what_it_finds_with_gloo(found: list[dict[str, Any]], library: str) -> None:
    if importlib.util.find_spec(package := library.split("__")[0]) is None:
        pytest.skip(f"{package} is not installed")
    for of_rank in found:
        assert of_rank["backend"] == "horovod"
        assert of_rank["horovod"][library] == of_rank["gloo"][library]


def test_the_trained_weights_are_equal_on_the_ranks(found: list[dict[str, Any]]) -> None:
    first, second = (of_rank["horovod"] for of_rank in found)
    for library in {"lightning", "lightning__fully_sharded", "accelerate", "transformers"} & first.keys():
        assert len(weights := first[library][-2 if "lightning" in library else -1]) > 100
        assert weights == second[library][-2 if "lightning" in library else -1]
