"""Whole programs on a cluster that runs: the examples, and one for the first version of Ray Train."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
# Each of their processes imports PyTorch or pandas, anew where nothing was compiled.
DEADLINE_S = 280
PATIENCE = "200"  # seconds: of two ranks that import PyTorch on a busy machine, one may be half a minute later
pytestmark = pytest.mark.timeout(300)


def said(command: list[str], **environment: str) -> list[str]:
    """The lines that the program prints."""
    environ = {**os.environ, "HOROVOD_START_TIMEOUT": PATIENCE, **environment}
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_learns(one_node: Any) -> None:
    address = one_node.address_info["gcs_address"]
    lines = said([sys.executable, str(EXAMPLES / "ray_digits.py"), "--address", address, "--epochs", "8"])
    lines = [line for line in lines if line.startswith(("epoch", "test"))]
    assert len(lines) == 9
    accuracy = re.fullmatch(r"test accuracy: (\d\.\d+)", lines[-1])
    assert accuracy, lines
    assert float(accuracy[1]) > 0.93


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_a_module_of_lightning_learns(one_node: Any) -> None:
    address = one_node.address_info["gcs_address"]
    lines = said([sys.executable, str(EXAMPLES / "lightning_digits.py"), "--ray", "--address", address])
    accuracy = re.fullmatch(r"test accuracy: (\d\.\d+) with 2 processes", lines[-1])
    assert accuracy, lines
    assert float(accuracy[1]) > 0.93


def test_the_elastic_example_learns(one_node: Any) -> None:
    address = one_node.address_info["gcs_address"]
    lines = said([sys.executable, str(EXAMPLES / "ray_elastic_digits.py"), "--address", address])
    assert "epoch 10 ends with workers: 2" in lines
    accuracy = re.fullmatch(r"test accuracy: (\d\.\d+)", lines[-1])
    assert accuracy, lines
    assert float(accuracy[1]) > 0.9


NEEDS_PANDAS = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="ray.train needs pandas")


@NEEDS_PANDAS
def test_the_example_for_tune_finds_a_learning_rate(one_node: Any, tmp_path: Path) -> None:
    address = one_node.address_info["gcs_address"]
    options = ["--trials", "2", "--epochs", "3", "--storage-path", str(tmp_path)]
    *_, best, weights = said([sys.executable, str(EXAMPLES / "ray_tune_digits.py"), "--address", address, *options])
    accuracy = re.fullmatch(r"best of 2: test accuracy (\d\.\d+) with a learning rate of .*", best)
    assert accuracy, best
    assert float(accuracy[1]) > 0.3
    assert (Path(weights.removeprefix("its weights: ")) / "model.pt").exists()


TRAINER = """
import sys
import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.train.horovod import HorovodTrainer


def loop(config):
    from horovod.common import basics as hvd
    import ray.train

    hvd.init()
    told = {"size": hvd.size(), "rank": hvd.rank(), "local": hvd.local_size(), "number": config["number"]}
    ray.train.report(told)


ray.init(sys.argv[1], log_to_driver=False)
trainer = HorovodTrainer(
    loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=sys.argv[2], verbose=0)
)
(result,) = tune.Tuner(trainer, param_space={"train_loop_config": {"number": tune.grid_search([4])}}).fit()
metrics = result.metrics
print(metrics["size"], metrics["rank"], metrics["local"], metrics["number"])
"""


@NEEDS_PANDAS
def test_the_trainer_of_ray_under_tune(one_node: Any, tmp_path: Path) -> None:
    """It imports from horovod.ray what it needs, and is there as long as the first version of Train is asked for."""
    environ = {**os.environ, "HOROVOD_START_TIMEOUT": PATIENCE, "RAY_TRAIN_V2_ENABLED": "0"}
    command = [sys.executable, "-c", TRAINER, one_node.address_info["gcs_address"], str(tmp_path)]
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 0 2 4"
