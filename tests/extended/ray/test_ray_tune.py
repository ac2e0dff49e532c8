"""Trials of Ray Tune with two ranks each, side by side on one node of a real Ray."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray_ranks
from error_codes import ends_with
from ray.util.placement_group import placement_group_table
from resources import eventually

from horovod.base.errors import LaunchCode

pytestmark = [
    pytest.mark.usefixtures("one_node"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="ray.tune needs pandas"),
]
LONGEST = 4


def train(config: Mapping[str, Any]) -> None:
    """The better its number, the longer a trial runs; the best one fails once, after two results."""
    from horovod.common import basics as hvd
    from horovod.ray import tune

    place = ray_ranks.place()
    folder = Path(config["folder"])
    (folder / f"{place['pid']}.pid").touch()
    checkpoint = tune.get_checkpoint()
    done = int((Path(checkpoint.path) / "deep" / "done").read_text()) if checkpoint is not None else 0
    while True:
        done += 1
        score = ray_ranks.allreduce("score", float(config["number"]))
        if config["number"] == 2 and done == 3 and hvd.rank() == 1 and not (folder / "failed").exists():
            (folder / "failed").touch()
            ray_ranks.fail()
        own = folder / f"{place['pid']}-{done}" / "deep"
        own.mkdir(parents=True)
        (own / "done").write_text(str(done))
        told = {"score": score, "done_steps": done, "size": hvd.size(), "resumed": checkpoint is not None}
        tune.report(told if hvd.rank() == 0 else {"score": -1}, checkpoint=own.parent)


def nothing_is_left(folder: Path) -> bool:
    alive = [path.stem for path in folder.glob("*.pid") if psutil.pid_exists(int(path.stem))]
    return not alive and {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


def test_trials_that_are_stopped_leave_nothing(tmp_path: Path) -> None:
    from ray.tune.schedulers import ASHAScheduler

    from horovod.ray.tune import trainable

    ray.cloudpickle.register_pickle_by_value(__import__(__name__))
    tuner = ray.tune.Tuner(
        trainable(train, num_workers=2),
        param_space={"number": ray.tune.grid_search([2, 1, 0]), "folder": str(tmp_path)},
        tune_config=ray.tune.TuneConfig(
            metric="score",
            mode="max",
            scheduler=ASHAScheduler(max_t=LONGEST, grace_period=1, reduction_factor=2),
        ),
        run_config=ray.tune.RunConfig(
            storage_path=str(tmp_path / "results"),
            failure_config=ray.tune.FailureConfig(max_failures=1),
            verbose=0,
        ),
    )
    results = tuner.fit()
    assert not results.errors
    by_number = {result.config["number"]: result for result in results}
    best = results.get_best_result().metrics
    assert best == by_number[2].metrics
    # The sum over both ranks, from rank 0 alone.
    assert {number: result.metrics["score"] for number, result in by_number.items()} == {2: 4.0, 1: 2.0, 0: 0.0}
    assert {result.metrics["size"] for result in results} == {2}
    assert (best["done_steps"], best["resumed"]) == (LONGEST, True)
    checkpoint = by_number[2].checkpoint
    assert (Path(checkpoint.path) / "deep" / "done").read_text() == str(LONGEST)
    assert len(list(tmp_path.glob("*.pid"))) >= 8  # two for each trial, and again for the one that failed
    assert eventually(lambda: nothing_is_left(tmp_path))


def test_the_next_rank_removes_the_folder_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.ray.tune import _OwnFolder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    of_killed = Path(tempfile.mkdtemp(prefix="horovod-ray-tune-"))
    just_made = Path(tempfile.mkdtemp(prefix="horovod-ray-tune-"))
    of_other = Path(tempfile.mkdtemp(prefix="other-"))
    in_use = _OwnFolder()
    for folder in (of_killed, Path(in_use.name), of_other):
        os.utime(folder, (0, 0))
    own = _OwnFolder()
    assert {*tmp_path.iterdir()} == {just_made, of_other, Path(in_use.name), Path(own.name)}
    in_use.cleanup()
    own.cleanup()
    assert {*tmp_path.iterdir()} == {just_made, of_other}


def test_outside_of_a_trial() -> None:
    from horovod.ray import tune

    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.WORKERS_NOT_STARTED, "report()")):
        tune.report({})
    with pytest.raises(ValueError, match=ends_with(LaunchCode.CONFLICTING_OPTIONS, "use_gpu")):
        tune.trainable(train, num_workers=1, gpus_per_worker=1)
    assert os.environ.get("HOROVOD_RANK") is None
