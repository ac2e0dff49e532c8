"""What agents have reported of ranks, for a coordinator that serves a job's world but not its agents (ADR 44).

The coordinator that serves agents writes how ranks end into the record of their job. Each coordinator watches these
records, so that the end of a process is evidence (core/world/life.py) wherever its world is served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from horovod.coordinator.core.cluster.job import rank_ends
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.store import Store, StoreError
from horovod.coordinator.store.submitted import SUBMITTED, job_of, submitted_key
from horovod.protos.v1 import jobs_pb2

AGAIN_S = 0.5  # seconds between attempts to watch the store

_log = logging.getLogger(__name__)


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
        if value is not None and self._serves(job_of(key)):
            self._tell_all(jobs_pb2.JobRecord.FromString(value))

    def _tell_all(self, record: jobs_pb2.JobRecord) -> None:
        for ended in rank_ends(record):
            self._tell(ended)
