"""Carries out what follows from decisions about jobs: for each job in order, and one job keeps no other waiting.

A record is in the store before anybody acts on it. So what follows a write waits for it, job by job (a *lane*):

* the store does not answer: the write is made again until it does, or this coordinator leads no more
* it takes no writes until a person does something: likewise; meanwhile people are told of the job, and its ranks are
  ended where that was decided, but nothing is begun (`may_precede_record`). A new job is withdrawn.
* it refuses this write for good: it is not made again; a new job is withdrawn, any other one ends (`Cluster.unkept`)

Each record is written in its turn, since somebody waits for it (`done`). Of who is gone from a world only the latest
record counts, so the hub of members holds back what follows in a simpler way, and one write covers all (worlds.py).
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from horovod.coordinator.core.cluster.effects import (
    Changed,
    Coming,
    Command,
    Effect,
    Erase,
    Notice,
    Save,
    begins,
    job_of,
    may_precede_record,
)
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.store import Guard, Store, StoreError, TooLargeError, WritesRefusedError
from horovod.coordinator.store.holding import STORE_RETRY_S, until_stored
from horovod.coordinator.store.jobs import forget_job
from horovod.coordinator.store.records import submitted_key

REFUSED_RETRY_S = 2.0  # seconds between attempts when only a person can help

_log = logging.getLogger(__name__)

Act = Command | Changed | Notice | RankEnded | Coming


@dataclass
class _Lane:
    job: str
    work: deque[Effect | asyncio.Future[None]] = field(default_factory=deque)
    trouble: str = ""  # why the store does not have the latest record yet
    news: asyncio.Event = field(default_factory=asyncio.Event)  # more work has come
    task: asyncio.Task[None] | None = None


class Lanes:
    """Belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        guard: Callable[[], Guard | None],
        act: Callable[[Act], None],
        withdraw: Callable[[str], None],
        unkept: Callable[[str, str], None],
        lose: Callable[[], None],
    ) -> None:
        """guard: under which this coordinator writes now; None: it leads no more. act: does what is not a write.
        withdraw: a new job is not taken. unkept: the store will never have the record of a job, with the sentence why.
        lose: another coordinator leads.
        """
        self._store = store
        self._guard = guard
        self._act = act
        self._withdraw = withdraw
        self._unkept = unkept
        self._lose = lose
        self._lanes: dict[str, _Lane] = {}

    def put(self, effect: Effect) -> None:
        self._put(job_of(effect), effect)

    async def done(self, job: str) -> None:
        """Until everything that was decided about the job so far is done, or may be done without the store.

        Raises StoreError when it can't be for the time being, or what `clear` was called with.
        """
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(job, reached)
        await reached

    def trouble(self, job: str) -> str:
        """Why the store does not have the latest state of the job yet; "" where that is not so."""
        lane = self._lanes.get(job)
        return lane.trouble if lane else ""

    def clear(self, error: Exception) -> None:
        """What was decided and not yet done is not done any more; those who wait for it get `error`."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            _fail(lane, error)
            if lane.task is not None and lane.task is not asyncio.current_task():
                lane.task.cancel()

    def _put(self, job: str, work: Effect | asyncio.Future[None]) -> None:
        lane = self._lanes.get(job)
        if lane is None:
            lane = self._lanes[job] = _Lane(job)
            lane.task = asyncio.create_task(self._run(lane))
        lane.work.append(work)
        lane.news.set()

    async def _run(self, lane: _Lane) -> None:
        while lane.work:
            work = lane.work.popleft()
            try:
                if isinstance(work, Save | Erase):
                    await self._write(lane, work)
                else:
                    self._do(work)
            except Exception:
                _log.exception("A bug in the coordinator: an effect of the cluster failed.")
        if self._lanes.get(lane.job) is lane:
            del self._lanes[lane.job]

    def _do(self, work: Effect | asyncio.Future[None]) -> None:
        if isinstance(work, asyncio.Future):
            if not work.done():
                work.set_result(None)
        elif not isinstance(work, Save | Erase):
            self._act(work)

    async def _write(self, lane: _Lane, write: Save | Erase) -> None:
        """This coordinator alone writes records, so that a write which is uncertain is made again.

        If it leads anew meanwhile, it has read the records again and decides anew.
        """
        serving = self._guard()
        is_new = isinstance(write, Save) and write.is_new
        is_uncertain = False

        async def attempt(guard: Guard) -> None:
            await self._write_once(write, guard)
            lane.trouble = ""

        async def failed(error: StoreError, is_news: bool) -> None:
            nonlocal is_uncertain
            lane.trouble = str(error)
            if is_news:
                _log.warning("The history of job %s can't be stored yet: %s", lane.job, error)
            if not isinstance(error, WritesRefusedError):
                is_uncertain = True
                await asyncio.sleep(STORE_RETRY_S)
                return
            if is_new:
                raise error
            lane.news.clear()
            self._go_on_without(lane, error)
            with contextlib.suppress(asyncio.TimeoutError):  # work that has come may need no store
                await asyncio.wait_for(lane.news.wait(), REFUSED_RETRY_S)

        try:
            await until_stored(attempt, lambda: serving if self._guard() is serving else None, self._fenced, failed)
        except (TooLargeError, WritesRefusedError) as error:
            _log.warning("The history of job %s will not be stored: %s", lane.job, error)
            self._give_up(lane, error, is_new, is_uncertain)

    def _fenced(self, guard: Guard) -> None:
        _log.warning("Another coordinator serves agents and jobs by now.")
        if self._guard() is guard:
            self._lose()  # the lane is lost, so that nothing is done that was to follow

    async def _write_once(self, write: Save | Erase, guard: Guard) -> None:
        if isinstance(write, Save):
            await self._store.put(submitted_key(write.job), write.record, guard=guard)
        else:
            await forget_job(self._store, write.job)  # its ids are given once, and its ranks ended long ago
            await self._store.delete(submitted_key(write.job), guard=guard)

    def _give_up(self, lane: _Lane, error: StoreError, is_new: bool, is_uncertain: bool) -> None:
        """Nothing is done that was to follow; and an earlier attempt may have been stored."""
        _fail(lane, error)
        lane.trouble = ""
        if not is_new:
            self._unkept(lane.job, f"Its record can't be kept: {error}")
            return
        self._withdraw(lane.job)
        if is_uncertain:
            self.put(Erase(lane.job))

    def _go_on_without(self, lane: _Lane, error: StoreError) -> None:
        """Does what need not wait for a store that takes no writes; people hear of the rest."""
        waiting: deque[Effect | asyncio.Future[None]] = deque()
        is_held = False
        for work in lane.work:
            if isinstance(work, asyncio.Future):
                if is_held and not work.done():
                    work.set_exception(error)
                elif not is_held:
                    self._do(work)
            elif begins(work):
                is_held = True
                waiting.append(work)
            elif is_held or not may_precede_record(work):
                waiting.append(work)
            else:
                self._do(work)
        lane.work = waiting


def _fail(lane: _Lane, error: Exception) -> None:
    for work in lane.work:
        if isinstance(work, asyncio.Future) and not work.done():
            work.set_exception(error)
    lane.work.clear()
