"""Whether this coordinator can serve: its store answers and takes writes. Probes may come often, so an answer is kept
for a moment.
"""

from __future__ import annotations

import asyncio
import logging
import time

from horovod.base.errors import ClusterCode, coded
from horovod.coordinator.store import Store, StoreError, WritesRefusedError

ANSWER_S = 2.0  # a store that takes longer does not answer
KEEP_S = 1.0
NO_ANSWER = coded(ClusterCode.STORE_FAILED, "The store does not answer.")
# The test write names a revision that nothing has, so it never happens; a store that takes no writes refuses it all the
# same.
_KEY = "ready"
_NO_REVISION = (1 << 62) - 1


_log = logging.getLogger(__name__)


class Readiness:
    """`await readiness()` is the sentence why this coordinator can't serve; "" when it can."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked_at_s = -KEEP_S
        self._last = ""
        self._asking = asyncio.Lock()

    async def __call__(self) -> str:
        async with self._asking:
            if time.monotonic() - self._asked_at_s >= KEEP_S:
                try:
                    await asyncio.wait_for(self._store.put_if(_KEY, b"", _NO_REVISION), ANSWER_S)
                    self._last = ""
                except WritesRefusedError as error:
                    if self._last != str(error):
                        self._last = str(error)
                        _log.warning("This coordinator is not ready: %s", error)
                except (StoreError, asyncio.TimeoutError):
                    self._last = NO_ANSWER
                self._asked_at_s = time.monotonic()
            return self._last
