"""Whole programs on a cluster that runs: the example, and both versions of Ray Train."""

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


NEEDS_PANDAS = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="ray.train needs pandas")


@NEEDS_PANDAS
def test_the_trainer_of_ray(one_node: Any, tmp_path: Path) -> None:
    """It imports from horovod.ray what it needs, and is there as long as the first version of Train is asked for."""
    address = one_node.address_info["gcs_address"]
    lines = said([sys.executable, "-c", TRAINER, address, str(tmp_path)], RAY_TRAIN_V2_ENABLED="0")
    assert lines[-1] == "2 0 2"


BACKEND = """
import sys
from pathlib import Path
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from horovod.ray.train import HorovodConfig

sys.path[:0] = [sys.argv[3]]
import ray_ranks

ray.cloudpickle.register_pickle_by_value(ray_ranks)
folder = Path(sys.argv[2])


def loop():
    import ray.train

    here, context = ray_ranks.place(), ray.train.get_context()
    of_ray = context.get_world_rank(), context.get_world_size(), context.get_local_rank()
    assert of_ray == (here["rank"], here["size"], here["local"][0])
    told = folder / f"told-{here['rank']}"
    if here["rank"] == 1 and not told.exists():
        told.touch()
        ray_ranks.fail()
    if here["rank"] == 0 and not told.exists():
        told.write_text(str(ray_ranks.lost()))
        raise RuntimeError("a peer is gone")
    (folder / f"done-{here['rank']}").write_text(str(here["sum"]))


ray.init(sys.argv[1], log_to_driver=False)
DataParallelTrainer(
    loop,
    backend_config=HorovodConfig(),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(folder / "results"), failure_config=FailureConfig(max_failures=1)),
).fit()
"""


@NEEDS_PANDAS
def test_a_group_of_ray_train_that_fails_and_is_started_again(one_node: Any, tmp_path: Path) -> None:
    address, modules = one_node.address_info["gcs_address"], str(Path(__file__).parent)
    said([sys.executable, "-c", BACKEND, address, str(tmp_path), modules])
    assert "its function raised ZeroDivisionError: out of coffee" in (tmp_path / "told-0").read_text()
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(2)] == ["1.0", "1.0"]
