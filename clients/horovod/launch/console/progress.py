"""What a person sees while hosts connect and ranks start and join: how many of how many, and which are missing.

On a terminal it is a line at the bottom that goes away when the world stands. Elsewhere it is a plain line once the
start takes long, and then ever less often; with --verbose one for each change. A program that never calls hvd.init()
has no world to wait for: nothing is said until the first rank has joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from horovod.base.words import ranks_in_words, shortened
from horovod.coordinator.core.world.overview import JobOverview
from horovod.worker.agent.output import Console

LOOK_S = 0.2
FIRST_LINE_S = 15.0  # after so long a line says what is still missing
_MOST_HOSTS = 4


@dataclass(frozen=True)
class Seen:
    """The state of a start. `formed`: there is a world, and no more to tell."""

    started: int  # processes that have been started
    joined: frozenset[int] = frozenset()  # ranks that have joined
    formed: bool = False


def sentence(seen: Seen, hosts: Sequence[str]) -> str:
    """What is missing, "" when nothing is that anybody waits for. hosts[rank] is the rank's host."""
    size = len(hosts)
    if seen.formed:
        return ""
    if seen.started < size:
        return f"{seen.started} of {size} processes started; missing: {_missing(range(seen.started, size), hosts)}"
    if not seen.joined:
        return ""
    return (
        f"{len(seen.joined)} of {size} ranks have joined; waiting for {_missing(set(range(size)) - seen.joined, hosts)}"
    )


def hosts_sentence(ready: Collection[str], hosts: Sequence[str]) -> str | None:
    """The same of hosts that are to have an agent; None when all have."""
    missing = [host for host in hosts if host not in ready]
    if not missing:
        return None
    return f"{len(hosts) - len(missing)} of {len(hosts)} hosts are ready; waiting for {shortened(missing, _MOST_HOSTS)}"


def _missing(ranks: Collection[int], hosts: Sequence[str]) -> str:
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank], []).append(rank)
    if len(set(hosts)) == 1:
        return ranks_in_words(ranks)
    return shortened([f"{ranks_in_words(own)} on {host}" for host, own in by_host.items()], _MOST_HOSTS)


class PlainLines:
    """When a sentence is worth a line where there is no terminal."""

    def __init__(self, every_change: bool) -> None:
        self._every_change = every_change
        self._told = ""
        self._began_s: float | None = None
        self._wait_s = FIRST_LINE_S

    def due(self, text: str, now_s: float) -> str:
        """The line to write for `text` now, or ""."""
        if self._every_change:
            told, self._told = self._told, text
            return f"{text}." if text and text != told else ""
        if self._began_s is None and text:
            self._began_s = now_s
        waited_s = now_s - (now_s if self._began_s is None else self._began_s)
        if not text or waited_s < self._wait_s:
            return ""
        self._wait_s *= 2
        return f"{text}, for {waited_s:.0f} s now."


class Progress:
    """Shows on `console` what ranks are missing, `hosts[rank]` being the rank's host, or anything else that changes."""

    def __init__(self, console: Console, hosts: Sequence[str] = (), *, verbose: bool = False) -> None:
        self.verbose = verbose
        self._console = console
        self._hosts = hosts
        self._lines = PlainLines(every_change=verbose)

    async def show(self, look: Callable[[], Seen]) -> None:
        """Shows this until the world has formed; cancelled when the job is over."""

        def text() -> str | None:
            seen = look()
            return None if seen.formed else sentence(seen, self._hosts)

        await self.show_text(text)

    async def show_text(self, look: Callable[[], str | None]) -> None:
        """Shows texts until there is no more to tell (None)."""
        clock = asyncio.get_running_loop().time
        try:
            while (text := look()) is not None:
                if self._console.has_terminal:
                    self._console.status(text)
                elif line := self._lines.due(text, clock()):
                    self._console.note(f"horovodrun: {line}")
                await asyncio.sleep(LOOK_S)
        finally:
            self._console.status("")


def seen_by(jobs: Iterable[JobOverview], name: str, started: int) -> Seen:
    """What a coordinator's overview says of the job `name`."""
    job = next((one for one in jobs if one.name == name), None)
    if job is None:
        return Seen(started)
    return Seen(started, frozenset(job.waiting_ranks), job.epoch > 0)
