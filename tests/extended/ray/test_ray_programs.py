"""Whole programs on a cluster that runs: the example, and Ray's own HorovodTrainer."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_digits.py"
# Each of their processes imports PyTorch or pandas, anew where nothing was compiled.
DEADLINE_S = 280
pytestmark = pytest.mark.timeout(300)


def said(command: list[str], **environment: str) -> list[str]:
    """The lines that the program prints."""
    environ = {**os.environ, **environment}
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_learns(one_node: Any) -> None:
    address = one_node.address_info["gcs_address"]
    lines = said([sys.executable, str(EXAMPLE), "--address", address, "--epochs", "8"])
    lines = [line for line in lines if line.startswith(("epoch", "test"))]
    assert len(lines) == 9
    accuracy = re.fullmatch(r"test accuracy: (\d\.\d+)", lines[-1])
    assert accuracy, lines
    assert float(accuracy[1]) > 0.93


TRAINER = """
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.horovod import HorovodTrainer


def loop():
    from horovod.common import basics as hvd
    import ray.train

    hvd.init()
    ray.train.report({"size": hvd.size(), "rank": hvd.rank(), "local": hvd.local_size()})


ray.init(sys.argv[1], log_to_driver=False)
trainer = HorovodTrainer(
    loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=sys.argv[2], verbose=0)
)
metrics = trainer.fit().metrics
print(metrics["size"], metrics["rank"], metrics["local"])
"""


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="ray.train needs pandas")
def test_the_trainer_of_ray(one_node: Any, tmp_path: Path) -> None:
    """It imports from horovod.ray what it needs, and is there as long as the first version of Train is asked for."""
    address = one_node.address_info["gcs_address"]
    lines = said([sys.executable, "-c", TRAINER, address, str(tmp_path)], RAY_TRAIN_V2_ENABLED="0")
    assert lines[-1] == "2 0 2"
