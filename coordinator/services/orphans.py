"""Jobs in the store that nobody serves: their coordinator is dead, and no member has asked another one since.

That is so when a job's processes and its coordinator end together, for a whole cluster that loses its power. A
coordinator that has seen such a job unchanged for a day takes it over. Then it goes the way of every world: its
members, if there are any, come back or are lost, and what is kept of it is deleted (Serving.release).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from horovod.coordinator.store import Store, StoreError
from horovod.coordinator.store.jobs import JOBS, is_serving_key, job_of
from horovod.protos.v1 import membership_pb2

from .serving import REPLICAS

ORPHAN_S = 24 * 3600.0  # a member that is alive asks for the job within seconds
LOOK_S = 600.0

_log = logging.getLogger(__name__)


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
