"""What --verbose tells while a job runs: each entry of its story (coordinator/core/world/story.py) with its time.

Who is awaited before the first world is left out: progress.py shows that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from horovod.coordinator.core.world.story import WAITS, after
from horovod.protos.v1.story_pb2 import StoryEntry

LOOK_S = 0.05  # between two looks at a coordinator in this process
ASK_S = 1.0  # seconds between two questions to a coordinator in another process
LAST_LOOK_S = 2.0  # seconds for the answer to the last question

Note = Callable[[str], None]
Look = Callable[[], Awaitable[Sequence[StoryEntry]]]


def line_of(entry: StoryEntry) -> str:
    """`09:41:07.123 Epoch 3 began with ...`, in local time."""
    whole_s = int(entry.at)
    stamp = time.strftime("%H:%M:%S", time.localtime(whole_s))
    return f"{stamp}.{int((entry.at - whole_s) * 1000):03} {entry.sentence}"


class StoryLines:
    """Tells each entry once."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._told = 0  # the number of the latest entry that was told

    def tell(self, entries: Sequence[StoryEntry]) -> None:
        for entry in after(entries, self._told):
            self._told = entry.number
            if entry.epoch or entry.event != WAITS:
                self._note(line_of(entry))


@contextlib.asynccontextmanager
async def story_told(note: Note | None, look: Look, every_s: float = LOOK_S) -> AsyncIterator[None]:
    """Tells the story while the body runs, and the rest of it when that ends without an error.

    note: shows a line; None: nothing is told. look: the entries there are.
    """
    if note is None:
        yield
        return
    lines = StoryLines(note)

    async def tell() -> None:
        while True:
            lines.tell(await look())
            await asyncio.sleep(every_s)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    with contextlib.suppress(asyncio.TimeoutError):
        lines.tell(await asyncio.wait_for(look(), LAST_LOOK_S))
