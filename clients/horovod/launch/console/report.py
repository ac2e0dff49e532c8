"""What a launcher tells of its job: who is missing at the start, with --verbose its story, and its outcome.

The start, while hosts connect and ranks start and join: how many of how many, and which are missing. On a terminal it
is a line at the bottom that goes away when the world stands. Elsewhere it is a plain line once the start takes long,
and then ever less often; with --verbose one for each change. A program that never calls hvd.init() has no world to wait
for: nothing is said until the first rank has joined.

The story (--verbose): each entry of it (coordinator/core/world/story.py) with its time, but for who is awaited before
the first world, which the start shows. And when a spare process, which waited beside a world of as many members as may
be, has taken a place.

The end: the last lines of the job's output, one sentence, one exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod.base.errors import ClusterCode, LaunchCode, code_of, coded, coded_like, without_code
from horovod.base.words import ranks_in_words, shortened
from horovod.coordinator.core.cluster.job import OVER
from horovod.coordinator.core.world.membership import JobOverview
from horovod.coordinator.core.world.story import WAITS, after
from horovod.protos.v1 import jobs_pb2
from horovod.protos.v1.story_pb2 import StoryEntry
from horovod.worker.agent.output import Console

LOOK_S = 0.2
FIRST_LINE_S = 15.0  # after so long a line says what is still missing
_MOST_HOSTS = 4

STORY_LOOK_S = 0.05  # between two looks at a coordinator in this process
ASK_S = 1.0  # seconds between two questions to a coordinator in another process
LAST_LOOK_S = 2.0  # seconds for the answer to the last question

_OUTPUT_GRACE_S = 1.0
_POLL_S = 0.05
_REPEATED = (LaunchCode.FAILED_AT_START, LaunchCode.RESET_LIMIT)

Note = Callable[[str], None]
Look = Callable[[], Awaitable[Sequence[StoryEntry]]]


@dataclass(frozen=True)
class Seen:
    """The state of a start. `formed`: there is a world, and no more to tell."""

    started: int  # processes that have been started
    joined: frozenset[int] = frozenset()  # ranks that have joined
    formed: bool = False


def sentence(seen: Seen, hosts: Sequence[str]) -> str:
    """The processes that the job waits for, in words; "" if it waits for none. hosts[rank] is the rank's host."""
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


def line_of(entry: StoryEntry) -> str:
    """`09:41:07.123 Epoch 3 began with ...`, in local time."""
    whole_s = int(entry.at)
    stamp = time.strftime("%H:%M:%S", time.localtime(whole_s))
    return f"{stamp}.{int((entry.at - whole_s) * 1000):03} {entry.sentence}"


class StoryLines:
    """Tells each entry once."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._told = 0  # the number of the latest entry that was told

    def tell(self, entries: Sequence[StoryEntry]) -> None:
        for entry in after(entries, self._told):
            self._told = entry.number
            if entry.epoch or entry.event != WAITS:
                self._note(line_of(entry))


@contextlib.asynccontextmanager
async def story_told(note: Note | None, look: Look, every_s: float = STORY_LOOK_S) -> AsyncIterator[None]:
    """Tells the story while the body runs, and the rest of it when that ends without an error.

    note: shows a line; None: nothing is told. look: the entries there are.
    """
    if note is None:
        yield
        return
    lines = StoryLines(note)

    async def tell() -> None:
        while True:
            lines.tell(await look())
            await asyncio.sleep(every_s)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    with contextlib.suppress(asyncio.TimeoutError):
        lines.tell(await asyncio.wait_for(look(), LAST_LOOK_S))


class Spares:
    """A job's worlds, as its coordinator reported them. Processes are named by their start numbers."""

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
        return f"spare {which} {verb} taken the place of lost processes{saved}; the world has {job.size} members."


async def tell_of_spares(overview: Callable[[], Iterable[JobOverview]], note: Callable[[str], None]) -> None:
    """Looks at the launcher's one job until it is cancelled."""
    spares = Spares()
    while True:
        for job in overview():
            if sentence := spares.seen(job):
                note(sentence)
        await asyncio.sleep(LOOK_S)


def outcome_of(record: jobs_pb2.JobRecord, last_words: Callable[[int], str] = lambda rank: "") -> tuple[int, str]:
    """The exit code of a launcher for a job that is over, and what to say about it.

    last_words: the last line that a rank has written to stderr; "" if none is known. It is shown where processes
    have failed again and again, or at once, since its last lines on the screen may be of other ranks.
    """
    if record.state == jobs_pb2.JOB_STATE_SUCCEEDED:
        return 0, ""
    if record.state not in OVER:
        sentence = f"The coordinator ended the stream before job {record.id} was over: see `horovodrun ps`."
        return 1, coded(ClusterCode.CLUSTER_SILENT, sentence)
    sentence = record.sentence
    # Coordinators of earlier releases tell no code.
    if record.state == jobs_pb2.JOB_STATE_FAILED and sentence and code_of(sentence) is None:
        sentence = coded(LaunchCode.RANK_FAILED, sentence)
    if code_of(sentence) in _REPEATED:
        ends = reversed(record.outcomes)
        said = ((one.rank, words) for one in ends if one.code and (words := last_words(one.rank)))
        for rank, words in said:
            sentence = coded_like(sentence, f"{without_code(sentence)} The last line of rank {rank}: {words}")
            break
    return record.exit_code or 1, sentence


async def last_lines(console: Console, stopping: Callable[[], bool]) -> None:
    """Waits until a slow reader has taken the last lines; not for long once a person asked to stop.

    Signals must still be seen meanwhile, so this waits in small steps.
    """
    loop = asyncio.get_running_loop()
    give_up_at: float | None = None
    while not console.close(timeout_s=0):
        if stopping() and give_up_at is None:
            give_up_at = loop.time() + _OUTPUT_GRACE_S
        if give_up_at is not None and loop.time() > give_up_at:
            break
        await asyncio.sleep(_POLL_S)
