"""Trials of Ray Tune with two ranks each, side by side on one node of a real Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
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

from horovod.base.errors import LaunchCode, SettingCode

pytestmark = [
    pytest.mark.usefixtures("one_node"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="ray.tune needs pandas"),
]
LONGEST = 4
SIDE_BY_SIDE = 2
DEADLINE_S = 200


def train(config: Mapping[str, Any]) -> None:
    """The better its number, the longer a trial runs. The best one fails after two results, as a file says, and again.
    None begins to train before there are two."""
    from horovod.common import basics as hvd
    from horovod.ray import tune

    place = ray_ranks.place()
    folder, number = Path(config["folder"]), int(config["number"])
    (folder / f"{number}.coordinator-{os.environ['HOROVOD_COORDINATOR'].replace('/', '_')}").touch()
    checkpoint = ray.tune.get_checkpoint()
    done = int((Path(checkpoint.path) / "deep" / "done").read_text()) if checkpoint is not None else 0
    first, ways = done + 1, folder / "ways"
    assert eventually(lambda: len({*folder.glob("*.coordinator-*")}) >= SIDE_BY_SIDE, DEADLINE_S)
    while True:
        done += 1
        # Before the allreduce, so that rank 0 has no third result.
        if number == 2 and done == 3 and hvd.rank() == 1 and (left := ways.read_text().split()):
            ways.write_text(" ".join(left[1:]))
            if left[0] == "raises":
                ray_ranks.fail()
            os.kill(_trial(), signal.SIGKILL)
        score = ray_ranks.allreduce("score", float(number))
        own = folder / f"{place['pid']}-{done}" / "deep"
        own.mkdir(parents=True)
        (own / "done").write_text(str(done))
        told = {"score": score, "done_steps": done, "size": hvd.size(), "first": first}
        told = told if hvd.rank() == 0 else {"score": -1}
        if done % 2:
            tune.report(told, checkpoint=own.parent)
        else:
            ray.tune.report(told, checkpoint=ray.tune.Checkpoint.from_directory(own.parent))


def _trial() -> int:
    """The process of this rank's trial, which is where the coordinator listens."""
    port = int(os.environ["HOROVOD_COORDINATOR"].rpartition(":")[2])
    listening = (one for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port)
    return int(next(listening).pid)


def nothing_is_left() -> bool:
    """Neither an actor (of workers, of the queue for reports, of the trial itself) nor a placement group."""
    titles = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            titles += process.cmdline()[:1]
    alive = [
        title
        for title in titles
        if title.startswith(("ray::BaseHorovodWorker", "ray::_QueueActor", "ray::ResourceTrainable"))
    ]
    return not alive and {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


def test_trials_side_by_side_that_fail_and_are_stopped(tmp_path: Path) -> None:
    """One trial fails twice, and goes on from its checkpoint: by FailureConfig, and by Tuner.restore."""
    from ray.tune.schedulers import ASHAScheduler

    from horovod.ray import RayExecutor
    from horovod.ray.tune import trainable

    for module in (__name__, eventually.__module__):
        ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    (tmp_path / "ways").write_text("killed raises")
    made = trainable(train, num_workers=2, settings=RayExecutor.create_settings(timeout_s=DEADLINE_S))
    tuner = ray.tune.Tuner(
        made,
        param_space={"number": ray.tune.grid_search([2, 1, 0]), "folder": str(tmp_path)},
        tune_config=ray.tune.TuneConfig(
            metric="score",
            mode="max",
            scheduler=ASHAScheduler(max_t=LONGEST, grace_period=1, reduction_factor=2),
            max_concurrent_trials=SIDE_BY_SIDE,
            reuse_actors=True,  # the last trial has the process of one that was stopped
        ),
        run_config=ray.tune.RunConfig(
            name="trials",
            storage_path=str(tmp_path / "results"),
            failure_config=ray.tune.FailureConfig(max_failures=1),
            verbose=0,
        ),
    )
    results = tuner.fit()
    (error,) = results.errors
    assert "ZeroDivisionError" in str(error)
    assert "out of coffee" in str(error)
    results = ray.tune.Tuner.restore(str(tmp_path / "results" / "trials"), made, resume_errored=True).fit()
    assert not results.errors
    by_number = {result.config["number"]: result.metrics for result in results}
    # The sum over both ranks, from rank 0 alone.
    assert {number: metrics["score"] for number, metrics in by_number.items()} == {2: 4.0, 1: 2.0, 0: 0.0}
    assert {metrics["size"] for metrics in by_number.values()} == {2}
    best = results.get_best_result()
    assert best.metrics["done_steps"] == LONGEST
    assert 1 < best.metrics["first"] <= 3
    assert [by_number[number]["first"] for number in range(2)] == [1, 1]
    assert (Path(best.checkpoint.path) / "deep" / "done").read_text() == str(LONGEST)
    coordinators = [path.name.partition(".coordinator-")[2] for path in tmp_path.glob("*.coordinator-*")]
    assert len(coordinators) == len(set(coordinators)) == 5, "each run of a trial has its own"
    assert eventually(nothing_is_left)


def test_what_a_trial_returns_is_its_last_result(tmp_path: Path) -> None:
    from horovod.ray.tune import trainable

    def train(config: Mapping[str, Any]) -> Any:
        from horovod.common import basics as hvd
        from horovod.ray import tune

        hvd.init()
        if config["way"] == "dict":
            tune.report({"score": 1})
        ways = {"dict": {"score": 7, "rank": hvd.rank()}, "number": 5, "none": None, "wrong": [1]}
        return ways[config["way"]]

    tuner = ray.tune.Tuner(
        trainable(train, num_workers=1),
        param_space={"way": ray.tune.grid_search(["dict", "number", "none", "wrong"])},
        run_config=ray.tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = {result.config["way"]: result for result in tuner.fit()}
    assert (results["dict"].metrics["score"], results["dict"].metrics["rank"]) == (7, 0)
    assert results["dict"].metrics["training_iteration"] == 2
    assert results["number"].metrics["_metric"] == 5
    assert results["none"].error is None
    assert re.search(ends_with(SettingCode.INVALID_SETTING, "list"), str(results["wrong"].error), re.MULTILINE)


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
