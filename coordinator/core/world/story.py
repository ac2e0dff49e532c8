"""The story of a job for people: which worlds it had, who left them and why, who is awaited. Bounded, and without I/O.

    Epoch 1 began with 3 members on hosts h1 and h2, 1.2 s after the first of them came.
    Epoch 1: rank 1 (pid 4242) on host h2 was lost: it ended by signal 9 (SIGKILL).
    Epoch 2 began with 2 members on host h1, 24 ms after rank 1 on host h2 was lost: rank 0 of epoch 1 keeps its
    number, rank 2 is now rank 1.

It says nothing that decides anything: a coordinator that loses it goes on as before. Nothing is written for the steps
of a world, and a world that loses or ends with thousands of members has a few entries all the same, because the entries
before them are what people look for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from horovod.base.words import plural, printable, ranks_in_words, shortened, uncapitalized
from horovod.protos.v1 import membership_pb2, story_pb2

MAX_ENTRIES = 64
MAX_BYTES = 32 << 10  # bytes of all entries of a job
MAX_SENTENCE = 500  # characters
MAX_TOLD = 8  # members of one world whose loss has an entry of its own; an entry for all others follows
LATE_S = 0.5  # after so long without a world, who is awaited has an entry
_MOST_NAMED = 16  # members that one entry names; of more it tells only how many
_MOST_HOSTS = 4

Event: TypeAlias = "story_pb2.StoryEvent.ValueType"
FORMED = story_pb2.STORY_EVENT_FORMED
LOST = story_pb2.STORY_EVENT_LOST
LEFT = story_pb2.STORY_EVENT_LEFT
WAITS = story_pb2.STORY_EVENT_WAITS
TAKEN_OVER = story_pb2.STORY_EVENT_TAKEN_OVER
OVER = story_pb2.STORY_EVENT_OVER


@dataclass(frozen=True)
class Moment:
    now_s: float  # by a clock that never jumps: for durations
    wall_s: float  # seconds since 1970: for people


class Story:
    """Of one job. Each method takes the moment at which something has happened."""

    def __init__(self, job: str, record: story_pb2.JobStory | None = None) -> None:
        """record: what another coordinator has written of it."""
        found = record or story_pb2.JobStory()
        self.job = job
        self.epoch, self.size, self.members = found.epoch, found.size, found.members  # as in JobStory
        self.entries = tuple(found.entries)  # replaced as a whole, so that other threads may read it
        self._bytes = sum(entry.ByteSize() for entry in self.entries)
        self.number = self.entries[-1].number if self.entries else 0  # number of the latest entry
        self._since_s: float | None = None  # when the job ceased to have all members of a world
        self._since = ""  # completes "24 ms after ..." when no member is gone
        self._gone: dict[int, membership_pb2.MemberGone] = {}  # rank -> who will not join again, of this epoch
        self._told = 0  # how many of `_gone` have an entry of their own
        self._done: list[int] = []  # ranks in the entry about members that have done their work
        self._awaits = ""  # the latest sentence about who is awaited, as long as it is true

    @property
    def record(self) -> story_pb2.JobStory:
        """What the store keeps."""
        return story_pb2.JobStory(
            job=self.job, epoch=self.epoch, size=self.size, members=self.members, entries=self.entries
        )

    @property
    def is_over(self) -> bool:
        return is_over(self)

    # -- what happens --------------------------------------------------------------------------------------------------

    def came(self, moment: Moment) -> None:
        """A process waits for the next world."""
        if not self.members:
            self._begin_to_wait("the first of them came", moment)

    def formed(self, world: membership_pb2.World, claims: Mapping[str, int], moment: Moment) -> float:
        """A world has begun. claims: by member id, the rank in the last world. Returns how many seconds it took."""
        took_s = 0.0 if self._since_s is None else max(0.0, moment.now_s - self._since_s)
        after = self._after()
        hosts = list(dict.fromkeys(host.identity.name for host in world.hosts))
        where = f"{'host' if len(hosts) == 1 else 'hosts'} {shortened(hosts, _MOST_HOSTS)}"
        began = f"World {world.epoch} began with {plural(len(world.members), 'member')} on {where}"
        if after:
            began += f", {_duration(took_s)} after {after}"
        old = (claims.get(one.member_id) for one in world.members)
        before = {rank: one for rank, one in enumerate(old) if one is not None} if claims else {}
        changes = self._changes(before, len(world.members)) if before else ""
        self._begin_world(world)
        self._add(FORMED, f"{began}: {changes}." if changes else f"{began}.", moment)
        return took_s

    def gone(self, told: membership_pb2.MemberGone, moment: Moment) -> None:
        """A member of the world has left it or was lost."""
        if told.epoch != self.epoch or told.rank in self._gone:
            return
        self._begin_to_wait(f"the first of its members left world {self.epoch} to join again", moment)
        if not told.returns:
            self._gone[told.rank] = told
            self.members = max(0, self.members - 1)
            self._tell_gone(told, moment)

    def waits(self, sentence: str, moment: Moment) -> None:
        """sentence: what the processes that wait for a world wait for; "": none waits. Repeated calls change nothing.

        Members of a world come back one after the other; the story has an entry only when some are late.
        """
        if self._since_s is not None and moment.now_s - self._since_s < LATE_S:
            return
        is_news = sentence not in ("", self._awaits)
        self._awaits = sentence
        if is_news:
            self._add(WAITS, sentence, moment, replaces=self._last_is(WAITS))

    def taken_over(self, record: membership_pb2.WorldRecord, gone: membership_pb2.GoneRecord, moment: Moment) -> None:
        """Another coordinator had this world, and may have had no time to write down the latest entries."""
        world = record.world
        if self.epoch != world.epoch:
            self._begin_world(world)
            began = f"World {world.epoch} began with {plural(len(world.members), 'member')}, at another coordinator."
            self._add(FORMED, began, moment)
        lasting = [one for one in gone.gone if not one.returns]
        unknown = len(lasting) - (self.size - self.members)
        named = {entry.rank for entry in self.entries if entry.epoch == self.epoch and entry.HasField("rank")}
        for one in [one for one in lasting if one.rank not in named][: max(0, unknown)]:
            self.gone(one, moment)
        self._gone = {one.rank: one for one in lasting}
        self.members = self.size - len(lasting)
        if gone.gone:  # without a loss the world goes on as it was
            self._begin_to_wait("the job was taken over", moment)
        present = f"{self.members} of its {plural(self.size, 'member')}"
        sentence = f"World {self.epoch} was taken over from another coordinator, with {present}."
        self._add(TAKEN_OVER, sentence, moment, replaces=self._last_is(TAKEN_OVER))

    def over(self, moment: Moment) -> None:
        """No process of the job is left. Nothing follows from it for a job of which there is nothing to tell."""
        self.members = 0
        self._since_s, self._awaits = None, ""
        self._gone = {}
        if self.entries and not self.is_over:
            none = f"is left after world {self.epoch}" if self.epoch else "waits for its first world any more"
            self._add(OVER, f"No process of the job {none}.", moment)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin_world(self, world: membership_pb2.World) -> None:
        self.epoch, self.size, self.members = world.epoch, len(world.members), len(world.members)
        self._since_s, self._awaits, self._told = None, "", 0
        self._gone, self._done = {}, []

    def _begin_to_wait(self, since: str, moment: Moment) -> None:
        if self._since_s is None:
            self._since_s, self._since = moment.now_s, since

    def _after(self) -> str:
        """After what a world formed: completes "24 ms after ..."; "" where that is not known."""
        if self._since_s is None:
            return ""
        lost = [one for one in self._gone.values() if not one.orderly]
        gone = lost or list(self._gone.values())
        if not gone:
            return self._since
        if len(gone) == 1:
            where = f" on host {gone[0].host}" if gone[0].host else ""
            return f"rank {gone[0].rank}{where} {'was lost' if lost else 'left'}"
        return f"{ranks_in_words(one.rank for one in gone)} {'were lost' if lost else 'left'}"

    def _changes(self, before: Mapping[int, int], size: int) -> str:
        """How ranks have changed, in words. before: by rank in the new world, the rank in the last one."""
        moved: dict[int, list[int]] = {}  # how far a rank has moved -> the members that moved so far
        for rank, old in before.items():
            moved.setdefault(old - rank, []).append(old)
        stayed = moved.pop(0, [])
        parts = []
        if not moved:
            parts.append(f"the members of world {self.epoch} keep their ranks")
        elif stayed:
            keep = "keeps its number" if len(stayed) == 1 else "keep their numbers"
            parts.append(f"{ranks_in_words(stayed)} of world {self.epoch} {keep}")
        for by, ranks in list(moved.items())[:_MOST_HOSTS]:
            of = "" if parts else f" of world {self.epoch}"
            now = ranks_in_words(old - by for old in ranks)
            parts.append(f"{ranks_in_words(ranks)}{of} {'is' if len(ranks) == 1 else 'are'} now {now}")
        if len(moved) > _MOST_HOSTS:
            parts.append("others have lower ranks too")
        if new := set(range(size)) - before.keys():
            parts.append(f"{ranks_in_words(new)} {'is' if len(new) == 1 else 'are'} new")
        if absent := set(range(self.size)) - set(before.values()) - self._gone.keys():
            parts.append(f"{ranks_in_words(absent)} of world {self.epoch} did not join again")
        return ", ".join(parts)

    def _tell_gone(self, told: membership_pb2.MemberGone, moment: Moment) -> None:
        event = LEFT if told.orderly else LOST
        sentence = f"World {self.epoch}: {uncapitalized(told.sentence)}"
        if told.done:
            self._done.append(told.rank)
            count = len(self._done)
            who = ranks_in_words(self._done) if count <= _MOST_NAMED else plural(count, "member")
            if count > 1:
                merged = f"World {self.epoch}: {who} have done their work and left."
                self._add(event, merged, moment, brief=True, replaces=self._last_is(LEFT))
                return
        else:
            self._told += 1
            if self._told > MAX_TOLD:
                others = f"World {self.epoch}: {plural(self._told - MAX_TOLD, 'further member')} left or were lost."
                self._add(event, others, moment, brief=True, replaces=self._last_is(LOST, LEFT, brief=True))
                return
        self._add(event, sentence, moment, told=told)

    def _last_is(self, *events: Event, brief: bool = False) -> bool:
        """Whether the last entry is of such an event in this epoch. brief: and about many members."""
        last = self.entries[-1] if self.entries else None
        return last is not None and last.event in events and last.epoch == self.epoch and (last.brief or not brief)

    def _add(
        self,
        event: Event,
        sentence: str,
        moment: Moment,
        *,
        told: membership_pb2.MemberGone | None = None,
        brief: bool = False,
        replaces: bool = False,
    ) -> None:
        """replaces: the last entry, which the new one makes superfluous."""
        self.number += 1
        entry = story_pb2.StoryEntry(
            number=self.number,
            at=moment.wall_s,
            epoch=self.epoch,
            event=event,
            sentence=printable(sentence, MAX_SENTENCE),
            rank=told.rank if told else None,
            host=printable(told.host, MAX_SENTENCE) if told else "",
            brief=brief,
        )
        kept = self.entries[:-1] if replaces else self.entries
        self._bytes += entry.ByteSize() - (self.entries[-1].ByteSize() if replaces else 0)
        while kept and (len(kept) >= MAX_ENTRIES or self._bytes > MAX_BYTES):
            self._bytes -= kept[0].ByteSize()
            kept = kept[1:]
        self.entries = (*kept, entry)


def is_over(story: Story | story_pb2.JobStory) -> bool:
    """Whether the last that is known is that no process of the job is left."""
    return len(story.entries) > 0 and story.entries[-1].event == OVER


def after(entries: Sequence[story_pb2.StoryEntry], number: int) -> list[story_pb2.StoryEntry]:
    """The entries that came after the one with this number."""
    return list(takewhile(lambda entry: entry.number > number, reversed(entries)))[::-1]


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
