"""Which coordinator of a store serves agents and submitted jobs: one at a time, the holder of a key under a lease.

The others send agents and clients on, which try the next address of their list. A leader that can't keep its lease
stops serving before another one can begin: it counts its lease as lost somewhat earlier than the store does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable

from horovod.coordinator.store import Guard, LeaseLostError, Store, StoreError, UncertainError
from horovod.coordinator.store.base import MISSING

LEADER = "cluster/leader"
LEASE_S = 4.0
RETRY_S = 0.3

_log = logging.getLogger(__name__)


class Leading:
    """`run` for as long as this coordinator lives."""

    def __init__(
        self, store: Store, begin: Callable[[], Awaitable[None]], end: Callable[[str], None], lease_s: float = LEASE_S
    ) -> None:
        """begin: called when this coordinator leads from now on; end: with the sentence why it does no longer."""
        self.leads = False
        self.guard: Guard | None = None  # of what a leader writes: one that was replaced unawares writes nothing
        self._store = store
        self._begin = begin
        self._end = end
        self._lease_s = lease_s
        self._name = secrets.token_hex(8).encode()
        self._lease: int | None = None

    async def attempt(self) -> None:
        """Leads from now on, if no other one does. Before the first call of `run`, or instead of waiting for it."""
        try:
            if not self.leads and await self._take():
                await self._begin()
                self.leads = True
                _log.info("This coordinator serves agents and jobs.")
        except (StoreError, asyncio.TimeoutError) as error:
            _log.info("Who serves agents and jobs can't be told now: %s", error)

    async def run(self) -> None:
        while True:
            if self.leads:
                await self._keep()
                self.lose()
            await asyncio.sleep(RETRY_S)
            await self.attempt()

    def lose(self) -> None:
        """This coordinator leads no more: its lease is lost, or a write was refused because another one leads."""
        if self.leads:
            self.leads = False
            self._end("Another coordinator serves agents and jobs from now on.")

    async def resign(self) -> None:
        """Another one may take over at once."""
        self.leads = False
        if self._lease is not None:
            with contextlib.suppress(StoreError, asyncio.TimeoutError):
                await asyncio.wait_for(self._store.revoke(self._lease), 1.0)

    async def _take(self) -> bool:
        current = await self._store.get(LEADER)
        if current is not None and current.value != self._name:
            return False
        self._lease = await self._store.grant(self._lease_s)
        with contextlib.suppress(UncertainError):
            revision = current.revision if current else MISSING
            entry = await self._store.put_if(LEADER, self._name, revision, self._lease)
            self.guard = Guard(LEADER, entry.revision) if entry else None
            return entry is not None
        return False  # the next look tells

    async def _keep(self) -> None:
        """Returns when the lease is lost."""
        assert self._lease is not None
        loop = asyncio.get_running_loop()
        kept_at_s = loop.time()
        is_late = False
        while self.leads and not is_late:
            began_s = loop.time()
            left_s = kept_at_s + self._lease_s * 0.75 - began_s
            # Without time left this process has been stopped, or got no processor. One attempt more tells whether that
            # was too long; meanwhile what it decides can't be written if another one leads (`guard`).
            is_late = left_s <= 0
            with contextlib.suppress(StoreError, asyncio.TimeoutError):  # again, as long as there is time
                try:
                    still_leads = await asyncio.wait_for(self._prolong(self._lease), max(left_s, self._lease_s / 10))
                except LeaseLostError:
                    return
                if not still_leads:
                    return
                kept_at_s, is_late = began_s, False
            if not is_late:
                await asyncio.sleep(self._lease_s / 10)

    async def _prolong(self, lease: int) -> bool:
        """False when the key was written or deleted by another client, although the lease lives."""
        await self._store.keep_alive(lease)
        current = await self._store.get(LEADER)
        return current is not None and self.guard == Guard(LEADER, current.revision)
