"""The workers of one executor, here or in an actor, from their beginning to their end.

A fixed number of workers (static.py) and an elastic one (elastic_v2.py) differ in how long a worker lives, so that each
places, calls and replaces its own (ADR 117). How an executor begins and ends, what an actor is made of, and how the
driver waits is the same, and stands here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from horovod.base.errors import LaunchCode, coded
from horovod.base.settings import ROWS, Settings, resolve
from horovod.launch.job_environment import job_environment
from horovod.launch.own_coordinator import OwnCoordinator
from horovod.ray.worker import BaseHorovodWorker, described, given_variables
from horovod.runner.common.util.secret import make_secret_key
from horovod.runner.common.util.timeout import Timeout

Meanwhile = Callable[[], None]  # called again and again while a call runs, and once after its results are there

_LOOK_S = 0.05


@dataclass
class MiniSettings:
    """The settings that `RayExecutor.create_settings` makes. Takes other attributes too.

    nics: network interfaces over which the hosts reach each other; default: all that lead to other hosts.
    timeout_s: how long all processes may take to join their world, unless HOROVOD_START_TIMEOUT says it.
    placement_group_timeout_s: how long to wait for the resources.
    verbose, key, ssh_port, ssh_identity_file: taken for earlier releases' sake; Ray starts the processes, so nothing
        needs them.
    """

    nics: Iterable[str] | None = None
    verbose: int = 1
    key: bytes = field(default_factory=make_secret_key, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False

    @property
    def start_timeout(self) -> Timeout:
        """Counts from now on."""
        message = f"Timed out waiting for {{activity}}: timeout_s of create_settings() is {self.timeout_s} s."
        return Timeout(self.timeout_s, message=message)


@dataclass
class BaseParams:
    """The resources of one worker. gpus_per_worker: None is one, if GPUs are used."""

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None
    resources_per_worker: Mapping[str, float] | None = None

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return (self.gpus_per_worker or 1) if self.use_gpu else 0

    def bundle(self, workers: int = 1) -> dict[str, float]:
        """The resources of so many workers, as a bundle of a placement group."""
        each = {"CPU": self.cpus_per_worker, "GPU": self.gpus, **(self.resources_per_worker or {})}
        return {name: amount * workers for name, amount in each.items() if amount}

    def actor(self, rank: int, size: int, strategy: Any, resources: Mapping[str, float] | None = None) -> Any:
        """The actor of one worker, which may still be starting. strategy: of Ray. resources: beside its own."""
        options: dict[str, Any] = {"num_cpus": self.cpus_per_worker, "scheduling_strategy": strategy}
        if self.gpus:
            options["num_gpus"] = self.gpus
        if all_resources := {**(self.resources_per_worker or {}), **(resources or {})}:
            options["resources"] = all_resources
        return ray.remote(BaseHorovodWorker).options(**options).remote(world_rank=rank, world_size=size)


class Adapter(ABC):
    """Used by one thread, but for `interrupt` and `shutdown`. A subclass has the workers, from `_begin` to `_end`."""

    def __init__(self, settings: Any, environ: Mapping[str, str]) -> None:
        """environ: of the driver, which under Ray Client is another process."""
        self._settings = settings
        self._nics = sorted(settings.nics or ())
        self._driver_environ = environ
        self._executable: tuple[Any, ...] = (None, None, None)
        self._coordinator: OwnCoordinator | None = None
        self._job = environ.get(ROWS["job"].env) or ROWS["job"].default
        self._jobs = 1  # how many there were

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Has all workers ready, each with an object of `executable_cls`; after an error nothing is left."""
        try:
            self._executable = (executable_cls, executable_args, executable_kwargs)
            driver = {**self._driver_environ, **given_variables()}
            environ = job_environment(driver, extra_env_vars or {}, self._settings.timeout_s, self._nics)
            self._begin(environ, resolve(driver | environ))  # ValueError before anything is started
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Any]:
        """The results of `fn(*args, **kwargs)` by rank."""
        return self.execute(without_executable(fn, args, kwargs), meanwhile)

    @abstractmethod
    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """One ObjectRef for each rank, at once."""

    @abstractmethod
    def execute(self, fn: Callable[[Any], Any], meanwhile: Meanwhile | None = None) -> list[Any]:
        """The results of `fn(executable)` by rank."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """The result of `fn(executable)` on rank 0."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Waits for the calls of `run_remote` that are running."""

    @abstractmethod
    def stream_to(self, queue: Any) -> None:
        """Has ranks log into this queue, from the next call on; None: nowhere."""

    @abstractmethod
    def interrupt(self, why: str) -> None:
        """Frees the ranks of the call that is running, since the driver does not wait for it any more. Any thread may
        call this. why: the cause that the ranks are told, without a full stop.
        """

    def shutdown(self) -> None:
        """Ends all workers; idempotent."""
        self._end()
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.stop()

    @abstractmethod
    def _begin(self, environ: dict[str, str], settings: Settings) -> None:
        """Makes coordinator and workers. environ: of the job."""

    @abstractmethod
    def _end(self) -> None:
        """Ends all workers; idempotent."""

    def _job_name(self) -> str:
        return self._job if self._jobs == 1 else f"{self._job}-{self._jobs}"


def without_executable(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    return lambda _: fn(*(args or ()), **(kwargs or {}))


def wait(is_over: Callable[[float | None], bool], meanwhile: Meanwhile | None) -> None:
    """Until is_over(timeout_s)."""
    while not is_over(None if meanwhile is None else _LOOK_S):
        assert meanwhile is not None
        meanwhile()
    if meanwhile is not None:
        meanwhile()


def why_interrupted(error: BaseException) -> str:
    """The exception that the driver raised while it waited for a call, as a cause."""
    if isinstance(error, KeyboardInterrupt):
        return coded(LaunchCode.RANK_FAILED, "the driver was interrupted (Ctrl-C)")
    return coded(LaunchCode.RANK_FAILED, f"the driver waits no longer, since it raised {described(error)}")


def not_started() -> RuntimeError:
    sentence = "This executor has no workers: call start() first."
    return RuntimeError(coded(LaunchCode.WORKERS_NOT_STARTED, sentence))


def kill(actor: Any) -> None:
    """Ends the actor; None: there is none yet."""
    with contextlib.suppress(Exception):  # where Ray is gone, so are the actors
        if actor is not None:
            ray.kill(actor)


_waiting: Final[set[Ending]] = set()


class Ending:
    """Calls `end` when `owner` is garbage, or when the interpreter ends; never after `cancel`.

    settle: called before, where `owner` is garbage: waits for what `owner` has started and others wait for. Neither
    function may hold a reference to `owner`.
    """

    def __init__(self, owner: Any, settle: Callable[[], None], end: Callable[[], None]) -> None:
        self._settle, self._end = settle, end
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(owner, self._start)
        self._finalizer.atexit = False
        _waiting.add(self)

    def cancel(self) -> None:
        self._finalizer.detach()
        _waiting.discard(self)

    def now(self) -> None:
        self.cancel()
        if os.getpid() != self._pid:
            return  # a forked child has a copy, and the workers are not its own
        if ray.is_initialized():  # else Ray has ended the workers, and `end` would start it again
            with contextlib.suppress(Exception):
                self._end()

    def _start(self) -> None:
        threading.Thread(target=self._run, name="horovod-ray-ending", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self._settle()
        if self in _waiting:  # the interpreter has not ended meanwhile
            self.now()


@atexit.register  # Ray has registered its own before, when it was imported, so this comes first
def _at_exit() -> None:
    for ending in list(_waiting):
        ending.now()
