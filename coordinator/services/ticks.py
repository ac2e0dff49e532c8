"""The time by which a hub judges what is overdue, and the regular moments at which it looks.

The hubs of members and of agents have one each, of the same kind: both leave out time in which this coordinator was
stopped (core/clock.py). Every limit of a hub is to be measured by `now_s`, and none by the true clock.
"""

import asyncio
from collections.abc import Callable

from horovod.coordinator.core.clock import JudgeClock

MOST_TICKS_LATE = 5  # a tick that comes later than this means that the coordinator itself was stopped


class Ticks:
    def __init__(self, clock: Callable[[], float], tick_s: float) -> None:
        """clock: the true time in seconds. tick_s: the time between two looks."""
        self._clock = clock
        self._tick_s = tick_s
        self._judge = JudgeClock(clock(), tick_s, MOST_TICKS_LATE * tick_s)

    def now_s(self) -> float:
        return self._judge.read(self._clock())

    async def watch(self, look: Callable[[bool], None]) -> None:
        """Calls `look` at each tick, for ever. Its argument is true when this coordinator was stopped since the last
        tick, so that all limits must begin anew. An error in `look` ends the watch.
        """
        while True:
            await asyncio.sleep(self._tick_s)
            look(self._judge.tick(self._clock()))
