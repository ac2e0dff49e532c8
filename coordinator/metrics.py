"""What a coordinator counts: names, labels and meanings, of which docs/tools/metrics_page.py makes a page."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

from horovod.base.telemetry import Registry
from horovod.base.telemetry.metrics import SECONDS
from horovod.protos.v1 import negotiation_pb2

from .core.world.membership import JobOverview
from .store.base import Change, Entry, Guard, Store


class CoordinatorMetrics:
    """overview: the jobs as they are now, asked for at each reading of the metrics."""

    def __init__(self, overview: Callable[[], Iterable[JobOverview]]) -> None:
        self.registry = registry = Registry()
        self._overview = overview
        per_job = ("job",)
        self.worlds_formed = registry.counter("horovod_worlds_formed_total", "Worlds that were formed", per_job)
        self.announcements = registry.counter(
            "horovod_announcements_total",
            "Operations that ranks announced, each rank's counted; in steady state it stands still",
            per_job,
        )
        self.plans = registry.counter("horovod_plans_total", "Operations on which all ranks agreed", per_job)
        self.disagreements = registry.counter(
            "horovod_disagreements_total", "Operations that failed because ranks did not agree", per_job
        )
        self.stalls = registry.counter(
            "horovod_stall_warnings_total", "Warnings about operations that wait for some rank", per_job
        )
        self.losses = registry.counter(
            "horovod_members_lost_total",
            "Members that ended without leaving, by the evidence: process_ended (somebody saw the process end, or its "
            "host is lost), connection_lost (its connections broke and did not come back), of elastic jobs stopped "
            "(its process stood still) and cut_off (its host acknowledged nothing), other (another process took its "
            "place)",
            ("job", "evidence"),
        )
        self.forming_seconds = registry.histogram(
            "horovod_forming_seconds",
            "How long a job was without a whole world before one formed: since its first process came, or since the "
            "first member of the last world was gone",
            per_job,
            (*SECONDS, 30.0, 60.0, 300.0, 600.0),
        )
        self.refusals = registry.counter(
            "horovod_refusals_total", "Processes that were refused: join or attach", ("what",)
        )
        self.store_seconds = registry.histogram(
            "horovod_store_seconds", "How long calls of the store took", ("operation", "result")
        )
        registry.gauge("horovod_worlds", "Worlds that run", lambda: {(): sum(job.epoch > 0 for job in overview())})
        registry.gauge(
            "horovod_members",
            "Members by state: present, away (without a connection to the coordinator, and may come back) or waiting "
            "for a world",
            self._members,
            ("job", "state"),
        )
        registry.gauge("horovod_world_size", "Members that are in the job's world", self._sizes, per_job)
        registry.gauge(
            "horovod_newcomers", "Processes that wait until the job's world takes them in", self._newcomers, per_job
        )
        registry.gauge(
            "horovod_epoch", "Number of the job's world, which rises with each re-formation", self._epochs, per_job
        )
        self._rank_gauge("horovod_rank_operations_total", "Operations that a rank has run", "operations")
        self._rank_gauge("horovod_rank_bytes_total", "Bytes of the operations that a rank has run", "bytes")
        self._rank_gauge(
            "horovod_rank_wait_seconds_total", "How long a rank has waited for others to start what it had started", ""
        )
        registry.gauge(
            "horovod_rank_lateness_seconds",
            "Seconds that others waited for this rank: the longest wait of a rank of its world, less its own wait",
            self._lateness,
            ("job", "rank"),
        )

    def decided(self, job: str, decisions: negotiation_pb2.Decisions) -> None:
        """Some ranks are about to be told so."""
        if decisions.plans:
            self.plans.add(len(decisions.plans), job)
        if decisions.errors:
            self.disagreements.add(len(decisions.errors), job)

    def _members(self) -> dict[tuple[str, ...], float]:
        found: Counter[tuple[str, ...]] = Counter()
        for job in self._overview():
            away = sum(member.away for member in job.members)
            found[job.name, "present"] += len(job.members) - away
            found[job.name, "away"] += away
            found[job.name, "waiting"] += job.waiting
        return dict(found)

    def _epochs(self) -> dict[tuple[str, ...], float]:
        return {(job.name,): job.epoch for job in self._overview() if job.epoch}

    def _sizes(self) -> dict[tuple[str, ...], float]:
        return {(job.name,): len(job.members) for job in self._overview() if job.epoch}

    def _newcomers(self) -> dict[tuple[str, ...], float]:
        return {(job.name,): job.newcomers for job in self._overview() if job.epoch}

    def _rank_gauge(self, name: str, help_: str, field: str) -> None:
        def read() -> dict[tuple[str, ...], float]:
            return {
                (job.name, str(rank)): getattr(report, field) if field else report.waited_us / 1e6
                for job in self._overview()
                for rank, report in job.reports.items()
            }

        self.registry.gauge(name, help_, read, ("job", "rank"), kind="counter")

    def _lateness(self) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for job in self._overview():
            most_us = max((report.waited_us for report in job.reports.values()), default=0)
            for rank, report in job.reports.items():
                found[job.name, str(rank)] = (most_us - report.waited_us) / 1e6
        return found


# A store with a stopwatch: how long each call of another one takes, and whether it succeeds.


class MeasuredStore:
    """observe(seconds, operation, result): hears of each call that ended; result is "ok" or the name of the error."""

    def __init__(self, store: Store, observe: Callable[[float, str, str], None]) -> None:
        self._store = store
        self._observe = observe

    @property
    def is_shared(self) -> bool:
        return self._store.is_shared

    @contextlib.contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        began = time.monotonic()
        result = "ok"
        try:
            yield
        except BaseException as error:
            result = type(error).__name__
            raise
        finally:
            self._observe(time.monotonic() - began, operation, result)

    async def get(self, key: str) -> Entry | None:
        with self._timed("get"):
            return await self._store.get(key)

    async def range(self, prefix: str) -> tuple[Sequence[Entry], int]:
        with self._timed("range"):
            return await self._store.range(prefix)

    async def put(self, key: str, value: bytes, lease: int | None = None, *, guard: Guard | None = None) -> Entry:
        with self._timed("put"):
            return await self._store.put(key, value, lease, guard=guard)

    async def put_if(
        self, key: str, value: bytes, revision: int, lease: int | None = None, *, guard: Guard | None = None
    ) -> Entry | None:
        with self._timed("put_if"):
            return await self._store.put_if(key, value, revision, lease, guard=guard)

    async def delete(self, key: str, revision: int | None = None, *, guard: Guard | None = None) -> bool:
        with self._timed("delete"):
            return await self._store.delete(key, revision, guard=guard)

    async def grant(self, ttl_s: float) -> int:
        with self._timed("grant"):
            return await self._store.grant(ttl_s)

    async def keep_alive(self, lease: int) -> None:
        with self._timed("keep_alive"):
            await self._store.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        with self._timed("revoke"):
            await self._store.revoke(lease)

    def watch(self, prefix: str, revision: int) -> AsyncIterator[Change]:
        return self._store.watch(prefix, revision)  # a watch has no end, so its time is not measured

    async def close(self) -> None:
        await self._store.close()
