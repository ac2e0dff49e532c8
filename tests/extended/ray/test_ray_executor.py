"""RayExecutor with a fixed number of workers, on one node of a real Ray."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import ray_ranks
from error_codes import ends_with
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from resources import eventually

from horovod.base.errors import LaunchCode
from horovod.ray import RayExecutor, ray_logger

Make = Callable[..., RayExecutor]
pytestmark = pytest.mark.usefixtures("one_node")


def test_results_come_by_rank(pair: RayExecutor) -> None:
    first = pair.run(ray_ranks.place, args=[None])
    assert [one["rank"] for one in first] == [0, 1]
    assert [one["local"] for one in first] == [(0, 2), (1, 2)]
    assert {(one["size"], one["sum"], one["host"]) for one in first} == {(2, 1.0, socket.gethostname())}
    again = ray.get(pair.run_remote(ray_ranks.place, kwargs={"value": "x"}))
    assert [one | {"value": None} for one in again] == first, "the same processes in the same world"
    assert {one["value"] for one in again} == {"x"}
    assert ray.get(pair.run_remote(lambda nothing: nothing, args=[None])) == [None, None]


def test_an_object_on_each_rank(pair: RayExecutor) -> None:
    assert pair.execute(lambda one: one.own) == ["4", "4"]
    assert pair.execute(lambda one: one.advance()) == [10.0, 10.0]
    assert pair.execute(lambda one: one.advance()) == [14.0, 14.0]
    assert pair.execute_single(lambda one: one.count) == 7


def test_what_ranks_log_comes_to_the_driver(pair: RayExecutor) -> None:
    def log(count: int) -> None:
        for number in range(count):
            ray_logger.log({"number": number})

    heard: list[int] = []
    pair.run(log, args=[5], callbacks=[lambda info: heard.append(info["number"])])
    assert sorted(heard) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    pair.execute(lambda _: log(1), callbacks=[lambda info: heard.append(-1)])
    assert heard[10:] == [-1, -1]


def test_gpus_of_a_host(pair: RayExecutor) -> None:
    seen = [one["CUDA_VISIBLE_DEVICES"].split(",") for one in pair.run(ray_ranks.environment)]
    assert seen[0] == seen[1]
    assert sorted(seen[0]) == ["0", "1", "2", "3"]
    own = ray.get([worker.get_gpu_ids.remote() for worker in pair.adapter.workers])
    assert [seen[0][rank] in own[rank] for rank in range(2)] == [True, True]


def test_settings_are_those_of_the_driver(pair: RayExecutor) -> None:
    """And not those of the process that has started Ray."""
    found = pair.run(ray_ranks.environment)
    assert [one["HOROVOD_RANK"] for one in found] == ["0", "1"]
    assert {one["HOROVOD_CYCLE_TIME"] for one in found} == {"2"}
    assert not (ray_ranks.INHERITED.keys() - {"HOROVOD_RANK"}) & found[0].keys()


def test_it_is_started_once_at_a_time(pair: RayExecutor) -> None:
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.WORKERS_NOT_STARTED, "shutdown()")):
        pair.start()


def states() -> list[str]:
    """Of all placement groups."""
    return [group["state"] for group in placement_group_table().values()]


def test_too_few_resources(executor: Make) -> None:
    running = executor(num_workers=9, placement_group_timeout_s=0.5)
    with pytest.raises(TimeoutError, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, "9 CPU", "3 CPU missing")):
        running.start()
    running.shutdown()
    assert not hasattr(running, "adapter")
    # Ray removes a group a moment after it was asked to.
    assert eventually(lambda: states().count("REMOVED") >= 1 and "PENDING" not in states())


def is_free() -> bool:
    """Nothing holds a seat: the workers and the placement group of an executor that had seats are gone."""
    return bool(ray.available_resources().get("seat") == ray_ranks.SEATS)


def test_a_block_starts_and_ends_workers_that_have_what_they_ask_for(executor: Make) -> None:
    needs = {"resources_per_worker": {"seat": 1.5}, "label_selector": {"room": "in(large,huge)"}}
    with executor(num_workers=2, **needs) as running:
        assert [one["rank"] for one in running.run(ray_ranks.place)] == [0, 1]
        assert not is_free()
        assert {one["seat"] for one in running.run(lambda: ray.get_runtime_context().get_assigned_resources())} == {1.5}
    assert eventually(is_free)
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.WORKERS_NOT_STARTED)):
        running.run(ray_ranks.place)
    seats = executor(num_workers=4, resources_per_worker={"seat": 1}, placement_group_timeout_s=0.2)
    with pytest.raises(TimeoutError, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, "4 seat", "1 seat missing")):
        seats.start()
    labelled = executor(num_workers=1, label_selector={"room": "small"}, placement_group_timeout_s=0.2)
    with pytest.raises(TimeoutError, match=ends_with(LaunchCode.TOO_FEW_RESOURCES, "room=small")):
        labelled.start()


def test_workers_end_with_an_executor_that_nobody_holds() -> None:
    def started() -> list[Any]:
        settings = RayExecutor.create_settings(timeout_s=120, placement_group_timeout_s=120)
        running = RayExecutor(settings, num_workers=2, resources_per_worker={"seat": 1.5})
        running.start()
        return running.run_remote(ray_ranks.place)

    refs = started()
    gc.collect()
    assert [one["rank"] for one in ray.get(refs)] == [0, 1], "not before it has ended"
    assert eventually(is_free)


def test_a_lost_worker_is_a_failure_of_which_there_may_be_some(executor: Make, tmp_path: Path) -> None:
    def train(dies: int) -> tuple[int, str]:
        """Rank 1 dies in the first calls."""
        place = ray_ranks.place()
        lives = len(list(tmp_path.glob("life-*")))
        ray_ranks.allreduce("counted")
        if place["rank"] == 1 and lives < dies:
            (tmp_path / f"life-{lives}").touch()
            ray_ranks.kill()
        ray_ranks.allreduce("trained")
        return place["pid"], os.environ["OWN_VARIABLE"]

    running = executor(num_workers=2, max_failures=2)
    running.start(extra_env_vars={"OWN_VARIABLE": "kept"})
    before = running.run(os.getpid)
    results = running.run(train, args=[2])
    assert [own for _, own in results] == ["kept", "kept"]
    assert {pid for pid, _ in results}.isdisjoint(before)
    with pytest.raises(ZeroDivisionError):  # what the function raises, it raises again
        running.run(ray_ranks.fail)
    with pytest.raises(RayActorError):
        running.run(train, args=[9])
    assert len(list(tmp_path.glob("life-*"))) == 5


def test_the_placement_group_of_the_caller() -> None:
    """In a task, as a trial of Ray Tune is one, and in an actor."""
    group = placement_group([{"CPU": 1.5}])
    place = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)

    def trial(workers: int, patience_s: float, **arguments: Any) -> tuple[bool, int]:
        settings = RayExecutor.create_settings(placement_group_timeout_s=patience_s)
        running = RayExecutor(settings, num_workers=workers, **arguments)
        running.start()
        try:
            created = running.adapter.strategy._created_placement_group
            return created, running.run(ray_ranks.place)[0]["size"]
        finally:
            running.shutdown()

    class Trial:
        def run(self, *arguments: Any, **others: Any) -> tuple[bool, int]:
            return trial(*arguments, **others)

    started = ray.remote(num_cpus=0.5, scheduling_strategy=place)
    task = started(trial)
    late = rf"of 2 workers did not start .* \[{LaunchCode.WORKERS_LATE}\]"
    try:
        assert ray.get(task.remote(1, 60)) == (False, 1)
        actor = started(Trial).remote()
        assert ray.get(actor.run.remote(1, 60)) == (False, 1)
        assert ray.get(actor.run.remote(1, 60, use_current_placement_group=False)) == (True, 1)
        ray.kill(actor)
        with pytest.raises(TimeoutError, match=late):
            ray.get(task.remote(2, 0.5))
    finally:
        remove_placement_group(group)
