"""Tells the coordinator which other members on this host are stopped, so that an elastic job goes on without them.

The coordinator sees the processes of its own host only. So each member looks at the next one of its host, and where
that is stopped at the one after it, too: one look a second of each is enough, however many they are.

A look counts for the time between two looks, however long ago the last one was. So a member that was stopped itself
does not take the time in which nobody could go on for the fault of another one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from horovod.base.processes import process_namespace, start_time, stopped_turns
from horovod.worker.runtime.world import Member, World

LOOK_SECONDS = 1.0
CLOSE_SECONDS = 2.0

log = logging.getLogger(__name__)


class StoppedPeers:
    """Call `start`, and `close` at the end."""

    def __init__(self, world: World, limit_seconds: float, tell: Callable[[int], None]) -> None:
        """tell: called with the rank of a member that has not run for `limit_seconds`, again and again."""
        self._peers = [(peer, start_time(peer.pid)) for peer in _beside(world)]
        self._between_seconds = min(LOOK_SECONDS, limit_seconds / 3)
        self._limit_seconds = limit_seconds
        self._tell = tell
        # Rank of a stopped process -> its turns, and looks since it has that number.
        self._seen: dict[int, tuple[int, int]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horovod-stopped-peers", daemon=True)

    def start(self) -> None:
        if self._peers:
            self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(self._between_seconds):
            try:
                for rank in self.look():
                    self._tell(rank)
            except Exception:
                log.exception("The look for stopped processes of this host failed; there are no more looks.")
                return

    def look(self) -> list[int]:
        """Ranks that have been stopped for the limit."""
        before, self._seen = self._seen, {}
        hung = []
        for peer, started in self._peers:
            if start_time(peer.pid) != started:
                continue  # this peer has ended, which others notice
            if (turns := stopped_turns(peer.pid)) is None:
                break
            earlier = before.get(peer.rank)
            looks = earlier[1] + 1 if earlier is not None and earlier[0] == turns else 0
            self._seen[peer.rank] = turns, looks
            if looks * self._between_seconds >= self._limit_seconds:
                hung.append(peer.rank)
        return hung


def _beside(world: World) -> list[Member]:
    """The other members whose processes this one sees, from the next one on."""
    here = world.me.shared_memory_domain
    if not process_namespace():
        return []
    others = [*world.members[world.rank + 1 :], *world.members[: world.rank]]
    return [one for one in others if one.shared_memory_domain == here]
