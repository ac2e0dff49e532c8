"""The clock by which the coordinator decides that time is up; it leaves out time in which the coordinator was stopped.

A coordinator that is suspended with its job (Ctrl-Z, a frozen container, a paused virtual machine) wakes up with a
clock that has jumped. No message of a member was read in that time, so it must not count for any limit: this clock
advances by a bounded amount between two ticks, which come at regular intervals as long as the coordinator runs.
"""


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
