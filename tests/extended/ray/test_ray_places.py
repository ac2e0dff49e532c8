"""Which rank is where, and which resources are missing: without any Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from error_codes import ends_with

pytest.importorskip("ray")

from horovod.base.errors import LaunchCode, SettingCode
from horovod.launch.job_environment import job_environment
from horovod.launch.own_coordinator import host_names
from horovod.ray import BaseHorovodWorker, ElasticRayExecutor, RayExecutor, ray_logger
from horovod.ray.coordinator import seated, visible_gpus
from horovod.ray.runner import Coordinator, MiniSettings
from horovod.ray.strategy import missing
from horovod.ray.utils import detect_nics, nics_to_env_var

SETTINGS = RayExecutor.create_settings()


def test_names_of_hosts_are_short_and_differ_by_node() -> None:
    assert host_names([("a" * 56, "gpu-1"), ("b" * 56, "gpu-2"), ("a" * 56, "gpu-1")]) == {
        "a" * 56: "gpu-1",
        "b" * 56: "gpu-2",
    }
    assert host_names([("aaaaab", "h"), ("aaaaac", "h"), ("cccccc", "h")]) == {
        "aaaaab": "h-aaaaab",
        "aaaaac": "h-aaaaac",
        "cccccc": "h-cccc",
    }


def test_ranks_go_node_by_node() -> None:
    seats = seated([("n1", "a"), ("n2", "b"), ("n1", "a")])
    assert [(seat.actor, seat.host, seat.place.local_rank, seat.place.cross_rank) for seat in seats] == [
        (0, "a", 0, 0),
        (2, "a", 1, 0),
        (1, "b", 0, 1),
    ]


def test_a_local_rank_indexes_its_gpu() -> None:
    assert visible_gpus([["0", "1"], ["2", "3"], ["6", "7"]]) == ["0", "2", "6", "1", "3", "7"]
    assert visible_gpus([[], []]) == []


def test_settings_of_the_driver_and_of_the_user() -> None:
    driver = {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_RANK": "3", "HOROVOD_TOKEN": "t", "HOROVOD_TLS_CA": "f", "HOME": "/"}
    found = job_environment(driver, {"HOROVOD_CYCLE_TIME": 3, "OWN": 1}, 20, ["eth0", "eth1"])
    assert found == {
        "HOROVOD_START_TIMEOUT": "20",
        "HOROVOD_NETWORK_INTERFACES": "eth0,eth1",
        "HOROVOD_CYCLE_TIME": "3",
        "OWN": "1",
    }
    assert job_environment({"HOROVOD_START_TIMEOUT": "9"}, {}, 20)["HOROVOD_START_TIMEOUT"] == "9"


@pytest.mark.parametrize(
    ("bundle", "count", "spread", "free", "facts"),
    [
        ({"CPU": 1, "GPU": 1}, 4, False, {"CPU": 6, "GPU": 1}, ["needs 4 CPU and 4 GPU", "3 GPU missing"]),
        ({"CPU": 1}, 5, False, {"CPU": 2}, ["needs 5 CPU", "2 CPU free", "others use 3 CPU"]),
        ({"CPU": 4}, 2, True, {"CPU": 6}, ["2 nodes with 4 CPU each", "1 of the cluster's 2 has that"]),
        ({"CPU": 3}, 2, False, {"CPU": 6}, ["needs 6 CPU, as 2 x 3 CPU", "no placement"]),
    ],
    ids=["too-few", "in-use", "too-small-nodes", "no-placement"],
)
def test_what_is_missing(
    bundle: dict[str, float], count: int, spread: bool, free: dict[str, float], facts: list[str]
) -> None:
    said = missing(bundle, count, spread, [{"CPU": 4, "GPU": 1}, {"CPU": 2}], free)
    assert all(fact in said for fact in facts), said


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        ({"max_workers": 2}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"max_workers": 2, "min_workers": 0}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"min_workers": 1, "num_workers": 1}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"num_workers": 1, "num_hosts": 1}, AssertionError, LaunchCode.CONFLICTING_OPTIONS),
        ({}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"num_workers": 1, "gpus_per_worker": 1}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_workers": 1, "cpus_per_worker": 0}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_workers": 1, "cpus_per_worker": -1, "use_gpu": True}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_workers": 1, "spares": 1}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0.5}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 1.5}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_workers": 1, "cpus_per_worker": "2"}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_workers": 1, "resources_per_worker": 5}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_workers": 1, "resources_per_worker": {"seat": 0}}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_workers": 1, "resources_per_worker": {"CPU": 2}}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"num_workers": 1, "label_selector": {"kind": 5}}, ValueError, SettingCode.INVALID_SETTING),
        ({"min_workers": 1, "label_selector": {"kind": "big"}}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"num_workers": 1, "max_failures": -1}, ValueError, SettingCode.INVALID_SETTING),
        ({"min_workers": 1, "max_failures": 1}, ValueError, LaunchCode.CONFLICTING_OPTIONS),
        ({"num_workers": 0}, ValueError, SettingCode.INVALID_SETTING),
        ({"num_hosts": 1, "num_workers_per_host": 1.5}, ValueError, SettingCode.INVALID_SETTING),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], kind: type[Exception], code: LaunchCode) -> None:
    with pytest.raises(kind, match=ends_with(code)):
        RayExecutor(SETTINGS, **arguments)  # type: ignore[arg-type]


def test_calls_that_make_no_sense_are_refused_before_anything_starts() -> None:
    elastic_settings = ElasticRayExecutor.create_settings()
    fixed: Any = RayExecutor(SETTINGS, num_workers=1)
    elastic: Any = ElasticRayExecutor(elastic_settings)
    calls: dict[str, Callable[[], Any]] = {
        "RayExecutor.create_settings": lambda: RayExecutor(None, num_workers=1),
        "ElasticRayExecutor.create_settings": lambda: ElasticRayExecutor(SETTINGS),
        "env_vars": lambda: ElasticRayExecutor(elastic_settings, env_vars=5),  # type: ignore[arg-type]
        "not 5": lambda: fixed.run(5),
        "not 6": lambda: fixed.run_remote(6),
        "not 7": lambda: fixed.execute(7),
        "not 8": lambda: fixed.execute_single(8),
        "not 9": lambda: elastic.run(9),
        "args": lambda: fixed.run(print, args=3),
        "'data'": lambda: fixed.run_remote(print, args="data"),
        "kwargs": lambda: fixed.run(print, kwargs=[1]),
        "callbacks": lambda: fixed.run(print, callbacks=5),
        "into a list": lambda: elastic.run(print, callbacks=print),
        "callbacks[1]": lambda: fixed.execute(print, callbacks=[print, None]),
        "executable_cls": lambda: fixed.start(3),
        "executable_args": lambda: fixed.start(dict, 3),
        "executable_kwargs": lambda: fixed.start(dict, None, 3),
        "extra_env_vars": lambda: fixed.start(extra_env_vars="A=1"),
    }
    for fact, call in calls.items():
        with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, fact)):
            call()
    with pytest.raises(ValueError, match=ends_with(LaunchCode.CONFLICTING_OPTIONS, "executable_cls")):
        fixed.start(executable_args=[1])
    assert not hasattr(fixed, "adapter")


def test_arguments_that_count_for_elastic_jobs_alone() -> None:
    with pytest.warns(UserWarning, match="min_workers.* use reset_limit and cooldown_range"):
        RayExecutor(SETTINGS, num_workers=1, reset_limit=1, cooldown_range=(1, 2))


def test_arguments_of_old_releases() -> None:
    with pytest.warns(DeprecationWarning, match="is deprecated, use") as warned:
        executor = RayExecutor(SETTINGS, num_hosts=2, num_slots=3, cpus_per_slot=4, use_gpu=True, gpus_per_slot=5)
    assert [str(one.message) for one in warned] == [
        "num_slots is deprecated, use num_workers_per_host.",
        "cpus_per_slot is deprecated, use cpus_per_worker.",
        "gpus_per_slot is deprecated, use gpus_per_worker.",
    ]
    params = executor.params
    assert (params.num_workers_per_host, params.cpus_per_worker, params.gpus_per_worker) == (3, 4, 5)
    with pytest.warns(DeprecationWarning, match="verbose is deprecated"):
        assert RayExecutor.create_settings(verbose=2).verbose == 2


def test_an_executor_without_workers_says_so() -> None:
    executor = RayExecutor(SETTINGS, num_workers=1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.WORKERS_NOT_STARTED, "start()")):
        executor.run(print)


def test_settings_take_other_attributes() -> None:
    settings = MiniSettings(nics={"eth0"})
    settings.discovery = "any"  # type: ignore[attr-defined]
    assert settings.timeout_s == 300
    assert not settings.start_timeout.timed_out()
    assert detect_nics(settings, all_host_names=["h"]) == ["eth0"]
    assert nics_to_env_var(["eth0"]) == {"HOROVOD_NETWORK_INTERFACES": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert nics_to_env_var([]) == {}


def test_a_worker_outside_of_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_HOSTNAME"):
        monkeypatch.setenv(name, "")  # so that they are put back
    worker = BaseHorovodWorker(world_rank=2, world_size=3)
    assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == ("2", "3")
    assert worker.execute(lambda executable: executable) is None
    monkeypatch.setenv("OWN_VARIABLE", "")
    worker.update_env_vars({"OWN_VARIABLE": 1})
    assert worker.env_vars()["OWN_VARIABLE"] == "1"


def test_log_without_a_driver_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ray_logger, "_warned", False)
    ray_logger.log({"a": 1})
    ray_logger.log({"a": 2})
    assert len(caplog.records) == 1


def test_places_of_registered_workers() -> None:
    """Nodes of 5, 4 and 3 ranks, all with one name for their hosts."""
    coordinator = Coordinator(MiniSettings())
    assert coordinator.node_id_string == ""
    nodes = ["aaaa1"] * 5 + ["bbbb2"] * 4 + ["cccc3"] * 3
    for rank, node in enumerate(nodes):
        coordinator.register("host", node, rank)
    assert coordinator.world_size == 12
    assert coordinator.hostnames == {"host-aaaa", "host-bbbb", "host-cccc"}
    assert coordinator.node_id_string == "aaaa1:5,bbbb2:4,cccc3:3"
    assert coordinator.node_id_by_rank == dict(enumerate(nodes))
    found = coordinator.finalize_registration()
    sizes = [one["HOROVOD_CROSS_SIZE"] for one in found.values()]
    assert (sizes.count(3), sizes.count(2), sizes.count(1)) == (9, 2, 1)
    assert found[4] == {
        "HOROVOD_CROSS_RANK": 0,
        "HOROVOD_CROSS_SIZE": 1,
        "HOROVOD_LOCAL_RANK": 4,
        "HOROVOD_LOCAL_SIZE": 5,
    }
