"""Ends tasks for certain.

Before Python 3.12 `asyncio.wait_for` may lose the cancellation of its task: when what it waits for is done in the same
turn of the event loop, it returns that result instead. A task that goes on with a loop then would never end, nor who
waits for it. So a task that has not ended is cancelled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
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
                task.exception()  # otherwise asyncio would complain that the error was never retrieved


class Tasks:
    """Background tasks of one owner in one event loop, which no code awaits.

    failed: is called with the exception of a task that raised one.
    """

    def __init__(self, failed: Callable[[BaseException], object]) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._failed = failed

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._failed(error)

    def running(self) -> list[asyncio.Task[None]]:
        return list(self._running)

    async def end(self) -> None:
        await end_tasks(self._running)
