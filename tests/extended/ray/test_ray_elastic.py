"""Elastic executors on invented hosts: they exist as Ray's resources "node:host-1", and all are this machine."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray_ranks
from error_codes import ends_with
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_starts import started
from resources import eventually

from horovod.base.errors import LaunchCode
from horovod.ray import RayExecutor
from horovod.ray.adapter import BaseParams
from horovod.ray.cluster import ResourceRequests
from horovod.ray.elastic import ElasticRayExecutor
from horovod.runner.elastic import driver
from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery

PATIENCE_S = 120  # for an event; it comes in seconds
pytestmark = [pytest.mark.usefixtures("hosts"), pytest.mark.timeout(240)]

Logged = dict[str, Any]


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    invented = {f"node:host-{number}": 1.0 for number in (1, 2, 3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.1)
        size = {"num_cpus": 6, "num_gpus": 4, "resources": invented}
        started(lambda: ray.init("local", **size, include_dashboard=False, log_to_driver=False))
        yield
    ray.shutdown()


@pytest.fixture
def elastic() -> Iterator[Callable[..., RayExecutor]]:
    """Makes executors on the hosts that a discovery finds, and shuts them down when the test is over."""
    made: list[RayExecutor] = []

    def make(found: HostDiscovery | dict[str, int], **arguments: Any) -> RayExecutor:
        settings = RayExecutor.create_settings(timeout_s=PATIENCE_S)
        settings.discovery = found if isinstance(found, HostDiscovery) else FixedHosts(found)  # type: ignore[attr-defined]
        made.append(RayExecutor(settings, override_discovery=False, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


class Training:
    """Runs until `stop`; acts on what ranks log."""

    def __init__(self, executor: Any, folder: Path, act: Callable[[Training, Logged], None]) -> None:
        self._stop = folder / "stop"
        self._executor, self._act = executor, act
        self.logged: list[Logged] = []

    def run(self) -> list[Any]:
        return self._executor.run(ray_ranks.train_until, args=[str(self._stop)], callbacks=[self._take])

    def stop(self) -> None:
        self._stop.touch()

    def _take(self, logged: Logged) -> None:
        self.logged.append(logged)
        self._act(self, logged)

    def pids(self, epoch: int) -> dict[int, int]:
        """Of the world of that epoch, by rank."""
        return {one["rank"]: one["pid"] for one in self.logged if one["epoch"] == epoch}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_survivors_go_on_in_their_actors_and_a_host_comes_back_after_its_cooldown(
    elastic: Callable[..., RayExecutor], tmp_path: Path
) -> None:
    killed: list[Logged] = []

    def act(training: Training, logged: Logged) -> None:
        if not killed and logged["size"] == 2 and logged["rank"] == 1:
            killed.append(logged)
            kill(logged["pid"])
        elif killed and logged["size"] == 2 and logged["epoch"] > killed[0]["epoch"] + 1:
            training.stop()

    executor = elastic({"host-1": 1, "host-2": 1}, min_workers=1, max_workers=2, cooldown_range=(1, 1))
    executor.start()
    training = Training(executor, tmp_path, act)
    results = training.run()
    whole = killed[0]["epoch"]  # there is one before it where an actor comes very late
    first, alone, last = (training.pids(epoch) for epoch in range(whole, whole + 3))
    assert killed[0]["host"] == "host-2"
    assert alone == {0: first[0]}, "the survivor keeps its process"
    assert last == {0: first[0], 1: results[1]["pid"]}
    assert results[1]["pid"] != first[1]
    assert [(one["rank"], one["size"]) for one in results] == [(0, 2), (1, 2)]
    assert results[0]["batch"] == results[1]["batch"] > killed[0]["batch"]


def test_a_spare_takes_the_place_and_the_reset_limit_ends_the_job(
    elastic: Callable[..., RayExecutor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = elastic({"host-1": 1, "host-2": 1, "host-3": 1}, min_workers=1, max_workers=2, reset_limit=1, spares=1)
    killed: list[Logged] = []

    def act(training: Training, logged: Logged) -> None:
        slots = [executor.driver.get_slot_info(f"host-{number}", 0) for number in (1, 2, 3)]
        is_there = all(one.pid for one in slots)
        is_next = not killed or (len(killed) == 1 and logged["epoch"] > killed[0]["epoch"])
        if is_next and logged["size"] == 2 and logged["rank"] == len(killed) and (killed or is_there):
            killed.append(logged)
            if len(killed) == 1:
                (tmp_path / f"stop-{logged['pid']}").touch()
            else:
                kill(logged["pid"])

    executor.start()
    training = Training(executor, tmp_path, act)
    facts = "exceeded limit: 1", "ZeroDivisionError: out of coffee"
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RESET_LIMIT, *facts)) as raised:
        training.run()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    (where,) = raised.value.__cause__.__notes__
    assert re.search(r'File ".*ray_ranks.py", line \d+, in fail', where)
    assert where in caplog.text
    assert killed[1]["size"] == 2, "the spare was in the next world"
    executor.shutdown()
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.WORKERS_NOT_STARTED, "start()")):
        executor.run(ray_ranks.place)


class Schedule(HostDiscovery):
    """The next hosts each time all slots of those before have a worker that can be told of changes."""

    def __init__(self, *steps: dict[str, int]) -> None:
        self._steps = list(steps)
        self.executor: Any = None
        self.is_over = threading.Event()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        if len(self._steps) > 1 and self._all_train():
            self._steps.pop(0)
        elif len(self._steps) == 1:
            self.is_over.set()
        return self._steps[0]

    def _all_train(self) -> bool:
        view = self.executor.driver
        wanted = [(host, slot) for host, slots in self._steps[0].items() for slot in range(slots)]
        infos = [view.get_slot_info(host, slot) for host, slot in wanted]
        return all(info.hostname and view.get_worker_client(info) for info in infos)


def test_hosts_come_and_go(tmp_path: Path) -> None:
    """Those that go leave at a commit: no step of the others fails."""
    schedule = Schedule({"host-1": 2}, {"host-1": 2, "host-2": 1, "host-3": 1}, {"host-2": 1})
    settings = ElasticRayExecutor.create_settings(min_num_proc=1, timeout_s=PATIENCE_S, discovery=schedule)
    executor = schedule.executor = ElasticRayExecutor(
        settings, override_discovery=False, env_vars={"OWN_VARIABLE": "1"}
    )
    executor.start()

    def act(training: Training, logged: Logged) -> None:
        if logged["size"] == 1 and schedule.is_over.is_set():
            training.stop()

    training = Training(executor, tmp_path, act)
    training.run = lambda: executor.run(  # type: ignore[method-assign]
        lambda stop=str(tmp_path / "stop"): ray_ranks.train_until(stop), callbacks=[training._take]
    )
    try:
        (result,) = training.run()
    finally:
        executor.shutdown()
    assert len({one["pid"] for one in training.logged}) == 4
    assert (result["size"], result["rank"]) == (1, 0)
    assert training.logged[-1]["host"] == "host-2"
    steps = [one["batch"] for one in training.logged if one["pid"] == result["pid"]]
    assert steps == list(range(steps[0], steps[0] + len(steps))), "no step was taken twice"


def test_an_executor_in_a_trial() -> None:
    """Its actors are not in the placement group of the trial, which has a piece of no host."""
    group = placement_group([{"CPU": 1}])

    def trial() -> tuple[float, dict[str, Any]]:
        settings = RayExecutor.create_settings(placement_group_timeout_s=PATIENCE_S)
        settings.discovery = FixedHosts({"host-2": 1})  # type: ignore[attr-defined]
        running = RayExecutor(settings, min_workers=1, override_discovery=False)
        running.start(ray_ranks.Stateful, executable_args=[3])
        try:
            (found,) = running.execute(lambda one: (one.advance(), ray_ranks.place()))
            return found
        finally:
            running.shutdown()

    place = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    try:
        count, seen = ray.get(ray.remote(num_cpus=1, scheduling_strategy=place)(trial).remote())
        assert (count, seen["size"], seen["host"]) == (4.0, 1, "host-2")
    finally:
        remove_placement_group(group)


def test_a_worker_without_a_place_costs_a_slot_and_not_the_host(
    elastic: Callable[..., RayExecutor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others use two of the six processors. Those that have their places have the right GPUs, and train."""
    others = placement_group([{"CPU": 2}])
    assert others.wait(PATIENCE_S)
    executor = elastic({"host-1": 3}, min_workers=2, max_workers=3, cpus_per_worker=2, use_gpu=True)
    executor.start(extra_env_vars={"HOROVOD_ELASTIC_SETTLE_SECONDS": "0.1"})
    stop = str(tmp_path / "stop")
    heard: list[Logged] = []

    def act(logged: Logged) -> None:
        heard.append(logged)
        agent = executor.adapter._call.agents.all.get("host-1")
        if agent is None:  # the job is over
            return
        if len(heard) == 1:  # the third has waited for long enough
            late = next(one for one in agent.processes if not one.pid)
            executor.adapter._loop.call_soon_threadsafe(agent._has_no_place, late)
        elif agent.slots == 2 and [one.code for one in agent.processes].count(None) == 2:
            (tmp_path / "stop").touch()

    try:
        results = executor.run(lambda: (ray_ranks.train_until(stop), ray_ranks.gpus()), callbacks=[act])
    finally:
        remove_placement_group(others)
    assert {one["size"] for one in heard} == {2}
    assert re.search(rf"host-1 .* 2 slots there from now on.* \[{LaunchCode.WORKERS_LATE}\]", caplog.text)
    assert [result["rank"] for result, _ in results] == [0, 1]
    assert [[gpu] for _, (gpu, _) in results] == [own for _, (_, own) in results]


