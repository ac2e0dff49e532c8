"""The time by which a hub judges what is overdue, and the regular moments at which it looks.

The hubs of members and of agents have one each, of the same kind. Every limit of a hub is to be measured by `now_s`,
and none by the true clock: a coordinator that is suspended with its job (Ctrl-Z, a frozen container, a paused virtual
machine) wakes up with a clock that has jumped. No message of a member was read in that time, so it must not count for
any limit. This clock advances by a bounded amount between two ticks, which come at regular intervals as long as the
coordinator runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class JudgeClock:
    def __init__(self, now_s: float, tick_s: float, most_s: float) -> None:
        """tick_s: the time between two ticks. most_s: a longer time between two ticks is a jump of the clock."""
        self._tick_s = tick_s
        self._most_s = most_s
        self._ticked_at_s = now_s
        self._judged_s = now_s  # this clock's time at the last tick
        self._given_s = now_s  # what `read` returned last

    def read(self, now_s: float) -> float:
        """This clock's time when the true clock says `now_s`. It never goes back."""
        passed_s = self._tick_s if self._has_jumped(now_s) else max(0.0, now_s - self._ticked_at_s)
        self._given_s = max(self._given_s, self._judged_s + passed_s)
        return self._given_s

    def tick(self, now_s: float) -> bool:
        """True when the true clock has jumped since the last tick; the caller then restarts all limits of seconds."""
        jumped = self._has_jumped(now_s)
        self._judged_s = self.read(now_s)
        self._ticked_at_s = now_s
        return jumped

    def _has_jumped(self, now_s: float) -> bool:
        return now_s - self._ticked_at_s > self._most_s


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
