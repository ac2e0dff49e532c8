"""Workers whose number stays: placed, started, given their ranks, and called."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from horovod.base.errors import LaunchCode, coded
from horovod.base.settings import Settings, variables
from horovod.ray.adapter import (
    Adapter,
    BaseParams,
    Meanwhile,
    kill,
    not_started,
    why_interrupted,
    without_executable,
)
from horovod.ray.calls import Call
from horovod.ray.coordinator import coordinator_for, membership, seated, visible_gpus
from horovod.ray.strategy import ColocatedStrategy, PGStrategy
from horovod.ray.worker import described

_START_S = 600.0  # for the environment of actors (runtime_env), which Ray may have to install first


@dataclass
class StaticParams(BaseParams):
    """num_workers, or num_hosts with num_workers_per_host on each."""

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int | None = 1
    use_current_placement_group: bool = True
    label_selector: Mapping[str, str] | None = None


class StaticAdapter(Adapter):
    """Workers that live as long as the executor, and so do their objects and their world. A call that fails ends the
    world, and not the workers: the next call begins another one.
    """

    def __init__(self, settings: Any, params: StaticParams, environ: Mapping[str, str]) -> None:
        super().__init__(settings, environ)
        self.workers: list[Any] = []  # by rank
        self.strategy = _strategy(settings, params)
        self._hosts: list[str] = []  # by rank
        self._has_failed = False
        self._unwatched: list[Call] = []  # of run_remote

    # -- the beginning and the end -------------------------------------------------------------------------------------

    def _begin(self, environ: dict[str, str], settings: Settings) -> None:
        self.workers = self.strategy.create_workers()
        self._seat(environ, settings)
        made = [worker.start_executable.remote(*self._executable) for worker in self.workers]
        Call(made, self._when_failed()).results()

    def _seat(self, environ: Mapping[str, str], settings: Settings) -> None:
        """Gives the actors their ranks, and the coordinator."""
        there = self._answers([worker.whereabouts.remote() for worker in self.workers])
        seats = seated([(one.node_id, one.hostname) for one in there])
        self.workers = [self.workers[seat.actor] for seat in seats]
        self._hosts = [seat.host for seat in seats]
        coordinator = self._coordinator = coordinator_for([one.node_id for one in there], settings, self._nics)
        told = []
        for worker, seat in zip(self.workers, seats, strict=True):
            gpus = visible_gpus([there[one.actor].gpus for one in seats if one.host == seat.host])
            arguments = membership(coordinator, self._job_name(), environ, seat.host, len(seats), seat.place, gpus)
            told.append(worker.enter.remote(*arguments))
        self._answers(told)

    def _answers(self, refs: Sequence[Any]) -> list[Any]:
        created = self.strategy._created_placement_group
        timeout_s = _START_S if created else self._settings.placement_group_timeout_s
        try:
            found: list[Any] = ray.get(list(refs), timeout=timeout_s)
        except GetTimeoutError as error:
            why = (
                "See the logs of Ray on their nodes"
                if created
                else "They wait for the resources of the placement group in which start() was called. Give it more "
                "resources, or use_current_placement_group=False, which makes another group"
            )
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            sentence = f"{len(refs) - len(ready)} of {len(refs)} workers did not start within {timeout_s:g} s. {why}."
            raise TimeoutError(coded(LaunchCode.WORKERS_LATE, sentence)) from error
        return found

    def _end(self) -> None:
        workers, self.workers = self.workers, []
        for worker in workers:
            kill(worker)
        with contextlib.suppress(Exception):
            self.strategy.shutdown()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        refs = self._submit(without_executable(fn, args, kwargs), self.workers)
        # A failure frees the other ranks, though nobody waits here.
        self._unwatched.append(Call(refs, self._when_failed(), keeps_results=False))
        return refs

    def execute(self, fn: Callable[[Any], Any], meanwhile: Meanwhile | None = None) -> list[Any]:
        return self._results(self._submit(fn, self.workers), meanwhile)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        (result,) = self._results(self._submit(fn, self.workers[:1]))
        return result

    def settle(self) -> None:
        for call in list(self._unwatched):
            call.wait()

    def _results(self, refs: Sequence[Any], meanwhile: Meanwhile | None = None) -> list[Any]:
        call = Call(refs, self._when_failed())
        try:
            return call.results(meanwhile)
        except BaseException as error:
            if not call.has_failed:  # this thread was interrupted, or a callback has raised
                self.interrupt(why_interrupted(error))
            raise

    def interrupt(self, why: str) -> None:
        """Ranks that are busy with something else than Horovod hear of it in their next operation."""
        self._has_failed = True
        if (coordinator := self._coordinator) is not None:
            coordinator.end(self._job_name(), why)

    def stream_to(self, queue: Any) -> None:
        for worker in self.workers:
            worker.set_queue.remote(queue)

    def _submit(self, fn: Callable[[Any], Any], workers: Sequence[Any]) -> list[Any]:
        if not self.workers:
            raise not_started()
        self._unwatched = [call for call in self._unwatched if not call.is_over()]
        if self._has_failed:
            self._has_failed = False
            self._jobs += 1
            for worker in self.workers:  # comes before the function, since an actor takes calls in their order
                worker.enter_again.remote(variables(job=self._job_name()))
        shared = ray.put(fn)  # once, and not once for each worker
        return [worker.execute.remote(shared) for worker in workers]

    # -- failures ------------------------------------------------------------------------------------------------------

    def _when_failed(self) -> Callable[[int, BaseException], None]:
        """For the call that was submitted last: its failure ends the world in which it runs, and not a later one."""
        return functools.partial(self._failed, self._job_name())

    def _failed(self, job: str, rank: int, error: BaseException) -> None:
        """The first failure of a call, told by a thread of Ray. Ranks that are in a world hear of it there; ranks
        that wait for this one to join, or will do so, hear it from the coordinator.
        """
        host = self._hosts[rank] if rank < len(self._hosts) else "?"
        if isinstance(error, RayActorError):
            sentence = coded(LaunchCode.RANK_FAILED, f"Rank {rank} on host {host} was lost: {described(error)}")
        else:
            what = described(getattr(error, "cause", None) or error)
            sentence = coded(LaunchCode.FUNCTION_RAISED, f"The function of rank {rank} on host {host} raised {what}")
        self._give_up(job, sentence)

    def _give_up(self, job: str, sentence: str) -> None:
        if job == self._job_name():
            self._has_failed = True
        if (coordinator := self._coordinator) is not None:
            coordinator.give_up(job, sentence)


def _strategy(settings: Any, params: StaticParams) -> PGStrategy | ColocatedStrategy:
    per_host = params.num_workers_per_host or 1
    if params.num_hosts is not None:
        return ColocatedStrategy(settings, params.num_hosts, per_host, params, params.label_selector)
    assert params.num_workers is not None
    return PGStrategy(settings, params.num_workers, params, params.use_current_placement_group, params.label_selector)
