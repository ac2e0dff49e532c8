"""Whether this coordinator can serve: its store answers. Probes may come often, so an answer is kept for a moment."""

from __future__ import annotations

import asyncio
import time

from horovod.coordinator.store import Store, StoreError

ANSWER_S = 2.0  # a store that takes longer does not answer
KEEP_S = 1.0
_KEY = "ready"  # never written; that it can be looked for is what counts


class Readiness:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked_at_s = -KEEP_S
        self._last = False
        self._asking = asyncio.Lock()

    async def __call__(self) -> bool:
        async with self._asking:
            if time.monotonic() - self._asked_at_s >= KEEP_S:
                try:
                    await asyncio.wait_for(self._store.get(_KEY), ANSWER_S)
                    self._last = True
                except (StoreError, asyncio.TimeoutError):
                    self._last = False
                self._asked_at_s = time.monotonic()
            return self._last
