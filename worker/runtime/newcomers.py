"""Who hears that processes wait to be taken into the elastic world that this process is in."""

from __future__ import annotations

from collections.abc import Callable

# Called with the epoch of that world and how many wait, by the thread of the membership. When all members have left the
# world and joined again, the next one has them.
OnNewcomers = Callable[[int, int], None]


def ignore_newcomers(epoch: int, count: int) -> None:
    """For members that never change their world."""
