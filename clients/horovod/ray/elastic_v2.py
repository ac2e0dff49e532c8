"""Elastic jobs of RayExecutor: workers on hosts that come and go.

    RayExecutor.run
      ElasticAdapter            this module: one event loop in a thread, one job for each call
        Driver                  which hosts the job may use (launch/elastic/driver.py), asked of RayHostDiscovery
        scheduler               which process runs where, in the executor's own coordinator (ADR 79)
        RayAgents               actors, as the scheduler says (elastic_workers.py)
        ResourceRequests        requests to an autoscaler (cluster.py)

Who is in a world is decided by the coordinator; see docs/elastic.md.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from horovod.base.errors import LaunchCode, code_of, coded, without_code
from horovod.base.settings import Settings, resolve, variables
from horovod.base.tasks import end_tasks
from horovod.launch.elastic.driver import Changed, Driver, Prepare, driven
from horovod.launch.elastic.request import ElasticRequest, elastic_variables, write_policy
from horovod.launch.own_agents import replacements_told
from horovod.protos.v1 import jobs_pb2
from horovod.ray.adapter import Adapter, BaseParams, Meanwhile, not_started, wait, why_interrupted
from horovod.ray.cluster import RayHostDiscovery, ResourceRequests, TestDiscovery
from horovod.ray.coordinator import coordinator_for
from horovod.ray.elastic_workers import RayAgents, Work
from horovod.ray.worker import Trained, described

__all__ = ["ElasticAdapter", "ElasticParams", "RayHostDiscovery", "TestDiscovery"]

_CLOSE_S = 30.0
_NAMES = {  # the fields of ElasticRequest, as users call them
    "num_proc": "min_workers",
    "min_num_proc": "min_workers",
    "max_num_proc": "max_workers",
    "slots": "slots",
    "reset_limit": "reset_limit",
    "cooldown_range": "cooldown_range",
    "host_discovery_script": "a script",
    "host_discovery": "settings.discovery",
    "spares": "spares",
}

_log = logging.getLogger(__name__)


@dataclass
class ElasticParams(BaseParams):
    """The arguments of RayExecutor for elastic jobs."""

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True
    spares: int = 0


def check_elastic(settings: Any, params: ElasticParams) -> ElasticRequest:
    """The request that the parameters make. ValueError says which parameters contradict each other."""
    source = None if params.override_discovery else getattr(settings, "discovery", None)
    if source is None and not params.override_discovery:
        sentence = "override_discovery=False needs settings.discovery, an object that finds hosts."
        raise ValueError(coded(LaunchCode.CONFLICTING_OPTIONS, sentence))
    if source is None:
        gpus = params.gpus_per_worker or 1
        source = RayHostDiscovery(params.use_gpu, params.cpus_per_worker, gpus, params.resources_per_worker)
    request = ElasticRequest(
        min_num_proc=params.min_workers,
        max_num_proc=params.max_workers,
        reset_limit=params.reset_limit,
        cooldown_range=params.cooldown_range,
        host_discovery=source,
        spares=params.spares,
    )
    request.check(params.min_workers, None, _NAMES)
    return request


class ElasticAdapter(Adapter):
    """Workers whose number changes while a function runs. Each call is a job, whose workers live as long as it."""

    def __init__(self, settings: Any, params: ElasticParams, environ: Mapping[str, str]) -> None:
        """ValueError for wrong parameters."""
        super().__init__(settings, variables(elastic_timeout_seconds=params.elastic_timeout) | dict(environ))
        self._params = params
        self._request = check_elastic(settings, params)
        self.driver = ElasticView(lambda: self._call)
        self._environ: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._jobs = 0
        self._call: _ElasticCall | None = None  # that waits for its function, or runs
        self._queue: Any = None

    # -- the beginning and the end -------------------------------------------------------------------------------------

    def _begin(self, environ: dict[str, str], settings: Settings) -> None:
        """Waits until there is room for the fewest workers. They start with each call, as does the executable."""
        self._environ = environ
        self._coordinator = coordinator_for((), settings, self._nics)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="horovod-ray-elastic", daemon=True)
        self._thread.start()
        self._ready_call()

    def _end(self) -> None:
        loop, self._loop = self._loop, None
        call, self._call = self._call, None
        if loop is not None and self._thread is not None:
            if call is not None:
                with contextlib.suppress(Exception):
                    _close(call, loop)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():
                loop.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        raise _not_elastic("run_remote", "run")

    def execute(self, fn: Callable[[Any], Any], meanwhile: Meanwhile | None = None) -> list[Any]:
        call = self._ready_call()
        loop = self._loop
        assert loop is not None
        shared = [ray.put(one) for one in (fn, *self._executable)]  # once, and not once for each worker
        running = asyncio.run_coroutine_threadsafe(call.run(tuple(shared), self._queue), loop)
        try:
            wait(lambda timeout_s: bool(concurrent.futures.wait([running], timeout_s).done), meanwhile)
            return running.result()
        except concurrent.futures.CancelledError:
            sentence = "shutdown() was called while the function ran, so there is no result."
            raise RuntimeError(coded(LaunchCode.WORKERS_NOT_STARTED, sentence)) from None
        except BaseException as error:
            if not running.done():
                self.interrupt(why_interrupted(error))
            raise
        finally:
            if self._call is call:
                self._call = None

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        raise _not_elastic("execute_single", "execute")

    def interrupt(self, why: str) -> None:
        call, loop = self._call, self._loop
        if call is not None and loop is not None:
            _close(call, loop)

    def stream_to(self, queue: Any) -> None:
        self._queue = queue

    def _ready_call(self) -> _ElasticCall:
        """A call that has room for the fewest workers; ValueError or RuntimeError with a sentence where there is none
        in time.
        """
        if self._call is None:
            loop, coordinator = self._loop, self._coordinator
            if loop is None or coordinator is None:
                raise not_started()
            self._jobs += 1
            wait_s = self._settings.placement_group_timeout_s
            work = Work(self._job_name(), self._params, self._environ, coordinator, wait_s)
            call = self._call = _ElasticCall(self._request, work, self._params.override_discovery)
            try:
                asyncio.run_coroutine_threadsafe(call.begin(), loop).result()
            except BaseException:
                if self._call is call:  # not shut down meanwhile
                    self._call = None
                    _close(call, loop)
                raise
        return self._call


class _ElasticCall:
    """One call of a function on all workers: `begin`, then `run`, or `close` in between. In one event loop."""

    def __init__(self, request: ElasticRequest, work: Work, asks_autoscaler: bool) -> None:
        self.work = work
        replacement = request.replacement(request.min_num_proc or 1)
        assert replacement is not None
        work.environ = {**work.environ, **elastic_variables(replacement)}
        self._request = request
        self._replacement = replacement
        self._asks_autoscaler = asks_autoscaler
        self._given: asyncio.Future[None] | None = None  # done when the function is there
        self._running: asyncio.Task[jobs_pb2.JobRecord] | None = None
        self.agents: RayAgents | None = None

    async def begin(self) -> None:
        """Waits until there is room for the fewest workers. RuntimeError or ValueError with a sentence."""
        loop = asyncio.get_running_loop()
        ready, self._given = loop.create_future(), loop.create_future()
        self._running = asyncio.create_task(self._drive(ready))
        await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._running

    async def run(self, call: tuple[Any, ...], queue: Any) -> list[Any]:
        """The results by rank of the last world. call: what each worker does with `BaseHorovodWorker.train`."""
        assert self._given is not None
        assert self._running is not None
        self.work.call, self.work.queue = call, queue
        self._given.set_result(None)
        record = await self._running
        if record.state != jobs_pb2.JOB_STATE_SUCCEEDED:
            raise _failure(record, self.work.errors)
        return _results(self.work.ended)

    async def close(self) -> None:
        """Ends all workers. Idempotent."""
        if self._running is not None:
            await end_tasks([self._running])

    async def _drive(self, ready: asyncio.Future[None]) -> jobs_pb2.JobRecord:
        work, request, policy = self.work, self._request, self._replacement
        supply = request.supply()
        assert supply is not None
        scheduler = work.coordinator.scheduler()
        agents = self.agents = RayAgents(scheduler, work)
        spec = jobs_pb2.JobSpec(command=["horovod.ray"], processes=1)
        settings = resolve(work.environ)
        write_policy(spec, policy, work.environ)
        fewest, wait_s = spec.policy.fewest, settings.elastic_timeout_seconds
        driver = Driver(supply, agents, fewest, policy.most_slots, wait_s, _tell, "elastic_timeout")

        async def follow(changed: Changed, prepare: Prepare) -> jobs_pb2.JobRecord:
            ready.set_result(None)
            assert self._given is not None
            await self._given
            prepare(scheduler)
            room = sum(host.slots for host in spec.hosts)
            spec.processes = policy.slots(room)
            return await scheduler.run(spec, work.job, changed)

        def done() -> None:
            if _is_complete(work.ended):
                for agent in agents.all.values():
                    agent.kill(code=0)  # they came too late to be in a world

        work.done = done
        most = policy.most_slots or fewest
        requests = ResourceRequests(work.params, most, lambda: driver.slots, lambda: driver.aside)
        tasks = [asyncio.create_task(requests.keep())] if self._asks_autoscaler else []
        try:
            return await driven(driver, spec, None, replacements_told(_log.info), lambda job: None, follow)
        except asyncio.CancelledError:
            if self._given is not None and self._given.done():
                scheduler.stop(signal.SIGTERM)  # else it would go on when agents come for the next call
            raise
        finally:
            await end_tasks(tasks)
            await agents.close()


def _close(call: _ElasticCall, loop: asyncio.AbstractEventLoop) -> None:
    asyncio.run_coroutine_threadsafe(call.close(), loop).result(_CLOSE_S)


def _is_complete(ended: Sequence[Trained]) -> bool:
    """Whether all ranks of the last world have returned: then the work of the job is done."""
    last = max(ended, key=lambda one: one.epoch, default=Trained(0))
    ranks = {one.rank for one in ended if one.epoch == last.epoch and one.code == 0}
    return bool(last.epoch and last.size) and len(ranks) == last.size


def _results(ended: Sequence[Trained]) -> list[Any]:
    """The results of the last world, by rank."""
    epoch = max((one.epoch for one in ended if one.code == 0), default=0)
    if not epoch:
        sentence = "All workers ended before the function returned: there is no result. Does it call sys.exit()?"
        raise RuntimeError(coded(LaunchCode.RANK_FAILED, sentence))
    last = {one.rank: one.value for one in ended if one.code == 0 and one.epoch == epoch}
    return [last[rank] for rank in sorted(last)]


def _failure(record: jobs_pb2.JobRecord, errors: Sequence[BaseException]) -> RuntimeError:
    """Why the job failed. Its cause is the last exception of a worker, if one has raised any."""
    sentence = record.sentence or "The job was ended."
    code = code_of(sentence) or LaunchCode.RANK_FAILED
    last = f" The last exception of a worker: {described(errors[-1])}" if errors else ""
    error = RuntimeError(coded(code, f"{without_code(sentence)}{last}"))
    error.__cause__ = errors[-1] if errors else None
    return error


def _tell(sentence: str) -> None:
    _log.warning("%s", sentence)


def _not_elastic(method: str, instead: str) -> NotImplementedError:
    sentence = f"{method}() is for a fixed number of workers: call {instead}() on an elastic executor."
    return NotImplementedError(coded(LaunchCode.UNSUPPORTED_OPTION, sentence))


# -- what programs may ask while it runs: executor.driver --------------------------------------------------------------


@dataclass(frozen=True)
class SlotInfo:
    """One place for a worker on a host. hostname: None where no worker has it."""

    hostname: str | None = None
    number: int = -1  # that the worker keeps for as long as the job lives; no rank
    pid: int = 0  # 0: it has not started yet


class ElasticView:
    """May be asked by any thread, at any time."""

    def __init__(self, call: Callable[[], Any]) -> None:
        """call: the one that waits for its function, or runs; None where there is none."""
        self._call = call

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """The worker on this host that is the slot-th there, from 0."""
        call = self._call()
        agent = call.agents.all.get(host) if call is not None and call.agents is not None else None
        running = sorted((one.rank, one.pid) for one in list(agent.processes) if one.code is None) if agent else []
        return SlotInfo(host, *running[slot]) if 0 <= slot < len(running) else SlotInfo()

    def get_worker_client(self, slot: SlotInfo) -> SlotInfo | None:
        """The slot, once its worker is in a world, so that it hears of changes; else None."""
        call = self._call()
        if call is None or not slot.hostname:
            return None
        now = next(
            (
                one
                for agent in list(call.agents.all.values())
                if agent.host == slot.hostname
                for one in list(agent.processes)
                if one.rank == slot.number and one.code is None
            ),
            None,
        )
        if now is None or (slot.hostname, now.pid) not in call.work.coordinator.members(call.work.job):
            return None
        return SlotInfo(slot.hostname, now.rank, now.pid)
