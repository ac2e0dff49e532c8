"""`horovod.ray.train`: Horovod as a backend of Ray Train (its second version, which is the usual one).

    from horovod.ray.train import HorovodConfig
    from ray.train import ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    DataParallelTrainer(loop, backend_config=HorovodConfig(), scaling_config=ScalingConfig(num_workers=4)).fit()

`loop` calls hvd.init(), whose ranks are those of ray.train.get_context(). When a worker raises or is lost, the others
are told at once, and Ray starts a new group where its FailureConfig says so: a new world, from the last checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
from ray.train.backend import Backend, BackendConfig

from horovod.base.settings import ROWS, resolve
from horovod.coordinator.core.ranks import Seat, assign
from horovod.launch.host_names import host_names
from horovod.launch.job_environment import job_environment
from horovod.launch.own_coordinator import OwnCoordinator
from horovod.ray.worker import Reported, enter, leave_world, whereabouts
from horovod.worker.rank_environment import JobOnHost, rank_environment


@dataclass
class HorovodConfig(BackendConfig):
    """timeout_s: how long all processes may take to join their world. nics: the network interfaces to use."""

    timeout_s: float = 30
    nics: Iterable[str] | None = None

    @property
    def backend_cls(self) -> type[HorovodBackend]:
        """What starts and ends a group of workers."""
        return HorovodBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """In what Ray Train calls the loop of each worker."""
        return Reported


class HorovodBackend(Backend):
    """Runs in the controller of a training, and so does the coordinator of its groups, one after the other."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._coordinator: OwnCoordinator | None = None
        self._job = ""

    def on_start(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """The workers run, and none has begun to train: gives them their places and the coordinator."""
        self._stop()
        nics = sorted(backend_config.nics or ())
        given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        environ = job_environment(given, {}, backend_config.timeout_s, nics)
        there = [(one.node_id, one.hostname) for one in worker_group.execute(whereabouts)]
        names = host_names(there)
        seats = [Seat(str(rank), names[node], rank) for rank, (node, _) in enumerate(there)]
        places = assign(seats)  # ranks are Ray's
        assert not isinstance(places, str)
        one_node = {node for node, _ in there} == {str(ray.get_runtime_context().get_node_id())}
        here = None if one_node else str(ray.util.get_node_ip_address())
        coordinator = self._coordinator = OwnCoordinator(resolve({**given, **environ}), here, nics)
        job = self._job = given.get(ROWS["job"].env) or ROWS["job"].default
        told = []
        for place, seat in zip(places, seats, strict=True):
            on = JobOnHost(environ, seat.host, len(seats), coordinator.address, coordinator.token, is_own=True, job=job)
            of_rank = rank_environment(on, place)
            certificate = coordinator.certificate, coordinator.server_name
            told.append(worker_group.execute_single_async(place.rank, enter, of_rank, *certificate))
        ray.get(told)

    def on_shutdown(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """The group ends; workers that still train are freed, since Ray waits for them."""
        reason = "Ray Train ends its group of workers"
        try:
            if self._coordinator is not None:  # else those that wait for others would do so until their start timeout
                self._coordinator.give_up(self._job, f"{reason}.")
            with contextlib.suppress(ray.exceptions.RayActorError):
                worker_group.execute(leave_world, reason)
        finally:
            self._stop()

    def _stop(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.stop()
