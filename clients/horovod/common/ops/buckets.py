"""Gradients on their way to the engine. They wait until enough are ready, because waking the engine costs more than
reducing a small one. Which of them share a hand-over has no influence on a result, and ranks need not agree on it: each
gradient is an operation of its own, but for those of a Group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

# Ready gradients are handed to the engine when they have this many bytes together.
HANDOVER_BYTES: Final = 1 << 20


class Grouped(Protocol):
    """What a framework keeps of a parameter whose gradient is reduced."""

    group: Group[Grouped] | None


S = TypeVar("S", bound=Grouped)


class Group(Generic[S]):
    """Parameters whose gradients are reduced as one operation."""

    __slots__ = ("missing", "name", "slots")

    def __init__(self, slots: Sequence[S], name: str = "") -> None:
        self.slots = slots
        self.name = name  # its name on the wire
        self.missing = len(slots)
        for slot in slots:
            slot.group = self  # type: ignore[assignment]


class Buckets(Generic[S]):
    """Ready gradients that the engine does not have yet."""

    def __init__(self) -> None:
        self._waiting: list[S] = []
        self._bytes = 0

    def add(self, slot: S, nbytes: int = 0) -> bool:
        """Adds a ready gradient. True when enough wait, so that they should be handed over."""
        self._waiting.append(slot)
        self._bytes += nbytes
        return self._bytes >= HANDOVER_BYTES

    def hand_over(
        self, start: Callable[[S, bool], None], start_group: Callable[[Group[S], bool], None], wait_follows: bool
    ) -> None:
        """Starts the waiting reductions. The last one wakes the engine, unless this thread is about to wait itself.

        start and start_group take what they start and whether the engine can sleep on.
        """
        waiting, self._waiting = self._waiting, []
        self._bytes = 0
        started = 0
        try:
            for slot in waiting:
                quiet = wait_follows or started + 1 < len(waiting)
                group: Group[S] | None = slot.group  # type: ignore[assignment]
                if group is None:
                    start(slot, quiet)
                elif group.missing > 1:
                    group.missing -= 1
                else:
                    start_group(group, quiet)
                    group.missing = 0
                started += 1
        finally:
            self._waiting[:0] = waiting[started:]  # after an error the rest must not be taken for reduced

    def clear(self) -> None:
        self._waiting.clear()
        self._bytes = 0
