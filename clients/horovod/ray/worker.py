"""One rank: an actor of Ray, and how it becomes a member of a job."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from horovod.base.errors import without_code
from horovod.base.settings import variables
from horovod.launch.job_environment import of_another, trusting
from horovod.launch.task import unpicklable
from horovod.ray import ray_logger

_REASON_LENGTH = 200


@dataclass(frozen=True)
class Whereabouts:
    """Where an actor is."""

    node_id: str
    hostname: str
    gpus: tuple[str, ...]
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class Trained:
    """How the function of a rank of an elastic job has ended, without an exception."""

    code: int  # as the exit code of a process would be
    epoch: int = 0  # of its last world; 0: there is no result
    rank: int = -1  # in that world
    size: int = 0  # of that world
    value: Any = None


class BaseHorovodWorker:
    """Runs as an actor. Made outside an actor, it only sets rank and size of its process.

    executable: the object of the class that was given to RayExecutor.start().
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        os.environ.update(variables(rank=world_rank, size=world_size, hostname=self.hostname()))

    # -- of the process ------------------------------------------------------------------------------------------------

    def node_id(self) -> str:
        """Ray's id of this node; "" without Ray."""
        return whereabouts().node_id

    def hostname(self) -> str:
        """The name of this host."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray has given to this actor."""
        return list(whereabouts().gpus)

    def whereabouts(self) -> Whereabouts:
        """All that the driver needs to know of this process."""
        return whereabouts()

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Sets variables; values become text."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """All variables of the process."""
        return dict(os.environ)

    def set_queue(self, queue: Any) -> None:
        """Has ray_logger.log put messages into this queue; None: they are dropped."""
        ray_logger.configure(queue)

    # -- of the world --------------------------------------------------------------------------------------------------

    def enter(self, environ: Mapping[str, str], certificate: str = "", server_name: str | None = None) -> None:
        """Takes the place of a rank; as `enter` below."""
        enter(environ, certificate, server_name)

    def enter_again(self, environ: Mapping[str, str]) -> None:
        """After a call that failed: leaves its world, so that the next hvd.init() joins another one."""
        leave_world("another rank has failed")
        os.environ.update(environ)

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the object that `execute` passes on."""
        if executable_cls is None:
            return
        with Reported():
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """func(executable)"""
        # Another function may have failed on some ranks before it made its optimizers.
        if (numbers := sys.modules.get("horovod.common.optimizer_numbers")) is not None:
            numbers.restart()
        with Reported():
            return _sendable(func(self.executable))

    def train(
        self,
        func: Callable[[Any], Any],
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> Trained:
        """Runs a rank of an elastic job from start to end: makes the executable, calls func(executable), shuts down.

        SystemExit is how hvd.init() and hvd.elastic.run end a process that is not needed any more; it ends this call.
        """
        try:
            self.start_executable(executable_cls, executable_args, executable_kwargs)
            value = self.execute(func)
        except SystemExit as end:
            return Trained(end.code if isinstance(end.code, int) else int(end.code is not None))
        world = last_world()
        if (basics := sys.modules.get("horovod.common.basics")) is not None:
            basics.shutdown()  # its work is done, which the others hear
        return Trained(0, *world, value)


def whereabouts() -> Whereabouts:
    """The whereabouts of this process; without Ray it has neither a node nor GPUs."""
    if not ray.is_initialized():
        return Whereabouts("", socket.gethostname(), ())
    context = ray.get_runtime_context()
    gpus = tuple(str(number) for number in context.get_accelerator_ids().get("GPU", []))
    return Whereabouts(str(context.get_node_id()), socket.gethostname(), gpus)


def given_variables() -> dict[str, str]:
    """The variables that the runtime_env of the job has."""
    return dict(ray.get_runtime_context().runtime_env.get("env_vars") or {})


def enter(environ: Mapping[str, str], certificate: str = "", server_name: str | None = None) -> None:
    """This process takes the place of a rank: it gets the variables of `environ`, and keeps those of the runtime_env of
    its job, but no other ones that launchers set.

    certificate: by which the coordinator is known, in PEM. "": without TLS.
    """
    given = given_variables()
    for name in [name for name in of_another(os.environ) if name not in given]:
        del os.environ[name]
    os.environ.update(environ)
    os.environ.update(trusting(certificate, server_name)[0])


class Reported:
    """An exception ends a call and not the process, so the other ranks would wait for this one: they are told."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and error is not None:
            leave_world(f"its function raised {described(error)}")


def _sendable(value: Any) -> Any:
    """`value`, if Ray can send it.

    Raises:
        UnpicklableResultError: it can't. Ray's own error does not say that it is about the result, and comes when this
            rank has left its function already, so that its peers would not hear of it.
    """
    context = getattr(ray._private.worker.global_worker, "get_serialization_context", None)
    if context is not None and ray.is_initialized():
        try:
            context().serialize(value)
        except Exception as error:
            raise unpicklable(value, error) from None
    return value


def described(error: BaseException) -> str:
    """The type and the first line of the text."""
    text = without_code(error).strip().split("\n", 1)[0][:_REASON_LENGTH]
    return f"{type(error).__name__}{': ' + text if text else ''}"


def last_world() -> tuple[int, int, int]:
    """Epoch, rank and size of the last world of this process; epoch 0: it was in none, size 0: it has left it."""
    context = sys.modules.get("horovod.worker.runtime.context")
    last = context.last_world() if context is not None else None
    if context is None or last is None:
        return 0, -1, 0
    return last.epoch, last.rank, context.current().world.size if context.is_member() else 0


def leave_world(reason: str) -> None:
    basics = sys.modules.get("horovod.common.basics")  # without it this process is in no world
    if basics is not None:
        basics.leave_because(reason)
