"""What a coordinator learns of jobs through the store, from the other coordinators of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from horovod.coordinator.core.cluster.job import rank_ends
from horovod.coordinator.core.ending import Attendance, RankEnded
from horovod.coordinator.store import Store, StoreError
from horovod.coordinator.store.jobs import JOBS, is_serving_key, job_of, serving_key
from horovod.coordinator.store.records import SUBMITTED, submitted_job, submitted_key
from horovod.protos.v1 import jobs_pb2, membership_pb2

from .serving import REPLICAS

if TYPE_CHECKING:  # the hub watches with what stands here
    from .hub import Hub
    from .peers import Peers

AGAIN_S = 0.5  # seconds between attempts to watch the store

_log = logging.getLogger(__name__)


# What agents have reported of ranks, for a coordinator that serves a job's world but not its agents (ADR 44).
#
# The coordinator that serves agents writes how ranks end into the record of their job. Each coordinator watches these
# records, so that the end of a process is evidence (core/world/life.py) wherever its world is served.


class Outcomes:
    def __init__(self, store: Store, serves: Callable[[str], bool], tell: Callable[[RankEnded], None]) -> None:
        """serves: whether the job's world is served here. tell: hears of each outcome, of some more than once."""
        self._store = store
        self._serves = serves
        self._tell = tell

    async def look(self, job: str) -> None:
        """Reads the outcomes of a job that is served here from now on. Raises StoreError."""
        if (entry := await self._store.get(submitted_key(job))) is not None:
            self._tell_all(jobs_pb2.JobRecord.FromString(entry.value))

    async def watch(self) -> None:
        """Watches the store for outcomes, for ever."""
        while True:
            try:
                entries, revision = await self._store.range(SUBMITTED)
                for entry in entries:
                    self._heard(entry.key, entry.value)
                async for change in self._store.watch(SUBMITTED, revision + 1):
                    self._heard(change.key, change.value)
            except StoreError as error:
                _log.debug("The watch over what agents report was interrupted: %s", error)
            await asyncio.sleep(AGAIN_S)

    def _heard(self, key: str, value: bytes | None) -> None:
        if value is not None and self._serves(submitted_job(key)):
            self._tell_all(jobs_pb2.JobRecord.FromString(value))

    def _tell_all(self, record: jobs_pb2.JobRecord) -> None:
        for ended in rank_ends(record):
            self._tell(ended)


# Jobs in the store that nobody serves: their coordinator is dead, and no member has asked another one since.
#
# That is so when a job's processes and its coordinator end together, for a whole cluster that loses its power. A
# coordinator that has seen such a job unchanged for a day takes it over. Then it goes the way of every world: its
# members, if there are any, come back or are lost, and what is kept of it is deleted (Serving.release).

ORPHAN_S = 24 * 3600.0  # a member that is alive asks for the job within seconds
LOOK_S = 600.0


class Orphans:
    def __init__(
        self,
        store: Store,
        serves: Callable[[str], bool],
        adopt: Callable[[str], Awaitable[None]],
        orphan_s: float = ORPHAN_S,
        look_s: float = LOOK_S,
    ) -> None:
        """serves: whether the job is served here. adopt: takes over a job; may raise StoreError."""
        self._store = store
        self._serves = serves
        self._adopt = adopt
        self._orphan_s = orphan_s
        self._look_s = look_s
        self._seen: dict[str, tuple[int, float]] = {}  # job -> its latest revision, and since when it has that

    async def watch(self) -> None:
        """Looks for such jobs, for ever."""
        while True:
            try:
                for job in await self._find(asyncio.get_running_loop().time()):
                    _log.warning("Job %r has had no coordinator for long; this one takes it over.", job)
                    await self._adopt(job)
            except StoreError as error:
                _log.debug("The look for jobs that nobody serves was interrupted: %s", error)
            await asyncio.sleep(self._look_s)

    async def _find(self, now_s: float) -> list[str]:
        alive = {entry.key.removeprefix(REPLICAS) for entry in (await self._store.range(REPLICAS))[0]}
        latest: dict[str, int] = {}
        served = set()
        for entry in (await self._store.range(JOBS))[0]:
            job = job_of(entry.key)
            latest[job] = max(latest.get(job, 0), entry.revision)
            if is_serving_key(entry.key) and membership_pb2.Serving.FromString(entry.value).replica in alive:
                served.add(job)
        self._seen = {
            job: (revision, now_s if self._seen.get(job, (0, 0.0))[0] != revision else self._seen[job][1])
            for job, revision in latest.items()
            if job not in served and not self._serves(job)
        }
        return [job for job, (_, since_s) in self._seen.items() if now_s - since_s >= self._orphan_s]


# Which hosts of a job's world are connected, to whichever coordinator serves it: evidence that they live.
#
# The coordinator that serves agents asks for it before it counts a host as lost whose agent is away
# (core/cluster/hosts.py).


class Attendances:
    def __init__(self, store: Store, hub: Hub, peers: Peers) -> None:
        self._store = store
        self._hub = hub
        self._peers = peers

    async def of(self, job: str) -> Attendance | None:
        """None where it is not known: no coordinator serves the job, or the one that does gives no answer."""
        if self._hub.serving.guard(job) is not None:
            return self._hub.attendance(job)
        try:
            found = await self._store.get(serving_key(job))
        except StoreError:
            return None
        if found is None:
            return None
        holder = membership_pb2.Serving.FromString(found.value)
        return await self._peers.attendance(holder.address, job)
