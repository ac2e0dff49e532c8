"""`horovod.ray.train`: Horovod as a backend of Ray Train (its second version, which is the usual one).

    from horovod.ray.train import HorovodConfig
    from ray.train import ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    DataParallelTrainer(loop, backend_config=HorovodConfig(), scaling_config=ScalingConfig(num_workers=4)).fit()

`loop` calls hvd.init(), whose ranks are those of ray.train.get_context(). When a worker raises or is lost, the others
are told at once. What follows is Ray's FailureConfig, and one of two backends:

    HorovodBackend   Ray starts a new group: a new world, from the last checkpoint
    ElasticBackend   Ray replaces the worker alone; the others stay, and go on from their last commit (hvd.elastic.run)
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from horovod.base.errors import LaunchCode, SettingCode, coded
from horovod.base.settings import ROWS, resolve, variables
from horovod.coordinator.core.ranks import Seat, assign
from horovod.launch.job_environment import job_environment, of_driver
from horovod.launch.own_coordinator import OwnCoordinator, host_names
from horovod.ray.coordinator import coordinator_for, membership, visible_gpus
from horovod.ray.worker import Reported, Whereabouts, enter, given_variables, leave_world, whereabouts

_LEAVE_S = 10.0  # for workers that still answer; Ray kills all of them afterwards


@dataclass
class HorovodConfig(BackendConfig):
    """timeout_s: how long all processes may take to join their world. nics: the network interfaces to use.

    min_workers: makes the loop elastic, which is a function of hvd.elastic.run then: a worker that is lost is replaced
    alone, where FailureConfig allows a failure, and the others go on in place, with at least so many at a time. With
    the number of workers they wait for the new one. None: Ray starts the whole group again.

    environ: settings (HOROVOD_*) for the workers, unless the runtime_env has others; default: those of the process that
    makes this.
    """

    timeout_s: float = 30
    nics: Iterable[str] | None = None
    min_workers: int | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: of_driver(os.environ), repr=False)

    @property
    def backend_cls(self) -> type[HorovodBackend]:
        """The class that starts and ends a group of workers."""
        return HorovodBackend if self.min_workers is None else ElasticBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """The context in which Ray Train calls the loop of each worker."""
        return Reported


class HorovodBackend(Backend):
    """Runs in the controller of a training, and so does the coordinator of its groups, one after the other."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._coordinator: OwnCoordinator | None = None
        self._job = ""
        self._there: list[Whereabouts] = []  # of each worker, by rank

    def on_start(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """The workers run, and none has begun to train: gives them their places and the coordinator."""
        self._stop()
        there = self._there = list(worker_group.execute(whereabouts))
        _check_min_workers(backend_config.min_workers, len(there))
        given = _variables_of_user(backend_config)
        settings = resolve({**given, **_environ(backend_config)})
        # A worker in the place of another may be on another node.
        nodes = [one.node_id for one in there] if backend_config.min_workers is None else []
        self._coordinator = coordinator_for(nodes, settings, _nics(backend_config))
        self._job = given.get(ROWS["job"].env) or ROWS["job"].default
        try:
            self._tell(worker_group, list(range(len(there))), backend_config)
        except BaseException:
            self._stop()  # Ray does not call on_shutdown then
            raise

    def _tell(self, worker_group: Any, ranks: Sequence[int], config: HorovodConfig) -> None:
        """The workers of the group, whose ranks these are, become members."""
        coordinator = self._coordinator
        assert coordinator is not None
        there = self._there
        names = host_names([(one.node_id, one.hostname) for one in there])
        hosts = [names[one.node_id] for one in there]
        places = assign([Seat(str(rank), host, rank) for rank, host in enumerate(hosts)])  # ranks are Ray's
        assert not isinstance(places, str)
        of_rank = {place.rank: place for place in places}
        environ = _environ(config)
        if config.min_workers is not None:
            environ |= variables(min_size=config.min_workers, max_size=len(hosts))
        told = []
        for number, rank in enumerate(ranks):
            # Ray sorts the GPUs of a host, so that the local rank would index the GPU of another worker where each has
            # two. And it shows a worker that replaces another one its own GPUs alone.
            gpus = visible_gpus([one.gpus for one in there if one.node_id == there[rank].node_id])
            arguments = membership(coordinator, self._job, environ, hosts[rank], len(hosts), of_rank[rank], gpus)
            told.append(worker_group.execute_single_async(number, enter, *arguments))
        ray.get(told)

    def on_shutdown(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """The group ends; workers that still train are freed, since Ray waits for them."""
        reason = "Ray Train ends its group of workers"
        try:
            if self._coordinator is not None:  # else ranks that wait for others would do so until their start timeout
                self._coordinator.give_up(self._job, f"{reason}.")
            with contextlib.suppress(ray.exceptions.RayActorError):
                left = worker_group.execute_async(leave_world, reason)
                ray.wait(left, num_returns=len(left), timeout=_LEAVE_S)
        finally:
            self._stop()

    def _stop(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.stop()


class ElasticBackend(HorovodBackend):
    """Each worker can be replaced alone: to Ray it is a group of its own, beside the group of all."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """All workers run, or one that replaces another one: it takes the place of that in the same job."""
        rank = _replaced(worker_group)
        if rank is None:
            _check_datasets(worker_group)
            super().on_start(worker_group, backend_config)
            return
        (self._there[rank],) = worker_group.execute(whereabouts)
        self._tell(worker_group, [rank], backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: HorovodConfig) -> None:
        """One that is replaced has left the world already, with its process or when its loop raised."""
        if _replaced(worker_group) is None:
            super().on_shutdown(worker_group, backend_config)


def _replaced(worker_group: Any) -> int | None:
    """The rank of a group of one worker; None: it is the group of all."""
    # A Ray that replaces no workers does not have the class.
    kind = getattr(sys.modules.get("ray.train.v2._internal.execution.worker_group"), "ReplicaGroup", None)
    if kind is None or not isinstance(worker_group, kind):
        return None
    (worker,) = worker_group.get_workers()
    return int(worker.distributed_context.world_rank)


def _check_datasets(worker_group: Any) -> None:
    """Ray deals shards to the workers that start together. One that replaces another would be dealt those of a group of
    one: all rows if it is rank 0, and otherwise it would wait for rank 0 for ever.
    """
    if any(getattr(one, "_datasets", None) for one in getattr(worker_group, "_callbacks", ())):
        raise ValueError(
            coded(
                LaunchCode.CONFLICTING_OPTIONS,
                "Ray deals the shards of datasets= to all workers at once, so a worker that replaces another "
                "one, as HorovodConfig(min_workers=) allows, would get no shard. Leave min_workers out, so "
                "that Ray restarts the whole group and deals the shards again, or read the data by other "
                "means, such as horovod.data.ParquetReader.",
            )
        )


def _variables_of_user(config: HorovodConfig) -> dict[str, str]:
    """The variables that the user has set for the workers. Those of this process, a controller, do not count: they are
    of the user that has started Ray.
    """
    return {**config.environ, **given_variables()}


def _environ(config: HorovodConfig) -> dict[str, str]:
    return job_environment(_variables_of_user(config), {}, config.timeout_s, _nics(config))


def _nics(config: HorovodConfig) -> list[str]:
    return sorted(config.nics or ())


def _check_min_workers(fewest: int | None, workers: int) -> None:
    if fewest is not None and not 1 <= fewest <= workers:
        sentence = f"min_workers of HorovodConfig must be from 1 to the number of workers, {workers}, not {fewest}."
        raise ValueError(coded(SettingCode.INVALID_SETTING, sentence))
