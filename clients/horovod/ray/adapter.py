"""What RayExecutor asks of the object that owns the workers, here or in an actor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.base.errors import LaunchCode, coded
from horovod.ray.worker import described

Meanwhile = Callable[[], None]  # called again and again while a call runs, and once after its results are there


@dataclass
class BaseParams:
    """What one worker gets. gpus_per_worker: None is one, where GPUs are used."""

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None
    resources_per_worker: Mapping[str, float] | None = None

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return (self.gpus_per_worker or 1) if self.use_gpu else 0

    def bundle(self, workers: int = 1) -> dict[str, float]:
        """What so many workers need, as a bundle of a placement group."""
        each = {"CPU": self.cpus_per_worker, "GPU": self.gpus, **(self.resources_per_worker or {})}
        return {name: amount * workers for name, amount in each.items() if amount}

    def actor_options(self) -> dict[str, Any]:
        """What the actor of one worker takes, as options of Ray."""
        options: dict[str, Any] = {"num_cpus": self.cpus_per_worker}
        if self.gpus:
            options["num_gpus"] = self.gpus
        if self.resources_per_worker:
            options["resources"] = dict(self.resources_per_worker)
        return options


def why_interrupted(error: BaseException) -> str:
    """What the driver raised while it waited for a call, as a cause."""
    if isinstance(error, KeyboardInterrupt):
        return coded(LaunchCode.RANK_FAILED, "the driver was interrupted (Ctrl-C)")
    return coded(LaunchCode.RANK_FAILED, f"the driver waits no longer, since it raised {described(error)}")


class Adapter(ABC):
    """The workers of one executor."""

    @abstractmethod
    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Has all workers ready, each with an object of `executable_cls`; after an error nothing is left."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Any]:
        """The results of `fn(*args, **kwargs)` by rank."""

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
        """What ranks log goes into this queue, from the next call on; None: nowhere."""

    @abstractmethod
    def interrupt(self, why: str) -> None:
        """Frees the ranks of the call that is running, since the driver does not wait for it any more. Any thread may
        call this. why: the cause that the ranks are told, without a full stop.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all workers; idempotent."""
