"""Says when a spare process has taken a place: one that waited beside a world of as many members as may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from horovod.base.words import ranks_in_words
from horovod.coordinator.core.world.overview import JobOverview

LOOK_S = 0.2


class Spares:
    """What was seen of a job's worlds. Processes are named by the numbers with which they were started."""

    def __init__(self) -> None:
        self._epoch = 0
        self._waiting: Mapping[int, float] = {}  # how long the start of each took, in seconds

    def seen(self, job: JobOverview) -> str:
        """The sentence for what has happened since the last look; "" where no spare has taken a place."""
        if not job.epoch:  # no world runs: survivors wait for the next one as well
            return ""
        before, self._waiting = self._waiting, job.waiting_ranks
        is_another_world = self._epoch not in (0, job.epoch)
        self._epoch = job.epoch
        taken = before.keys() - job.waiting_ranks.keys() if is_another_world else set()
        if not taken:
            return ""
        which = ranks_in_words(taken, "process" if len(taken) == 1 else "processe")
        verb = "has" if len(taken) == 1 else "have"
        saved = f", {s:.1f} s sooner than a new one could" if (s := max(before[rank] for rank in taken)) else ""
        return f"spare {which} {verb} taken the place of what was lost{saved}; the world has {job.size} members."


async def tell_of_spares(overview: Callable[[], Iterable[JobOverview]], note: Callable[[str], None]) -> None:
    """Looks at the launcher's one job until it is cancelled."""
    spares = Spares()
    while True:
        for job in overview():
            if sentence := spares.seen(job):
                note(sentence)
        await asyncio.sleep(LOOK_S)
