"""The stories of the jobs that are served here (core/world/story.py): told to the log and the metrics, and stored.

They are written beside what they are about, never before it, and nobody waits for that: one write for each job at a
time, of all that is new. What a coordinator that ends had not written yet, the next one makes up from the job's world.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horovod.base.tasks import end_tasks
from horovod.base.telemetry.logs import about
from horovod.coordinator.core.world.effects import Effect, Formed, Gone
from horovod.coordinator.core.world.story import FORMED, OVER, WAITS, Moment, Story, after
from horovod.coordinator.metrics import CoordinatorMetrics
from horovod.coordinator.store import Guard, Store, StoreError
from horovod.coordinator.store.records import KEPT_STORY_S, read_story, write_story
from horovod.protos.v1 import membership_pb2, story_pb2

WRITE_EVERY_S = 0.1  # seconds between two writes, at least: a world may lose its members one by one, in a moment
KEPT_OVER = 64  # stories of jobs that are over, in memory

_LOGGED = (FORMED, WAITS, OVER)  # each member that is gone, and a job that is taken over, have a line anyhow
_log = logging.getLogger(__name__)


@dataclass
class _Told:
    """A story, and how far it was told."""

    story: Story
    logged: int = 0  # the number of the latest entry in the log
    stored: int = 0  # number of the latest entry in the store
    stored_at_s: float = 0.0
    lease: int | None = None
    writing: asyncio.Task[None] | None = None
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # somebody waits for `writing`


class Stories:
    def __init__(
        self,
        store: Store,
        metrics: CoordinatorMetrics,
        guard: Callable[[str], Guard | None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """guard: of a job that is served here."""
        self._store = store
        self._metrics = metrics
        self._guard = guard
        self._clock = clock
        self._wall_clock = wall_clock
        self._stories: dict[str, _Told] = {}
        self._over: OrderedDict[str, Story] = OrderedDict()

    # -- what happens --------------------------------------------------------------------------------------------------

    def came(self, job: str) -> None:
        """A process waits for the job's next world."""
        self._story_of(job).came(self._moment())

    def heard(self, effects: Sequence[Effect]) -> None:
        """Effects that are carried out now."""
        for effect in effects:
            if isinstance(effect, Formed):
                job = effect.world.job
                took_s = self._story_of(job).formed(effect.world, effect.claims, self._moment())
                self._metrics.worlds_formed.add(1, job)
                self._metrics.forming_seconds.observe(took_s, job)
                self._tell(job)
            elif isinstance(effect, Gone):
                told = effect.told
                _log.info("%s", told.sentence, extra=about(effect.job, told.epoch, told.rank))
                self._story_of(effect.job).gone(told, self._moment())
                if not told.orderly:
                    self._metrics.losses.add(1, effect.job, effect.evidence)
                self._tell(effect.job)

    def waits(self, job: str, sentence: str) -> None:
        """What those that wait for the job's next world wait for, or ""."""
        if sentence or job in self._stories:
            self._story_of(job).waits(sentence, self._moment())
            self._tell(job)

    def over(self, job: str) -> None:
        """No process of the job is left."""
        if job in self._stories:
            self._story_of(job).over(self._moment())
            self._tell(job)

    # -- other coordinators --------------------------------------------------------------------------------------------

    async def load(self, job: str) -> None:
        """This coordinator is about to serve the job: its story goes on."""
        record = None
        try:
            record = await read_story(self._store, job)
        except StoreError as error:
            _log.info("The earlier history of job %r is not known: %s", job, error)
        story = Story(job, record)
        self._stories[job] = _Told(story, logged=story.number, stored=story.number, stored_at_s=self._clock())
        self._over.pop(job, None)

    def taken_over(self, record: membership_pb2.WorldRecord, gone: membership_pb2.GoneRecord) -> None:
        """As `Story.taken_over`."""
        self._story_of(record.world.job).taken_over(record, gone, self._moment())
        self._tell(record.world.job)

    async def settled(self, job: str) -> None:
        """Waits until the store has the story, or does not take it."""
        told = self._stories.get(job)
        if told is not None and told.writing is not None:
            told.hurry.set()
            await asyncio.wait([told.writing])

    def forget(self, job: str) -> None:
        """The job is not served here any more. The story of one that is over is kept for a while."""
        told = self._stories.pop(job, None)
        if told is not None and told.story.is_over:
            self._over[job] = told.story
            if len(self._over) > KEPT_OVER:
                self._over.popitem(last=False)

    async def stop(self) -> None:
        await end_tasks([told.writing for told in self._stories.values() if told.writing is not None])

    # -- questions -----------------------------------------------------------------------------------------------------

    def entries(self, job: str) -> tuple[story_pb2.StoryEntry, ...]:
        """The latest ones, the oldest first. Any thread."""
        told = self._stories.get(job)
        story = told.story if told is not None else self._over.get(job)
        return story.entries if story is not None else ()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _story_of(self, job: str) -> Story:
        if job not in self._stories:
            self._stories[job] = _Told(Story(job))
        return self._stories[job].story

    def _moment(self) -> Moment:
        return Moment(self._clock(), self._wall_clock())

    def _tell(self, job: str) -> None:
        """Logs the new entries of the story, and starts to write it to the store."""
        told = self._stories[job]
        for entry in after(told.story.entries, told.logged):
            if entry.event in _LOGGED:
                # Sentences about those who wait name the job.
                sentence = entry.sentence if entry.event == WAITS else f"Job {job!r}: {entry.sentence}"
                _log.info("%s", sentence, extra=about(job, entry.epoch or None))
        told.logged = told.story.number
        is_old = told.logged > 0 and self._clock() - told.stored_at_s > KEPT_STORY_S / 2
        if (told.stored < told.logged or is_old) and told.writing is None and self._guard(job) is not None:
            told.writing = asyncio.get_running_loop().create_task(self._write(job, told))

    async def _write(self, job: str, told: _Told) -> None:
        try:
            is_new = True
            while is_new and (guard := self._guard(job)) is not None:
                number, told.stored_at_s = told.story.number, self._clock()
                told.lease = await write_story(self._store, told.story.record, guard, told.lease)
                told.stored = number
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(told.hurry.wait(), WRITE_EVERY_S)
                is_new = told.story.number > number
        except StoreError as error:  # the next look at the job's members makes another attempt
            _log.debug("The story of job %r is not in the store: %s", job, error)
        finally:
            told.writing = None
            told.hurry.clear()