def test_too_few_hosts_and_shutdown_in_the_middle(elastic: Callable[..., RayExecutor], tmp_path: Path) -> None:
    executor = elastic({"host-1": 1}, min_workers=2, elastic_timeout=1)
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.DISCOVERY_FAILED, "needs 2 slots", "elastic_timeout")):
        executor.start()
    assert not hasattr(executor, "adapter")

    executor = elastic({"host-1": 1}, min_workers=1)
    executor.start()
    training = Training(executor, tmp_path, lambda training, logged: executor.shutdown())
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.WORKERS_NOT_STARTED, "shutdown() was called")):
        training.run()
    assert eventually(lambda: not psutil.pid_exists(training.logged[0]["pid"]))
    assert "horovod-ray-elastic" not in {thread.name for thread in threading.enumerate()}


def test_the_autoscaler_is_asked_for_what_is_missing() -> None:
    """By placement groups that wait, for as long as the cluster has no room."""
    executor = RayExecutor(RayExecutor.create_settings(), min_workers=8, cpus_per_worker=1, elastic_timeout=8)
    waiting: list[int] = []

    def states() -> list[str]:
        return [group["state"] for group in placement_group_table().values()]

    def watch() -> None:
        assert eventually(lambda: states().count("PENDING") == 2)
        waiting.append(2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.DISCOVERY_FAILED, "only 6 are")):
        executor.start()
    watcher.join()
    assert waiting == [2]
    here = ray.util.get_node_ip_address()
    requests = ResourceRequests(BaseParams(), workers=1, slots=lambda: 0, aside=lambda: [here])
    requests._look()
    requests._look()
    assert eventually(lambda: states().count("PENDING") == 1), "room on a host that is set aside is none"
    requests._keep(0)
    assert eventually(lambda: set(states()) == {"REMOVED"})
