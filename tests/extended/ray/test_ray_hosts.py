"""Which hosts Ray has, what an elastic executor refuses, and whose results count: without any Ray cluster."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from error_codes import ends_with

pytest.importorskip("ray")

import ray

from horovod.base.errors import ClusterCode, LaunchCode, SettingCode
from horovod.protos.v1.jobs_pb2 import JobRecord
from horovod.ray import RayExecutor, elastic, elastic_v2
from horovod.ray.coordinator import gpus_of_elastic
from horovod.ray.worker import BaseHorovodWorker, Trained
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.util.network import get_driver_ip

SETTINGS = RayExecutor.create_settings()


def nodes(*found: tuple[str, dict[str, float]]) -> Any:
    return [{"NodeManagerAddress": name, "Resources": resources, "alive": True} for name, resources in found]


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        ({}, {"a": 4, "b": 9}),
        ({"cpus_per_slot": 4}, {"a": 1, "b": 2}),
        ({"use_gpu": True, "gpus_per_slot": 2}, {"b": 1}),
    ],
)
def test_slots_of_nodes(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], slots: dict[str, int]) -> None:
    """Two nodes of one address are one host, and a dead one is none. An iterator is passed through once."""
    alive = nodes(("a", {"CPU": 4, "GPU": 1}), ("b", {"CPU": 8, "GPU": 3}), ("b", {"CPU": 1}), ("c", {"memory": 1}))
    dead = [one | {"alive": False} for one in nodes(("d", {"CPU": 64, "GPU": 8}))]
    monkeypatch.setattr(ray, "nodes", lambda: iter(alive + dead))
    assert elastic.RayHostDiscovery(**arguments).find_available_hosts_and_slots() == slots
    newer = {name.replace("slot", "worker"): value for name, value in arguments.items()}
    assert elastic_v2.RayHostDiscovery(**newer).find_available_hosts_and_slots() == slots


@pytest.mark.parametrize("module", [elastic, elastic_v2])
def test_hosts_that_change_at_random(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes(*((name, {"CPU": 2.0}) for name in "abcd")))
    discovery = module.TestDiscovery(min_hosts=1, max_hosts=3, change_frequency_s=0)
    before = discovery.find_available_hosts_and_slots()
    sizes = set()
    for _ in range(200):
        found = discovery.find_available_hosts_and_slots()
        assert len(set(found) ^ set(before)) <= 1
        sizes.add(len(found))
        before = found
    assert sizes == {1, 2, 3}


@pytest.mark.parametrize("module", [elastic, elastic_v2])
def test_arguments_of_test_discoveries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes(("a", {"CPU": 4.0, "GPU": 2.0})))
    caplog.set_level(logging.INFO)
    quiet = module.TestDiscovery(1, 1, 60, use_gpu=True, cpus_per_slot=1, gpus_per_slot=2, verbose=False)
    assert quiet.find_available_hosts_and_slots() == {"a": 1}
    assert not caplog.records
    with pytest.warns(UserWarning, match=ends_with(SettingCode.UNSUPPORTED)):
        told = module.TestDiscovery(1, 1, 60, cpus_per_slot=2, _graceful=False)
    assert told.find_available_hosts_and_slots() == {"a": 2}
    assert told.find_available_hosts_and_slots() == {"a": 2}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"max_workers": 1}, LaunchCode.CONFLICTING_OPTIONS),
        ({"num_hosts": 1}, LaunchCode.CONFLICTING_OPTIONS),
        ({"override_discovery": False}, LaunchCode.CONFLICTING_OPTIONS),
        ({"cooldown_range": (5, 1)}, SettingCode.INVALID_SETTING),
        ({"reset_limit": -1}, SettingCode.INVALID_SETTING),
        ({"spares": -1}, SettingCode.INVALID_SETTING),
    ],
)
def test_arguments_of_elastic_executors(arguments: dict[str, Any], code: LaunchCode | SettingCode) -> None:
    with pytest.raises(ValueError, match=ends_with(code)):
        RayExecutor(SETTINGS, min_workers=2, **arguments)


def test_settings_of_elastic_executors() -> None:
    with pytest.warns(DeprecationWarning, match="min_np is deprecated, use min_num_proc"):
        settings = elastic.ElasticRayExecutor.create_settings(min_np=3, max_num_proc=4, discovery=FixedHosts({"a": 3}))
    params = elastic.ElasticRayExecutor(settings, override_discovery=False)._executor.params
    assert isinstance(params, elastic_v2.ElasticParams)
    assert (params.min_workers, params.max_workers, params.override_discovery) == (3, 4, False)
    with pytest.raises(ValueError, match=ends_with(LaunchCode.CONFLICTING_OPTIONS, "use_gpu")):
        elastic.ElasticRayExecutor(settings, gpus_per_slot=1)


def test_what_an_elastic_executor_can_not_do() -> None:
    adapter = elastic_v2.ElasticAdapter(SETTINGS, elastic_v2.ElasticParams(), {})
    for call in (adapter.run_remote, adapter.execute_single):
        with pytest.raises(NotImplementedError, match=ends_with(LaunchCode.UNSUPPORTED_OPTION)):
            call(print)
    assert not adapter.driver.get_slot_info("a", 0).hostname
    assert adapter.driver.get_worker_client(adapter.driver.get_slot_info("a", 0)) is None


def test_whose_results_count() -> None:
    """Those of the last world, by rank; not those of processes that had left the job or came too late."""
    ended = [Trained(0, 1, 0, 2, "old"), Trained(143), Trained(0, 2, 1, 2, "b"), Trained(0)]
    assert not elastic_v2._is_complete(ended)
    ended.append(Trained(0, 2, 0, 2, "a"))
    assert elastic_v2._is_complete(ended)
    assert elastic_v2._results(ended) == ["a", "b"]
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.RANK_FAILED, "sys.exit")):
        elastic_v2._results([Trained(0)])


def test_why_a_job_failed() -> None:
    record = JobRecord(sentence="Each host of the job has failed. [too-few-processes]")
    error = elastic_v2._failure(record, [KeyError("first"), ValueError("second")])
    assert re.search(ends_with(ClusterCode.TOO_FEW_PROCESSES, "Each host", "ValueError: second"), str(error))
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (143, 143), ("no", 1)])
def test_an_exit_is_the_end_of_one_rank(monkeypatch: pytest.MonkeyPatch, code: Any, expected: int) -> None:
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_HOSTNAME"):
        monkeypatch.setenv(name, "")

    def leave(_: object) -> None:
        raise SystemExit(code)

    assert BaseHorovodWorker().train(leave) == Trained(expected)


def test_the_gpu_of_a_worker_that_comes_later() -> None:
    assert gpus_of_elastic(["3"], [["0"], ["1"]], 0) == ["3", "0", "1"]
    assert gpus_of_elastic(["4", "5"], [["0", "1"], ["2", "3"]], 2)[2] in ("4", "5")
    assert gpus_of_elastic([], [], 0) == []


def test_the_address_of_the_driver() -> None:
    assert get_driver_ip()
