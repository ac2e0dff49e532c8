"""News that the members of an elastic world are to leave it together, because members come or go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WorldChange:
    """Why all members are to leave the world of this epoch together: the next one has the newcomers, and not the
    leavers. Those that are coming are no reason yet.
    """

    epoch: int
    newcomers: int = 0  # how many wait to be taken in
    coming: int = 0  # how many are being started, and will wait once they have imported all that they need
    leavers: tuple[int, ...] = ()  # the ranks of members that leave for good


# Called by the thread of the membership. A later change of one epoch comes beside an earlier one.
OnWorldChange = Callable[[WorldChange], None]


def ignore_changes(change: WorldChange) -> None:
    """For members that never change their world."""
