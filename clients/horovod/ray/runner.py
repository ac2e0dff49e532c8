"""`RayExecutor`: checks the user's arguments, and passes them on to the adapter that has the workers."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.client import ray as ray_client

from horovod.base.errors import LaunchCode, coded
from horovod.base.words import joined
from horovod.launch.asked import renamed
from horovod.launch.job_environment import of_driver
from horovod.ray.adapter import Ending, MiniSettings, not_started, wait, why_interrupted
from horovod.ray.calls import Callback, Callbacks
from horovod.ray.checks import (
    check_call,
    check_counts,
    check_cpus,
    check_gpus,
    check_max_failures,
    check_resources,
    check_settings,
    check_start,
    conflict,
)
from horovod.ray.coordinator import Coordinator
from horovod.ray.elastic_v2 import ElasticAdapter, ElasticParams, check_elastic
from horovod.ray.static import StaticAdapter, StaticParams
from horovod.ray.worker import BaseHorovodWorker, described

__all__ = ["BaseHorovodWorker", "Coordinator", "MiniSettings", "RayExecutor", "StaticAdapter", "StaticParams"]

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 30.0  # after which an adapter elsewhere is killed


class RayExecutor:
    """Processes on a Ray cluster that form one world.

        >>> executor = RayExecutor(RayExecutor.create_settings(), num_workers=2, use_gpu=True)
        >>> executor.start()
        >>> executor.run(train, args=["/data"])
        [0.91, 0.91]
        >>> executor.shutdown()

    In a `with` block the first call starts the workers, if start() has not, and the end of the block ends them:

        >>> with RayExecutor(RayExecutor.create_settings(), num_workers=2) as executor:
        ...     executor.run(train, args=["/data"])

    Workers also end with an executor that nobody holds any more, once the results of its run_remote() are there.

    Arguments of the calls:
    fn: a function that cloudpickle can send. args, kwargs: the arguments of that function. callbacks: functions that
    are called here, while it runs, with each dict that a rank passes to horovod.ray.ray_logger.log.

    Args:
        settings: of `create_settings`.
        num_workers: on as few nodes as possible, in the placement group that this is called in, or a new one.
        num_hosts, num_workers_per_host: instead, so many on each of so many nodes.
        cpus_per_worker, use_gpu, gpus_per_worker: the CPUs and GPUs of each; one GPU if GPUs are used.
        resources_per_worker: other resources of Ray that each gets, such as {"accelerator_type:A100": 0.001}.
        label_selector: labels of the nodes, as of Ray's placement groups, such as {"ray.io/accelerator-type": "A100"};
            for a fixed number of workers.
        max_failures: so often, in each call of run(), a worker or a node may be lost: all workers start again, and so
            does the function. For a fixed number of workers.
        use_current_placement_group: False always makes a new one.
        min_workers, max_workers: instead, for elastic jobs: it runs with so many at least, and on whatever room there
            is up to so many; None is no limit.
        reset_limit: how often hosts may come, go or fail before the job ends; None: no limit.
        cooldown_range: the least and the most seconds after which a host that failed is used again; None: never.
        elastic_timeout: for how many seconds there may be fewer than `min_workers`, at the start too.
        override_discovery: False takes the hosts from `settings.discovery`, a HostDiscovery, instead of Ray's nodes.
        spares: so many more workers than `max_workers` wait, ready to take the place of one that is lost.
        num_slots, cpus_per_slot, gpus_per_slot: deprecated names of num_workers_per_host, cpus_per_worker,
            gpus_per_worker.

    Raises:
        ValueError, AssertionError: arguments that make no sense together.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Iterable[str] | None = None,
        verbose: int | None = None,
    ) -> MiniSettings:
        """Settings of an executor.

        timeout_s: how long all processes may take to join their world. placement_group_timeout_s: how long Ray may
        take to find the resources. nics: the network interfaces to use. ssh_identity_file, ssh_str: not needed.
        verbose: deprecated; HOROVOD_LOG_LEVEL says how much is logged.
        """
        settings = MiniSettings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )
        if verbose is not None:
            warnings.warn("verbose is deprecated, use HOROVOD_LOG_LEVEL.", DeprecationWarning, stacklevel=2)
            settings.verbose = verbose
        return settings

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
        spares: int = 0,
        num_slots: int | None = None,
        cpus_per_slot: int | None = None,
        gpus_per_slot: int | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        label_selector: Mapping[str, str] | None = None,
        max_failures: int = 0,
    ) -> None:
        check_settings(settings, "RayExecutor", ("timeout_s", "placement_group_timeout_s", "nics"))
        check_resources(resources_per_worker, label_selector)
        check_max_failures(max_failures)
        num_workers_per_host = renamed("num_slots", num_slots, "num_workers_per_host", num_workers_per_host)
        cpus_per_worker = renamed("cpus_per_slot", cpus_per_slot, "cpus_per_worker", cpus_per_worker)
        gpus_per_worker = renamed("gpus_per_slot", gpus_per_slot, "gpus_per_worker", gpus_per_worker)
        check_gpus(use_gpu, gpus_per_worker)
        if max_workers is not None and not (min_workers and min_workers > 0):
            raise conflict("`max_workers` needs a positive `min_workers`: they make the job elastic together.")
        if min_workers is not None and num_workers is not None:
            raise conflict(
                "Both `min_workers` and `num_workers` provided. Give `num_workers` for a job of a fixed size, or "
                "`min_workers` and `max_workers` for an elastic one."
            )
        if num_workers is not None and num_hosts is not None:
            sentence = "Both `num_workers` and `num_hosts` provided: give one of them."
            raise AssertionError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
        if min_workers is not None and num_hosts is not None:
            raise conflict("Both `min_workers` and `num_hosts` provided: in an elastic job Ray chooses the hosts.")
        if num_workers is None and num_hosts is None and min_workers is None:
            raise conflict("Neither `num_workers`, `num_hosts` nor `min_workers` provided: give one of them.")
        check_cpus(cpus_per_worker, use_gpu)
        check_counts(num_workers=num_workers, num_hosts=num_hosts, num_workers_per_host=num_workers_per_host)
        check_counts(min_workers=min_workers, max_workers=max_workers)
        if spares and min_workers is None:
            raise conflict("`spares` needs `min_workers`: workers of a job of a fixed size are not replaced.")
        elastic = {"reset_limit": reset_limit, "cooldown_range": cooldown_range}
        if min_workers is None and (given := [name for name, value in elastic.items() if value is not None]):
            warnings.warn(f"Only elastic jobs (min_workers) use {joined(given)}.", stacklevel=2)
        if min_workers is not None and label_selector:
            raise conflict(
                "label_selector is for a fixed number of workers (num_workers, num_hosts): an elastic job has workers "
                "on all nodes. Let settings.discovery find the right ones, with override_discovery=False."
            )
        if min_workers is not None and max_failures:
            raise conflict(
                "max_failures is for a fixed number of workers (num_workers, num_hosts): an elastic job goes on "
                "without one that is lost. reset_limit says how often."
            )
        self.settings = settings
        self._max_failures = max_failures
        self._started_with: tuple[Any, ...] = (None, None, None, None)
        self._is_entered = False  # in a `with` block
        self._ending: Ending | None = None
        self._is_remote = False  # whether the adapter is an actor
        self.params: StaticParams | ElasticParams
        each: dict[str, Any] = {
            "cpus_per_worker": cpus_per_worker,
            "use_gpu": use_gpu,
            "gpus_per_worker": gpus_per_worker,
            "resources_per_worker": resources_per_worker,
        }
        if min_workers is not None:
            self.params = ElasticParams(
                **each,
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
                spares=spares,
            )
            check_elastic(settings, self.params)
            return
        self.params = StaticParams(
            **each,
            label_selector=label_selector,
            num_workers=num_workers,
            num_hosts=num_hosts,
            num_workers_per_host=num_workers_per_host,
            use_current_placement_group=use_current_placement_group,
        )

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers, each with `executable_cls(*executable_args, **executable_kwargs)`.

        executable_cls: a class, or None. executable_args, executable_kwargs: the arguments of its constructor.
        extra_env_vars: set in each of them before. Settings of the driver's environment (HOROVOD_*) count there too.

        Raises TimeoutError: the resources were not there in time; the text says which are missing. An exception of the
        class is raised here. No actor is left then.
        """
        check_start(executable_cls, executable_args, executable_kwargs, extra_env_vars)
        if hasattr(self, "adapter"):
            sentence = "This executor has workers already: call shutdown() before it is started again."
            raise RuntimeError(coded(LaunchCode.WORKERS_NOT_STARTED, sentence))
        if not ray.is_initialized():
            ray.init()
        self._is_remote = ray_client.is_connected()
        # Under Ray Client this process is outside of the cluster, so the adapter, with the coordinator, goes there.
        # Two at a time: shutdown() has to come through while a function runs.
        environ = of_driver(os.environ)
        kind: Any = ElasticAdapter if isinstance(self.params, ElasticParams) else StaticAdapter
        self.adapter: Any = (
            ray.remote(kind).options(num_cpus=0, max_concurrency=2).remote(self.settings, self.params, environ)
            if self._is_remote
            else kind(self.settings, self.params, environ)
        )
        adapter, is_remote = self.adapter, self._is_remote
        self._ending = Ending(self, lambda: _settle(adapter, is_remote), lambda: _end(adapter, is_remote))
        self._started_with = (executable_cls, executable_args, executable_kwargs, extra_env_vars)
        try:
            self._ask("start", *self._started_with)
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank; the results by rank.

        callbacks: called here, while it runs, with each dict that a rank passes to horovod.ray.ray_logger.log.

        Raises what the rank raised that failed first. The others are freed at once: their operations raise
        HorovodInternalError with that exception's text. ValueError: arguments that can't be right, before anything
        runs.
        """
        check_call(fn, args, kwargs, callbacks)
        for failure in range(1, self._max_failures + 1):
            self._start_if_entered()
            adapter = getattr(self, "adapter", None)
            try:
                return list(self._watched(callbacks, "run", fn, args, kwargs))
            except RayActorError as error:
                if adapter is None or getattr(self, "adapter", None) is not adapter:
                    raise  # shutdown() was called meanwhile
                if isinstance(error, RayTaskError):
                    raise  # it was an actor of the function's own
                _log.warning(
                    "%s All workers start again: failure %d of at most %d (max_failures).",
                    coded(LaunchCode.RANK_FAILED, f"A worker was lost ({described(error)})."),
                    failure,
                    self._max_failures,
                )
                self.shutdown()
                self.start(*self._started_with)
        return list(self._watched(callbacks, "run", fn, args, kwargs))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Starts what `run` does and returns at once: an ObjectRef for the result of each rank."""
        check_call(fn, args, kwargs)
        return list(self._ask("run_remote", fn, args, kwargs))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """`fn(executable)` on every rank, with its object of `executable_cls`; otherwise as `run`.

        Nothing is done again after a failure, since the objects are what earlier calls have made of them.
        """
        check_call(fn, callbacks=callbacks)
        return list(self._watched(callbacks, "execute", fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """`fn(executable)` on rank 0 alone."""
        check_call(fn)
        return self._ask("execute_single", fn)

    @property
    def driver(self) -> Any:
        """The ElasticView of an elastic executor that was started in this process: which slots have a worker."""
        return self.adapter.driver

    def shutdown(self) -> None:
        """Ends the workers, also in the middle of a call, and gives their resources back. Idempotent."""
        adapter = self.__dict__.pop("adapter", None)
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.cancel()
        if adapter is not None:
            _end(adapter, self._is_remote)

    def __enter__(self) -> RayExecutor:
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_entered = False
        self.shutdown()

    # -- the adapter, here or there ------------------------------------------------------------------------------------

    def _start_if_entered(self) -> None:
        if self._is_entered and not hasattr(self, "adapter"):
            self.start()

    def _ask(self, method: str, *args: Any) -> Any:
        self._start_if_entered()
        if not hasattr(self, "adapter"):
            raise not_started()
        asked = getattr(self.adapter, method)
        return self._answer(asked.remote(*args)) if self._is_remote else asked(*args)

    def _answer(self, ref: Any, told: Callbacks | None = None) -> Any:
        """The answer of an adapter that is an actor."""
        try:
            if told is not None:
                wait(lambda timeout_s: bool(ray.wait([ref], timeout=timeout_s)[0]), told.deliver)
            return ray.get(ref)
        except BaseException as error:
            with contextlib.suppress(Exception):  # where the cluster is gone, so are the ranks
                if not ray.wait([ref], timeout=0)[0]:
                    self.adapter.interrupt.remote(why_interrupted(error))
            raise

    def _watched(self, callbacks: Sequence[Callback] | None, method: str, *args: Any) -> Any:
        if not callbacks:
            return self._ask(method, *args)
        self._start_if_entered()
        told = Callbacks(callbacks)
        try:
            self._ask("stream_to", told.queue)
            if not self._is_remote:
                return getattr(self.adapter, method)(*args, meanwhile=told.deliver)
            return self._answer(getattr(self.adapter, method).remote(*args), told)
        finally:
            if hasattr(self, "adapter"):
                self._ask("stream_to", None)
            told.close()


def _settle(adapter: Any, is_remote: bool) -> None:
    """Waits for the calls whose results others may wait for."""
    if is_remote:
        ray.get(adapter.settle.remote())
    else:
        adapter.settle()


def _end(adapter: Any, is_remote: bool) -> None:
    if not is_remote:
        adapter.shutdown()
        return
    try:
        # A call that was interrupted may hold it up; and if its node is gone, so are the workers that it had.
        with contextlib.suppress(ray.exceptions.GetTimeoutError, RayActorError):
            ray.get(adapter.shutdown.remote(), timeout=_SHUTDOWN_S)
    finally:
        ray.kill(adapter)
