"""The agents of an elastic job on Ray: one for each host, in the driver, whose processes are actors.

the scheduler says    start     an actor on the host, by Ray's resource "node:<host>"
                      leave     its process is asked to leave at the next commit; ended after a grace
                      end, stop, finish
and hears             an actor has ended: its function returned (0), raised (1), or its process died (-9)
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from horovod.base.errors import LaunchCode, coded
from horovod.base.tasks import end_tasks
from horovod.base.words import plural
from horovod.coordinator.in_process import InProcessScheduler
from horovod.launch.own_agents import OwnAgents
from horovod.launch.own_coordinator import OwnCoordinator
from horovod.protos.v1 import agents_pb2 as pb
from horovod.ray.adapter import BaseParams, kill
from horovod.ray.coordinator import gpus_of_elastic, membership
from horovod.ray.strategy import in_words
from horovod.ray.worker import Trained, described
from horovod.rendezvous.hosts import HostSlots
from horovod.worker.agent.orders import Order, obey

FAILURE_GRACE_S = 3.0  # how long others may go on after the failure that ends the job
_ASK_AGAIN_S = 1.0  # a process between two worlds can't be asked to leave
_END_S = 10.0  # for the news of an actor that was killed
_NODE_SHARE = 0.01  # of the resource of a node, of which it has 1: so many actors fit that it limits nothing
# Ray tells of a killed actor within some 20 ms, and of a killed node seconds later. A world that does not wait for its
# word goes on with other workers of the same host, and loses them in turn.
_WORD_S = 0.1
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TAKEN_AWAY = "its host is taken away"

_log = logging.getLogger(__name__)


@dataclass
class Work:
    """The work of the actors of one job."""

    job: str
    params: BaseParams
    environ: Mapping[str, str]
    coordinator: OwnCoordinator
    start_s: float  # within which Ray has to place an actor and start it
    call: Any = None  # the function, and the arguments from which each makes its executable; in Ray's object store
    queue: Any = None  # of the messages that they log
    ended: list[Trained] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)  # in the order in which they came
    done: Callable[[], None] = lambda: None  # called after each of `ended`


@dataclass
class Process:
    """One actor, which runs or has ended."""

    rank: int
    incarnation: int
    actor: Any = None  # None: Ray has not been asked for it yet
    pid: int = 0  # 0: it has not started yet
    gpus: tuple[str, ...] = ()
    code: int | None = None  # None: it runs
    found: asyncio.Event = field(default_factory=asyncio.Event)  # its pid and GPUs are known, or no longer awaited
    is_ended_here: bool = False  # it was killed by this agent, or asked to leave
    on_kill: int = -signal.SIGKILL  # how its end is reported once it was killed here

    def state(self) -> dict[str, Any]:
        """The fields of its RankStatus (agents.proto)."""
        ended = {} if self.code is None else {"ended": True, "code": self.code, "stopped": self.is_ended_here}
        return {"rank": self.rank, "incarnation": self.incarnation, "pid": self.pid, **ended}


class RayAgent(OwnAgents):
    """The agent of one host and one job."""

    def __init__(self, host: HostSlots, scheduler: InProcessScheduler, work: Work) -> None:
        super().__init__(scheduler, {host.name: host.slots}, _WORD_S)
        self.host, self.slots = host.name, host.slots
        self.ended = asyncio.Event()  # never set: nothing of it runs on the host
        self.processes: list[Process] = []  # the latest of each rank, in the order of their starts
        self._work = work
        self._is_open = True  # processes may be started
        self._share: pb.StartShare | None = None  # the latest
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[tuple[int, int]] = set()

    def why(self) -> str:
        return coded(LaunchCode.NO_AGENT_ON_HOST, "it is gone")

    def set_slots(self, slots: int) -> None:
        """The host has so many slots from now on."""
        self.slots = slots
        self._tell(self.host, slots=pb.Slots(slots=slots))

    async def end(self) -> None:
        """Ends its actors and itself."""
        if self._are_gone:
            return
        self._is_open = False
        self.kill()
        running = [task for task in self._tasks if not task.done()]
        if running:
            await asyncio.wait(running, timeout=_END_S)
        self._report_all()
        self.detach()
        await end_tasks(self._tasks)

    def kill(self, code: int = -signal.SIGKILL) -> None:
        """Ends all actors now. code: how that is reported."""
        for process in self.processes:
            self._kill(process, code)

    # -- orders of the scheduler ---------------------------------------------------------------------------------------

    def _obey(self, name: str, order: Order) -> None:
        obey(order, self)

    def leave(self, ranks: Mapping[int, int], grace_s: float) -> None:
        for rank, incarnation in ranks.items():
            if (rank, incarnation) not in self._leaving:
                self._leaving.add((rank, incarnation))
                self._do(self._have_leave(rank, incarnation, grace_s))

    def finish(self) -> None:
        self._is_open = False
        self._report_all()

    def end_after_failure(self) -> None:
        self.finish()
        asyncio.get_running_loop().call_later(FAILURE_GRACE_S, self.kill)

    def stop(self, signum: int) -> None:
        self.finish()
        self.kill()

    def forward(self, signum: int) -> None:
        """Ray delivers no signals."""

    def _start(self, name: str, share: pb.StartShare) -> None:
        self._share = share
        for placed in share.ranks:
            known = next((one for one in self.processes if one.rank == placed.rank), None)
            if known is not None and known.incarnation >= placed.incarnation:
                continue
            if known is not None:
                self.processes.remove(known)
            process = Process(placed.rank, placed.incarnation)
            self.processes.append(process)
            self._do(self._follow(process, placed, share.size))
        self._report_all()

    def _actor(self, rank: int, size: int) -> Any:
        # Not in the placement group of a trial that has this executor: it has no piece of any host.
        return self._work.params.actor(rank, size, "DEFAULT", {f"node:{self.host}": _NODE_SHARE})

    async def _have_leave(self, rank: int, incarnation: int, grace_s: float) -> None:
        """Has the process leave at the next commit, or ends it where it is in no world, or after the grace."""
        loop = asyncio.get_running_loop()
        process = next((one for one in self.processes if (one.rank, one.incarnation) == (rank, incarnation)), None)
        end_s = loop.time() + grace_s
        while process is not None and process.code is None:
            process.is_ended_here = True
            work = self._work
            is_member = (self.host, process.pid) in work.coordinator.members(work.job)
            if not is_member or loop.time() >= end_s:
                self._kill(process)
                return
            work.coordinator.ask_to_leave(work.job, rank, incarnation, _TAKEN_AWAY)
            await asyncio.sleep(min(_ASK_AGAIN_S, max(0.0, end_s - loop.time())))

    def _kill(self, process: Process, code: int = -signal.SIGKILL) -> None:
        if process.code is None:
            process.is_ended_here, process.on_kill = True, code
            kill(process.actor)

    # -- what becomes of an actor --------------------------------------------------------------------------------------

    async def _follow(self, process: Process, placed: pb.PlacedRank, size: int) -> None:
        work, code = self._work, 1
        try:
            trained = await self._train(process, placed, size)
            code = trained.code
            work.ended.append(trained)
        except RayActorError as error:
            code = process.on_kill if process.is_ended_here else -signal.SIGKILL
            if not process.is_ended_here:
                _log.warning("The actor of slot %d on host %s was lost: %s", process.rank, self.host, described(error))
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            if not process.is_ended_here:
                trace = _traceback(error)
                if trace and hasattr(cause, "add_note"):  # Python 3.11
                    cause.add_note(trace)
                work.errors.append(cause)
                _log.warning("Slot %d on host %s failed: %s\n%s", process.rank, self.host, described(cause), trace)
        finally:
            process.code = code
            process.found.set()
            self._report_all()
            kill(process.actor)
        work.done()

    async def _train(self, process: Process, placed: pb.PlacedRank, size: int) -> Trained:
        work = self._work
        if process.is_ended_here:
            return Trained(process.on_kill)
        actor = process.actor = self._actor(placed.rank, size)
        finding = answer(actor.whereabouts.remote())
        await asyncio.wait({finding}, timeout=work.start_s)
        if not finding.done():
            self._has_no_place(process)
        here = await finding
        process.pid, process.gpus = here.pid, here.gpus
        process.found.set()
        self._report_all()
        gpus = await self._visible_gpus(process) if work.params.gpus else []
        told = membership(
            work.coordinator, work.job, work.environ, self.host, size, placed, gpus, placed.incarnation or 1
        )
        actor.set_queue.remote(work.queue)
        await answer(actor.enter.remote(*told))
        trained = await answer(actor.train.remote(*work.call))
        assert isinstance(trained, Trained)
        return trained

    def _has_no_place(self, process: Process) -> None:
        """Others use the resources that its actor needs. If some actors have their places, the host has as many slots,
        and the scheduler has one process leave: this one, or another one that makes room for it. Else TimeoutError.
        """
        work = self._work
        needs = in_words(work.params.bundle())
        sentence = f"Ray has not started an actor on host {self.host} within {work.start_s:g} s"
        why = f"others use its resources ({needs} for each), or it is gone"
        longer = "placement_group_timeout_s of create_settings() waits longer."
        slots = sum(1 for one in self.processes if one.pid and one.code is None)
        if not slots:
            raise TimeoutError(coded(LaunchCode.WORKERS_LATE, f"{sentence}: {why}. {longer}"))
        process.found.set()
        if slots < self.slots:
            late = f"{sentence}: others use its resources ({needs} for each). The job has {plural(slots, 'slot')} there"
            _log.warning("%s", coded(LaunchCode.WORKERS_LATE, f"{late} from now on. {longer}"))
            self.set_slots(slots)

    async def _visible_gpus(self, process: Process) -> list[str]:
        """Its own are where its local rank says, so those of the slots before it have to be known first."""
        for one in [one for one in self.processes if one.rank < process.rank]:
            await one.found.wait()
        others = sorted((one.rank, one.gpus) for one in self.processes if one is not process and one.code is None)
        before = sum(1 for rank, gpus in others if rank < process.rank and gpus)
        return gpus_of_elastic(process.gpus, [gpus for _, gpus in others], before)

    # -- reports to the scheduler --------------------------------------------------------------------------------------

    def _report_all(self) -> None:
        if self._share is not None:
            over = not self._is_open and all(one.code is not None for one in self.processes)
            ended_first = sorted(self.processes, key=lambda one: one.code is None)
            self._report(self.host, self._share, [one.state() for one in ended_first], over)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(work))


class RayAgents:
    """The agents of one job, for its Driver."""

    def __init__(self, scheduler: InProcessScheduler, work: Work) -> None:
        self._scheduler = scheduler
        self._work = work
        self.all: dict[str, RayAgent] = {}  # by host

    async def bring_up(self, host: HostSlots) -> RayAgent | str:
        agent = RayAgent(host, self._scheduler, self._work)
        try:
            await agent.attach()
        except ValueError as error:
            return str(error)
        self.all[host.name] = agent
        return agent

    async def let_go(self, agent: RayAgent) -> None:
        await agent.end()
        if self.all.get(agent.host) is agent:
            del self.all[agent.host]

    async def close(self) -> None:
        """Ends all actors."""
        await asyncio.gather(*(self.let_go(agent) for agent in list(self.all.values())))


def _traceback(error: BaseException) -> str:
    """Where an actor has raised it, with files and lines, without colours; "" if Ray does not say."""
    return _COLOUR.sub("", str(error)).strip() if isinstance(error, RayTaskError) else ""


def answer(ref: Any) -> asyncio.Future[Any]:
    """The result of a call of Ray, in this event loop."""
    return asyncio.wrap_future(ref.future())
