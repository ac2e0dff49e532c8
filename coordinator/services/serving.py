"""Which jobs this coordinator serves, among all coordinators of its store.

Each job has a key that names who serves it (store/holding.py). A coordinator that a member comes to takes the key when
it is free, or when its holder is dead; else it sends the member there. The revision of that write is the *term*. It is
the guard of all that is written for the job afterwards, and every message carries it, so that a holder which was
replaced without noticing (it was stopped, or cut off) can neither decide nor be believed. That is why taking the key
from somebody who only seems dead is safe, and one second of silence is enough (docs/adr/0032-replicas.md).

A second key, under a lease, says that this process lives. Without it a holder counts as dead unasked. The keys of jobs
have no lease, unlike that of the cluster (leading.py): a world goes on while the store is silent, because its members
believe only who has the latest term, whereas agents obey whoever they are connected to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import weakref
from collections.abc import Awaitable, Callable

from horovod.coordinator.store import FencedError, Guard, LeaseLostError, Store, StoreError
from horovod.coordinator.store.holding import release
from horovod.coordinator.store.jobs import JOBS, claim, expire_epoch, is_serving_key, serving_key
from horovod.protos.v1 import membership_pb2

from .peers import Peers

REPLICAS = "replicas/"
LEASE_S = 5.0
AGAIN_S = 0.5  # seconds between attempts to watch the store

_log = logging.getLogger(__name__)

Restore = Callable[[str, Guard], Awaitable[None]]


class Serving:
    """Used in one event loop. `address` is to be set before the first member comes."""

    def __init__(
        self,
        store: Store,
        peers: Peers,
        *,
        restore: Restore,
        lost: Callable[[str, str], None],
        cut_off: Callable[[], None],
        lease_s: float = LEASE_S,
    ) -> None:
        """restore: called with each job that is taken, before it is served.
        lost: called with a job that another one has taken, and its address ("" where that is not known).
        cut_off: the store has not answered for `lease_s`, and there are others who may reach it.
        """
        self.replica = secrets.token_urlsafe(12)
        self.address = ""
        self._store = store
        self._peers = peers
        self._restore = restore
        self._lost = lost
        self._cut_off = cut_off
        self._lease_s = lease_s
        self._guards: dict[str, Guard] = {}  # job -> the guard of its key
        self._taking: dict[str, int] = {}  # job -> how many requests for it are under way
        # Job -> when a member's complaint about its coordinator was last acted on.
        self._complaints: dict[str, float] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._lease: int | None = None
        self._registering = asyncio.Lock()
        self._reached_at_s: float | None = None  # when the store answered last; None: it was not asked yet
        self._has_others = False

    # -- one job -----------------------------------------------------------------------------------------------------

    def guard(self, job: str) -> Guard | None:
        return self._guards.get(job)

    def term(self, job: str) -> int:
        guard = self._guards.get(job)
        return guard.revision if guard else 0

    def serves(self, job: str) -> bool:
        """Whether this coordinator serves the job or is about to."""
        return job in self._guards or job in self._taking

    def claims(self, job: str) -> bool:
        """`serves`, for another one that asks; it may have the job if it reaches the store and this one does not."""
        self._has_others = True  # whether other coordinators use the store, too; true until the store has told
        return self.serves(job) and self.is_sure()

    async def serve(self, job: str, unreachable: str = "", joins: bool = False) -> str:
        """ "" when the job is served here from now on, else the address of who serves it. Raises StoreError.

        unreachable: the address of a coordinator that could not be reached by the member which asks.
        joins: it wants a new world, which takes a store; one that comes back to its world is served without, too.
        """
        if job in self._guards and (self.is_sure() or not joins):
            return ""
        if not self.is_sure():
            raise StoreError("This coordinator can't reach its store.")
        lock = self._lock(job)
        self._taking[job] = self._taking.get(job, 0) + 1
        try:
            async with lock:
                return await self._serve(job, unreachable)
        finally:
            self._taking[job] -= 1
            if not self._taking[job]:
                del self._taking[job]

    async def _serve(self, job: str, unreachable: str) -> str:
        await self._register()
        me = membership_pb2.Serving(replica=self.replica, address=self.address)
        while job not in self._guards:
            found = await self._store.get(serving_key(job))
            if found is not None:
                holder = membership_pb2.Serving.FromString(found.value)
                mine = self.address == holder.address or self.replica == holder.replica
                if not mine and not self._is_out_of_reach(holder, job, unreachable) and await self._lives(holder, job):
                    return holder.address
            guard = await claim(self._store, job, me, found)
            if guard is not None:
                await self._restore(job, guard)
                self._guards[job] = guard
                _log.info("Job %r is served here from now on, in term %d.", job, guard.revision)
        return ""

    def _is_out_of_reach(self, holder: membership_pb2.Serving, job: str, unreachable: str) -> bool:
        """Whether the holder, alive or not, is of no use to a member.

        Where each of two coordinators is out of some member's reach, they would take the job from each other as fast as
        members can ask. So one complaint counts for a while.
        """
        now = asyncio.get_running_loop().time()
        self._complaints = {name: at_s for name, at_s in self._complaints.items() if now - at_s < self._lease_s}
        if unreachable != holder.address or job in self._complaints:
            return False
        self._complaints[job] = now
        _log.warning("Job %r: a member can't reach %s, which serves it.", job, holder.address)
        return True

    async def _lives(self, holder: membership_pb2.Serving, job: str) -> bool:
        if await self._store.get(REPLICAS + holder.replica) is None:
            return False
        return await self._peers.serves(holder, job)

    async def release(self, job: str, is_idle: Callable[[], bool], retract: Callable[[Guard], Awaitable[None]]) -> None:
        """Releases the job, so that no coordinator serves it, unless it is not idle by now.

        retract: removes what the store still has of it.
        """
        async with self._lock(job):
            guard = self._guards.get(job)
            if guard is None or not is_idle():
                return
            try:
                await retract(guard)
                if not is_idle():
                    return
                await expire_epoch(self._store, job, guard)
                if not is_idle():
                    return
                del self._guards[job]
                await release(self._store, guard)
            except FencedError:
                if not is_idle():  # a process has come meanwhile, and must look for who serves the job
                    self.fenced(job, guard)
                self._guards.pop(job, None)
            except StoreError as error:
                _log.info("Job %r is over, but the store does not know it: %s", job, error)
                if is_idle():  # the next request for the job finds out that it is not served here
                    self._guards.pop(job, None)

    def fenced(self, job: str, guard: Guard) -> None:
        """A write under the job's guard was refused, so another coordinator serves it."""
        if self._guards.get(job) == guard:
            self._lose(job, "")

    def _lose(self, job: str, address: str) -> None:
        del self._guards[job]
        _log.warning("Job %r was taken over by %s.", job, address or "another coordinator")
        self._lost(job, address)

    def _lock(self, job: str) -> asyncio.Lock:
        lock = self._locks.get(job)
        if lock is None:
            lock = self._locks[job] = asyncio.Lock()
        return lock

    # -- for as long as the process lives ------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Keeps alive, for ever, the lease by which others see that this process lives."""
        told = False
        bounced_at_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._register()
                others, _ = await self._store.range(REPLICAS)
                self._has_others = len(others) > 1
                self._peers.watch(
                    address
                    for entry in others
                    if entry.key != REPLICAS + self.replica and (address := entry.value.decode()) != self.address
                )
                assert self._lease is not None
                await self._store.keep_alive(self._lease)
                self._reached_at_s = loop.time()
                told = False
            except LeaseLostError:
                self._lease = None
                continue
            except StoreError as error:
                if not told:
                    _log.warning("The store can't be reached, so no world can form or change: %s", error)
                    told = True
                if self._has_others and not self.is_sure() and loop.time() - bounced_at_s > self._lease_s:
                    bounced_at_s = loop.time()
                    self._cut_off()
            await asyncio.sleep(self._lease_s / 3)

    async def watch(self) -> None:
        """Watches, for ever, for other coordinators that take jobs from this one."""
        while True:
            try:
                _, revision = await self._store.range(REPLICAS)
                for job, guard in list(self._guards.items()):
                    found = await self._store.get(guard.key)
                    self._look(job, found.value if found else None, found.revision if found else revision)
                async for change in self._store.watch(JOBS, revision + 1):
                    if is_serving_key(change.key):
                        job = next((job for job, guard in self._guards.items() if guard.key == change.key), "")
                        self._look(job, change.value, change.revision)
            except StoreError as error:
                _log.debug("The watch over the store was interrupted: %s", error)
            await asyncio.sleep(AGAIN_S)

    def _look(self, job: str, value: bytes | None, revision: int) -> None:
        guard = self._guards.get(job)
        if guard is None or revision <= guard.revision:
            return
        holder = membership_pb2.Serving.FromString(value or b"")
        if holder.replica != self.replica:
            self._lose(job, holder.address)

    async def stop(self) -> None:
        """Releases all jobs, so that another coordinator can take them at once."""
        await self._peers.close()
        with contextlib.suppress(StoreError):
            for guard in list(self._guards.values()):
                await release(self._store, guard)
            if self._lease is not None:
                await self._store.revoke(self._lease)

    async def _register(self) -> None:
        async with self._registering:
            if self._lease is None:
                lease = await self._store.grant(self._lease_s)
                await self._store.put(REPLICAS + self.replica, self.address.encode(), lease)
                self._lease = lease
                self._reached_at_s = asyncio.get_running_loop().time()

    def is_sure(self) -> bool:
        """False once the store was silent for a lease: another coordinator may serve by now what is served here."""
        now = asyncio.get_running_loop().time()
        if self._reached_at_s is None:
            self._reached_at_s = now
        return now - self._reached_at_s <= self._lease_s
