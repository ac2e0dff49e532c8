"""Trainings of Ray Train whose groups of workers fail, and are started again or mended in place."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import ray_ranks
from error_codes import ends_with
from ray.cluster_utils import Cluster
from ray_starts import started

from horovod.base.errors import LaunchCode, OperationCode

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="ray.train needs pandas"),
]
DEADLINE_S = 280
ROWS = 24
PAIR = {"num_workers": 2, "use_gpu": True, "resources_per_worker": {"CPU": 1, "GPU": 2, "seat": 1}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node with seats for two workers of two GPUs each."""
    node = {"num_cpus": 3, "num_gpus": 4, "resources": {"seat": 2}, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        for name, value in ray_ranks.INHERITED.items():
            patch.setenv(name, value)
        running = started(lambda: Cluster(initialize_head=True, head_node_args=node))
    try:
        ray.init(running.address, log_to_driver=False)
        yield running
    finally:
        ray.shutdown()
        running.shutdown()


@pytest.fixture(autouse=True)
def _functions_travel_as_a_whole() -> None:
    ray.cloudpickle.register_pickle_by_value(__import__(__name__))


def fitted(loop: Callable[..., None], folder: Path, failures: int, backend: Any, scaling: Any, **options: Any) -> Any:
    """Starts the training in a thread, as in the main one Ray would take over Ctrl-C. `folder` is the loop's config."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        loop,
        train_loop_config={"folder": str(folder)},
        backend_config=backend,
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=failures)),
        **options,
    )
    return ThreadPoolExecutor(1).submit(trainer.fit)


def rows() -> dict[str, Any]:
    """In memory, so that no task has to read them."""
    return {"rows": ray.data.from_items([{"id": number} for number in range(ROWS)], override_num_blocks=2)}


def saved(number: int, folder: Path) -> Any:
    """A checkpoint that holds a number."""
    from ray.train import Checkpoint

    folder.mkdir()
    (folder / "number").write_text(str(number))
    return Checkpoint.from_directory(folder)


def number_in(checkpoint: Any) -> int:
    return int((Path(checkpoint.path) / "number").read_text()) if checkpoint is not None else 0


def group(config: dict[str, str]) -> None:
    """The first group of workers ends when rank 1 raises. Each adds one to the checkpoint."""
    import ray.train

    here, context, folder = ray_ranks.place(), ray.train.get_context(), Path(config["folder"])
    of_ray = context.get_world_rank(), context.get_world_size(), context.get_local_rank()
    assert of_ray == (here["rank"], here["size"], here["local"][0])
    rank, number = here["rank"], number_in(ray.train.get_checkpoint()) + 1
    batches = ray.train.get_dataset_shard("rows").iter_batches(batch_size=None)
    seen = {
        "rows": [int(row) for batch in batches for row in batch["id"]],
        "environment": ray_ranks.environment(),
        "gpus": [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]],
        **here,
    }
    (folder / f"{number}-{rank}.seen").write_text(json.dumps(seen))
    ray.train.report(seen, checkpoint=saved(number, folder / f"{number}-{rank}") if rank == 0 else None)
    ray_ranks.allreduce("reported")  # Ray drops a report of rank 0 that comes after an error
    if number == 1 and rank == 1:
        ray_ranks.fail()
    if number == 1:
        error = ray_ranks.lost()
        (folder / f"{rank}.told").write_text(str(error))
        raise error


def test_a_group_that_fails_and_is_started_again(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint, with as many workers of a range as there is room for, and shards of the data dealt anew."""
    from horovod.ray.train import HorovodConfig

    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    scaling = {**PAIR, "num_workers": (1, 3)}
    training = fitted(group, tmp_path, 1, HorovodConfig(timeout_s=100), scaling, datasets=rows())
    result = training.result(DEADLINE_S)
    assert (result.metrics["size"], number_in(result.checkpoint)) == (2, 2)
    assert "its function raised ZeroDivisionError: out of coffee" in (tmp_path / "0.told").read_text()
    for number in (1, 2):
        workers = [json.loads((tmp_path / f"{number}-{rank}.seen").read_text()) for rank in range(2)]
        read = [row for one in workers for row in one["rows"]]
        assert sorted(read) == list(range(ROWS)), "each row comes to one rank"
        for one in workers:
            environment = one["environment"]
            assert environment["HOROVOD_CYCLE_TIME"] == "2", "as in the environment of the driver"
            assert "SLURM_PROCID" not in environment, "unlike in that of Ray"
            visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
            assert sorted(visible) == ["0", "1", "2", "3"]
            assert visible[one["local"][0]] in one["gpus"], "the local rank is the number of an own GPU"


def replaced(config: dict[str, str]) -> None:
    """Six steps of two ranks. Rank 1 raises in the third, and the next process of that rank is killed in the fifth."""
    import ray.train

    from horovod.common import basics as hvd
    from horovod.common.elastic import ObjectState, run_fn
    from horovod.common.ops.objects import broadcast_object
    from horovod.common.process_sets import global_process_set as everyone

    hvd.init()
    folder, rank = Path(config["folder"]), hvd.rank()
    assert (rank, hvd.size()) == (ray.train.get_context().get_world_rank(), 2)
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    own = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
    assert (len(visible), visible[hvd.local_rank()] in own) == (4, True)
    (folder / f"{rank}-{os.getpid()}-started").touch()

    def loop(state: Any) -> None:
        while state.step < 6:
            for step, end in ((2, ray_ranks.fail), (4, ray_ranks.kill)):
                if (state.step, rank) == (step, 1) and not (folder / f"ended-{step}").exists():
                    (folder / f"ended-{step}").touch()
                    end()
            try:
                state.total += ray_ranks.allreduce("step")
            except RuntimeError as error:
                (folder / f"{rank}-{state.step}.told").write_text(str(error))
                raise
            state.step += 1
            state.commit()
            told = {"step": state.step, "total": state.total}
            ray.train.report(
                told, checkpoint=saved(state.step, folder / f"saved-{os.getpid()}-{state.step}") if rank == 0 else None
            )

    def send(value: Any, root_rank: int = 0) -> Any:
        return broadcast_object(value, root_rank, None, everyone)

    run_fn(loop, hvd.join_again)(ObjectState(send, hvd.rank, step=0, total=0.0))
    (folder / f"{rank}-{os.getpid()}-done").touch()


def test_workers_that_are_replaced_alone(cluster: Cluster, tmp_path: Path) -> None:
    """The other one keeps its process, and goes on from its last commit."""
    from horovod.ray.train import HorovodConfig

    training = fitted(replaced, tmp_path, 2, HorovodConfig(min_workers=2, timeout_s=100), PAIR)
    result = training.result(DEADLINE_S)
    assert (result.metrics["step"], result.metrics["total"], number_in(result.checkpoint)) == (6, 12.0, 6)
    started = sorted(path.name.removesuffix("-started") for path in tmp_path.glob("*-started"))
    done = sorted(path.name.removesuffix("-done") for path in tmp_path.glob("*-done"))
    assert [name.partition("-")[0] for name in started] == ["0", "1", "1", "1"]
    assert [name.partition("-")[0] for name in done] == ["0", "1"]
    assert set(done) < set(started)
    assert "its function raised ZeroDivisionError: out of coffee" in (tmp_path / "0-2.told").read_text()
    assert re.search(ends_with(OperationCode.PEER_LOST, "rank 1 (pid "), (tmp_path / "0-4.told").read_text())


def test_what_can_not_be_replaced_alone(cluster: Cluster, tmp_path: Path) -> None:
    from horovod.ray.train import HorovodConfig

    alone = {"num_workers": 1}
    training = fitted(replaced, tmp_path, 0, HorovodConfig(min_workers=1), alone, datasets=rows())
    with pytest.raises(Exception, match=ends_with(LaunchCode.CONFLICTING_OPTIONS, "datasets=", "min_workers")):
        raise training.exception(DEADLINE_S)
