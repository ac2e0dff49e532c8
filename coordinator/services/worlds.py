"""The worlds of jobs as the store has them: each is there before its members are told of it, and as long as it lasts.

Invariant: whoever takes a job over finds in the store at least what members of its world know. So a world is published
before it begins, and who of it is gone is written before the others hear of that.

One write of who is gone holds all that are gone until then, since a world may lose its members all at once. The records
of submitted jobs (lanes.py) are written one by one instead: somebody waits for each of them, and some of what follows
such a record may precede it where the store takes no writes.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horovod.base.errors import without_code
from horovod.base.telemetry.logs import about
from horovod.coordinator.core.world.effects import Effect, Record
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.core.world.waiting import Formation
from horovod.coordinator.store import Guard, Store, StoreError, TooLargeError, UncertainError, WritesRefusedError
from horovod.coordinator.store.holding import STORE_RETRY_S, until_stored
from horovod.coordinator.store.jobs import keep_work, next_epoch, publish_world, read_world, retract_world, write_gone
from horovod.protos.v1 import membership_pb2

from .serving import Serving
from .stories import Stories

NO_ANSWER = "it gets no answer from its store, without which no world can form or end:"
NO_WRITES = "its store takes no writes, without which no world can form or end:"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """A world that the store has."""

    epoch: int
    secret: bytes
    guard: Guard


class StoredWorlds:
    """Of the jobs that are served here."""

    def __init__(
        self,
        store: Store,
        membership: Membership,
        serving: Serving,
        secret: Callable[[], bytes],
        do: Callable[[str, Sequence[Effect]], None],
        stories: Stories,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """secret: makes the secret of a world. do: carries out effects on members of a job, now. stories: of the jobs
        that are served here. wall_clock: seconds since 1970, which coordinators of one store share.
        """
        self._wall_clock = wall_clock
        self._store = store
        self._membership = membership
        self._serving = serving
        self._secret = secret
        self._do = do
        self._stories = stories
        self._revisions: dict[str, int] = {}  # job -> the revision of its world in the store

    async def publish(self, formation: Formation) -> Published | None:
        """Takes the next epoch from the store and writes the world there.

        None if its members, or the job, are not here any more. Raises TooLargeError.
        """
        job = formation.job

        async def write(guard: Guard) -> Published | None:
            while self._membership.is_forming(formation):
                epoch, secret = await next_epoch(self._store, job), self._secret()
                entry = await publish_world(self._store, formation.record(epoch, secret), guard)
                if entry is not None:
                    # Where another coordinator serves the job by now, the world is that one's to retract.
                    if self._serving.guard(job) != guard:
                        return None
                    self._revisions[job] = entry.revision
                    return Published(epoch, secret, guard)
                # Another coordinator has published a later epoch; the next one is later still.
            return None

        return await until_stored(
            write,
            lambda: self._serving.guard(job) if self._membership.is_forming(formation) else None,
            lambda guard: self._serving.fenced(job, guard),
            lambda error, is_news: self._hindered(job, "can't form its world yet", error, is_news),
        )

    async def record_gone(self, job: str, held: Sequence[Effect]) -> None:
        """Writes who of the job's world is gone, as the records in `held` ask for, also those that come meanwhile."""
        count = 0

        async def write(guard: Guard) -> bool:
            nonlocal count
            count = len(held)
            record = self._membership.gone(job)
            if record is not None:
                await write_gone(self._store, job, record, guard)
            return record is not None

        while count != len(held) and any(isinstance(effect, Record) for effect in held):
            try:
                is_written = await until_stored(
                    write,
                    lambda: self._serving.guard(job),
                    lambda guard: self._serving.fenced(job, guard),
                    lambda error, is_news: self._hindered(job, "can't tell yet who of it is gone", error, is_news),
                )
            # Waiting would not help; only a coordinator that takes over would need the record.
            except TooLargeError as error:
                _log.error("The list of processes of job %r that are gone can't be stored: %s", job, error)
                return
            if not is_written:
                return

    async def read(self, job: str) -> tuple[membership_pb2.WorldRecord, membership_pb2.GoneRecord] | None:
        """The world that another coordinator has left, or this one before it was replaced, and who of it is gone."""
        await self._stories.load(job)
        found = await read_world(self._store, job)
        if found is None:
            return None
        record, self._revisions[job], gone = found
        return record, gone

    def rested_s(self, record: membership_pb2.WorldRecord) -> float:
        """For how long the job of a record that was read has had no process."""
        return max(0.0, self._wall_clock() - record.work.over_at) if record.work.over_at else 0.0

    async def retract(self, job: str, guard: Guard) -> None:
        """Deletes the world from the store: its members are all gone, or were never told of it."""
        if (revision := self._revisions.pop(job, None)) is not None:
            await retract_world(self._store, job, revision, guard)

    async def release(self, job: str) -> None:
        """Serves the job no more, of which no process is left, unless one has come by now."""
        written: list[membership_pb2.WorldRecord | None] = []

        def is_idle() -> bool:
            # A process that came and went while the store was asked has told more of the job's work, or has let an
            # agent tell it. Then the release that follows its end writes that.
            is_news = bool(written) and written[-1] != self._membership.kept(job)
            return not is_news and not self._membership.knows(job)

        async def retract(guard: Guard) -> None:
            written.append(self._membership.kept(job))
            if (kept := self._membership.kept(job)) is not None:
                self._revisions.pop(job, None)
                dated = membership_pb2.WorldRecord()  # a copy: is_idle compares `kept`, which has no date
                dated.CopyFrom(kept)
                dated.work.over_at = self._wall_clock()
                # After an error all of the world stays in the store.
                with contextlib.suppress(WritesRefusedError, UncertainError):
                    await keep_work(self._store, dated, guard)
            else:
                await self.retract(job, guard)
            await self._stories.settled(job)

        await self._serving.release(job, is_idle, retract)
        if self._serving.guard(job) is None:
            self._stories.forget(job)

    def forget(self, job: str) -> None:
        """Another coordinator serves the job."""
        self._revisions.pop(job, None)
        self._stories.forget(job)

    async def _hindered(self, job: str, how: str, error: StoreError, is_news: bool) -> None:
        """Tells those that wait for the job's next world why it can't form, and waits before the next attempt."""
        if is_news:
            _log.warning("Job %r %s: %s", job, how, error, extra=about(job))
        why = NO_WRITES if isinstance(error, WritesRefusedError) else NO_ANSWER
        self._do(job, self._membership.hindered(job, f"{why} {without_code(error)}"))
        await asyncio.sleep(STORE_RETRY_S)
