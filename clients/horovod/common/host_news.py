"""What an elastic state is told of hosts: that their processes are being started, and later that these have joined.

The first kind of news is an announcement (`Announced`). Nothing is gained by leaving the world for it: the processes
import their framework for seconds, in which the others can train. So it interrupts nothing by itself. But scripts of
earlier releases look whether something was announced, and take the next commit for the one that takes the hosts in.
After such a look that commit waits for the processes (docs/adr/0113-hosts-that-are-announced.md).
"""

from __future__ import annotations

import queue
from enum import IntFlag


class HostUpdateResult(IntFlag):
    """How the set of hosts changed: hosts were added, removed, or both (`mixed`)."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class Announced(float):
    """When it was announced that processes are coming, in seconds: a timestamp for `State.on_hosts_updated`."""


HostMessage = tuple[float, HostUpdateResult]  # (when it happened, what changed)


class HostMessages(queue.Queue[HostMessage]):
    """The news that no commit has heeded yet. Filled by the thread that delivers them, emptied by the one that trains.

    >>> messages = HostMessages()
    >>> messages.put((Announced(1.0), HostUpdateResult.added))
    >>> messages.take()
    []
    >>> messages.put((2.0, HostUpdateResult.added))
    >>> messages.take()
    [(1.0, <HostUpdateResult.added: 2>), (2.0, <HostUpdateResult.added: 2>)]
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_known = False  # whether the script has seen that there is news

    def empty(self) -> bool:
        is_empty = super().empty()
        self._is_known = self._is_known or not is_empty
        return is_empty

    def take(self) -> list[HostMessage]:
        """All news, if one of them is a reason to leave the world; else none, and announcements stay."""
        with self.mutex:
            return self._clear() if self._has_reason() else []

    def clear(self) -> None:
        with self.mutex:
            self._clear()

    def await_announced(self, seconds: float) -> bool:
        """Waits for the processes that were announced, if the script has seen that something was. Returns false if they
        have not come in that time; then nobody waits for them again.
        """
        with self.not_empty:
            if not self._is_known or not self.queue:
                return True
            if self.not_empty.wait_for(self._has_reason, seconds):
                return True
            self._clear()
            return False

    def _has_reason(self) -> bool:
        return any(not isinstance(timestamp, Announced) for timestamp, _ in self.queue)

    def _clear(self) -> list[HostMessage]:
        found = list(self.queue)
        self.queue.clear()
        self._is_known = False
        return found
