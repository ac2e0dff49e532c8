"""Ends tasks for certain.

Before Python 3.12 `asyncio.wait_for` may lose the cancellation of its task: when what it waits for is done in the same
turn of the event loop, it returns that result instead. A task that goes on with a loop then would never end, nor who
waits for it. So a task that has not ended is cancelled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], again_s: float = AGAIN_S) -> None:
    """Cancels the tasks and returns when all have ended; what they raise is dropped."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=again_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # else asyncio would complain that it was never retrieved
