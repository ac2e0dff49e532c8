"""A real Ray: one cluster for each module, since starting one takes seconds."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray_ranks
from ray_starts import started

if TYPE_CHECKING:
    from horovod.ray import RayExecutor

if importlib.util.find_spec("ray") is None:

    class _Skipped(pytest.Module):
        def collect(self) -> list[Any]:
            pytest.skip("ray is not installed", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _Skipped.from_parent(parent, path=module_path)

else:
    from ray import cloudpickle

    # Actors have another import path than pytest, so functions travel as a whole.
    cloudpickle.register_pickle_by_value(ray_ranks)


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S", "200")  # 30 are too few on a busy machine
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def one_node() -> Iterator[Any]:
    """Six processors and four GPUs, none of which is real. Whoever has started Ray was a rank of something else."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_ranks.INHERITED.items():
            patch.setenv(name, value)
        size = {"num_cpus": 6, "num_gpus": 4, "resources": {"seat": ray_ranks.SEATS}, "labels": {"room": "large"}}
        context = started(lambda: ray.init("local", **size, include_dashboard=False, log_to_driver=False))
    yield context
    ray.shutdown()


def made(timeout_s: float = 120, placement_group_timeout_s: float = 120, **arguments: Any) -> RayExecutor:
    from horovod.ray import RayExecutor

    settings = RayExecutor.create_settings(timeout_s=timeout_s, placement_group_timeout_s=placement_group_timeout_s)
    return RayExecutor(settings, **arguments)


@pytest.fixture
def executor() -> Iterator[Callable[..., RayExecutor]]:
    """Makes executors, which are shut down when the test is over."""
    all_made: list[RayExecutor] = []

    def make(**arguments: Any) -> RayExecutor:
        all_made.append(made(**arguments))
        return all_made[-1]

    yield make
    for one in all_made:
        one.shutdown()


@pytest.fixture(scope="module")
def pair(one_node: Any) -> Iterator[RayExecutor]:
    """Two ranks, for tests that leave them as they are."""
    running = made(num_workers=2, num_workers_per_host=None, use_gpu=True, gpus_per_worker=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CYCLE_TIME", "2")
        patch.setenv("HOROVOD_RANK", "9")
        running.start(
            ray_ranks.Stateful,
            executable_args=[3],
            executable_kwargs={"step": 2},
            extra_env_vars={"OWN_VARIABLE": 4},  # type: ignore[dict-item]
        )
    yield running
    running.shutdown()
