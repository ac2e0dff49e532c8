"""`ElasticRayExecutor`: elastic jobs under the names of Horovod 0.21, on what RayExecutor(min_workers=) does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horovod.ray import cluster
from horovod.ray.adapter import MiniSettings
from horovod.ray.calls import Callback
from horovod.ray.checks import check_call, check_settings, check_start
from horovod.ray.cluster import TestDiscovery
from horovod.ray.runner import RayExecutor

__all__ = ["ElasticRayExecutor", "RayHostDiscovery", "TestDiscovery"]


class RayHostDiscovery(cluster.RayHostDiscovery):
    """cluster.RayHostDiscovery with the names of Horovod 0.21."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)


class ElasticRayExecutor:
    """Workers on the nodes of a Ray cluster, which may come and go while they train.

        >>> executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2), use_gpu=True)
        >>> executor.start()
        >>> executor.run(train)
        [0.91, 0.91]

    Args:
        settings: of `create_settings`.
        use_gpu, cpus_per_slot, gpus_per_slot: the CPUs and GPUs of each worker; one GPU if GPUs are used.
        env_vars: set in each worker.
        override_discovery: False takes the hosts from `settings.discovery`, a HostDiscovery, instead of Ray's nodes.

    Raises:
        ValueError: arguments that make no sense together.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: int = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Iterable[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> MiniSettings:
        """Settings of an executor.

        min_num_proc, max_num_proc: the fewest and the most workers; None is no limit. reset_limit: how often hosts may
        come, go or fail; None: no limit. elastic_timeout: for how many seconds there may be too few workers. timeout_s:
        how long they may take to join their world. nics: the network interfaces to use.
        cooldown_range, spares, placement_group_timeout_s: as of RayExecutor. ssh_identity_file: not needed.
        min_np, max_np: deprecated names. Others are kept as attributes.
        """
        for name, value, new in (("min_np", min_np, "min_num_proc"), ("max_np", max_np, "max_num_proc")):
            if value is not None:
                warnings.warn(f"{name} is deprecated, use {new}.", DeprecationWarning, stacklevel=2)
        settings = MiniSettings(nics=nics, ssh_identity_file=ssh_identity_file, timeout_s=timeout_s, elastic=True)
        found = {
            "min_num_proc": min_num_proc if min_np is None else min_np,
            "max_num_proc": max_num_proc if max_np is None else max_np,
            "reset_limit": reset_limit,
            "elastic_timeout": elastic_timeout,
            **kwargs,
        }
        for name, value in found.items():
            setattr(settings, name, value)
        return settings

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        check_settings(
            settings, "ElasticRayExecutor", ("min_num_proc", "max_num_proc", "reset_limit", "elastic_timeout")
        )
        check_start(None, None, None, env_vars)
        self.settings = settings
        self._env_vars = dict(env_vars or {})
        self._executor = RayExecutor(
            settings,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=getattr(settings, "cooldown_range", None),
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
            spares=getattr(settings, "spares", 0),
        )
        self._is_entered = False

    @property
    def driver(self) -> Any:
        """Which slots have a worker (`elastic_v2.ElasticView`); after `start`."""
        return self._executor.driver

    def start(self) -> None:
        """Waits until there is room for the fewest workers. They start with `run`."""
        self._executor.start(extra_env_vars=self._env_vars)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """`worker_fn()` on every rank, as RayExecutor.run; the results of the last world, by rank.

        worker_fn: a function of hvd.elastic.run, or one that calls it. callbacks: as of RayExecutor.run.
        """
        check_call(worker_fn, callbacks=callbacks)
        if self._is_entered and not hasattr(self._executor, "adapter"):
            self.start()
        return self._executor.run(worker_fn, callbacks=callbacks)

    def shutdown(self) -> None:
        """Ends the workers; idempotent."""
        self._executor.shutdown()

    def __enter__(self) -> ElasticRayExecutor:
        """In a `with` block run() starts the workers if start() has not, and the end of the block ends them."""
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_entered = False
        self.shutdown()
