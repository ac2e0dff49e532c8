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
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
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
    if not told.exists():
        assert ray.train.get_checkpoint() is None
        own = folder / f"saved-{here['rank']}"
        own.mkdir()
        (own / "step").write_text("1")
        ray.train.report({"step": 1}, checkpoint=Checkpoint.from_directory(own) if here["rank"] == 0 else None)
        ray_ranks.allreduce("reported")  # an error that came before rank 0's report would make Ray drop that
    else:
        assert (Path(ray.train.get_checkpoint().path) / "step").read_text() == "1"
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


ELASTIC = """
import sys
from pathlib import Path
import ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from horovod.ray.train import HorovodConfig

folder = Path(sys.argv[2])


def loop():
    import os
    import signal
    import ray.train
    import torch
    import horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
    assert (rank, hvd.size()) == (ray.train.get_context().get_world_rank(), 2)
    (folder / f"{rank}-{os.getpid()}-started").touch()

    @hvd.elastic.run
    def train(state):
        while state.step < 6:
            if state.step == 3 and rank == 1 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.total += float(hvd.allreduce(torch.ones(1), name="step", op=hvd.Sum))
            state.step += 1
            state.commit()
            own = folder / f"checkpoint-{rank}-{state.step}"
            own.mkdir()
            (own / "step").write_text(str(state.step))
            told = {"step": state.step, "total": state.total}
            ray.train.report(told, checkpoint=Checkpoint.from_directory(own) if rank == 0 else None)

    train(hvd.elastic.TorchState(step=0, total=0.0))
    (folder / f"{rank}-{os.getpid()}-done").touch()


ray.init(sys.argv[1], log_to_driver=False)
result = DataParallelTrainer(
    loop,
    backend_config=HorovodConfig(min_workers=2, timeout_s=100),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(folder / "results"), failure_config=FailureConfig(max_failures=1)),
).fit()
print(result.metrics["step"], result.metrics["total"], (Path(result.checkpoint.path) / "step").read_text())
"""


@NEEDS_PANDAS
def test_a_worker_of_ray_train_that_is_replaced_alone(one_node: Any, tmp_path: Path) -> None:
    """The other one keeps its process, and goes on from its last commit."""
    lines = said([sys.executable, "-c", ELASTIC, one_node.address_info["gcs_address"], str(tmp_path)])
    assert lines[-1] == "6 12.0 6"
    started = sorted(path.name.removesuffix("-started") for path in tmp_path.glob("*-started"))
    done = sorted(path.name.removesuffix("-done") for path in tmp_path.glob("*-done"))
    assert [name.partition("-")[0] for name in started] == ["0", "1", "1"]
    assert [name.partition("-")[0] for name in done] == ["0", "1"]
    assert set(done) < set(started)
