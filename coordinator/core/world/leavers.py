"""Members without which their world is to go on: those that have said that they leave, and those that can't connect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from horovod.base.errors import WorldCode, coded
from horovod.base.words import capitalized, plural, printable, shortened
from horovod.protos.v1 import membership_pb2 as pb

from .effects import Effect, LookLater, Send
from .life import Present
from .waiting import MOST_TOLD_PER_S, TELL_EVERY_S, sizes_of_world


@dataclass
class Leavers:
    """Of one world."""

    told: pb.MembershipEvent | None = None  # what members were told last about those who leave
    _reasons: dict[int, str] = field(default_factory=dict)  # rank -> why it leaves, in the order in which they said it
    _is_news: bool = False
    _told_at_s: float | None = None
    _due_at_s: float | None = None  # the time for which a LookLater was returned; None: none is due

    def add(self, one: Present, reason: str) -> None:
        """This member of the world will leave. The first reason counts."""
        if one.rank not in self._reasons:
            self._reasons[one.rank] = reason
            self._is_news = True

    def tell(
        self, world: pb.World, present: Mapping[str, Present], waiting: int, now_s: float, has_commits: bool = False
    ) -> list[Effect]:
        """Tells the members that are present what they have not been told: now, or later if that was just before.

        waiting: processes that wait for a place beside the world. has_commits: the job has committed something.
        """
        if not self._is_news:
            return []
        if self._told_at_s is not None:
            due_at_s = self._told_at_s + max(TELL_EVERY_S, len(present) / MOST_TOLD_PER_S)
            if now_s < due_at_s:
                is_asked, self._due_at_s = self._due_at_s == due_at_s, due_at_s
                return [] if is_asked else [LookLater(world.job, due_at_s - now_s)]
        self._is_news, self._told_at_s = False, now_s
        sentence = self._in_words(world, present, waiting, has_commits)
        leavers = pb.Leavers(epoch=world.epoch, ranks=sorted(self._reasons), sentence=sentence)
        self.told = pb.MembershipEvent(leavers=leavers)
        return [Send(member_id, self.told) for member_id in present]

    def _in_words(self, world: pb.World, present: Mapping[str, Present], waiting: int, has_commits: bool) -> str:
        going = [one for one in present.values() if one.rank in self._reasons]
        verb = "leaves" if len(going) == 1 else "leave"
        reason = next(iter(self._reasons.values())) or "it said so"
        who = capitalized(shortened([str(one) for one in going], 4))
        sentence = f"{who} {verb} job {world.job!r} at the next commit ({reason})."
        stay, sizes = len(present) - len(going), sizes_of_world(world)
        if stay == 0:
            who_waits = f"{plural(waiting, 'process')} that {'waits' if waiting == 1 else 'wait'}"
            begin = f" {who_waits} can start it from the beginning."
            lost = " The state that they have committed is lost." if has_commits else begin if waiting else ""
            return f"{sentence} No member stays, so the job ends for all of them.{lost}"
        if stay + waiting < sizes.fewest:
            return f"{sentence} Of at least {plural(sizes.fewest, 'member')} {stay} will be left, and wait for others."
        return f"{sentence} The job goes on with {plural(min(stay + waiting, sizes.most), 'member')}."


# Members of a world that can't connect to each other: who is told, and who goes on without whom.
#
# Each member has a connection to the coordinator, so the coordinator has formed their world; but a firewall, a wrong
# interface or a broken link is between some of their hosts. The one of a pair that connects says so, once no address of
# the other one has taken its connection for a while. Others find the same at about the same time, so the answer waits
# for GATHER_S and names all pairs.
#
# A job of fixed size can't go on: all members are told the same sentence, and end. An elastic one goes on without those
# that `to_go` names, where enough are left: rather without newcomers than with a training that ends for them.

GATHER_S = 1.0
MAX_NAMED = 4
# Pairs kept of one world; a sentence names a few, and a rank that can't reach most others is among these.
MAX_PAIRS = 1 << 16

_ADVICE = (
    "Check that no firewall is between the hosts, or name the interfaces that reach all of them with "
    "HOROVOD_NETWORK_INTERFACES."
)

Pair = tuple[int, int]  # the rank that connects, and the one that it can't reach


@dataclass
class Unconnected:
    """Of one world."""

    _tried: dict[int, str] = field(default_factory=dict)  # rank that reports -> what it tried
    _pairs: dict[Pair, None] = field(default_factory=dict)  # in the order in which they were reported
    _due_at_s: float | None = None

    def add(self, one: Present, report: pb.Unconnected, members: Collection[int], now_s: float) -> list[Effect]:
        """What this member of the world reports. members: the ranks of those that are there."""
        self._tried.setdefault(one.rank, printable(report.tried))
        others = [rank for rank in dict.fromkeys(report.ranks) if rank in members and rank != one.rank]
        room = max(0, MAX_PAIRS - len(self._pairs))
        self._pairs.update(dict.fromkeys((one.rank, rank) for rank in others[:room]))
        if self._due_at_s is not None:
            return []
        self._due_at_s = now_s + GATHER_S
        return [LookLater(one.request.job, GATHER_S)]

    def due(self, members: Mapping[int, Present], now_s: float) -> list[Pair]:
        """The pairs of members that are still there, by rank, once all have had the time to report theirs."""
        if self._due_at_s is None or now_s < self._due_at_s:
            return []
        self._due_at_s = None
        return [pair for pair in self._pairs if set(pair) <= members.keys()]

    def in_words(self, pairs: Collection[Pair], members: Mapping[int, Present]) -> str:
        """Who can't reach whom; no full stop."""
        reached: dict[int, list[str]] = {}
        for rank, other in pairs:
            reached.setdefault(rank, []).append(str(members[other]))
        parts = []
        for rank, others in reached.items():
            tried = f" (tried {self._tried[rank]})" if self._tried[rank] else ""
            parts.append(f"{members[rank]} can't connect to {shortened(others, MAX_NAMED)}{tried}")
        return shortened(parts, MAX_NAMED)


def told(epoch: int, words: str, member_ids: Iterable[str]) -> list[Effect]:
    """Tells these members the sentence with which they end."""
    sentence = coded(WorldCode.UNREACHABLE_PEER, f"{capitalized(words)}. {_ADVICE}")
    event = pb.MembershipEvent(unconnectable=pb.Unconnectable(epoch=epoch, sentence=sentence))
    return [Send(member_id, event) for member_id in member_ids]


def to_go(pairs: Collection[Pair], newcomers: Collection[int]) -> set[int]:
    """Ranks without which all others can connect: newcomers first, then those that miss the most, then high ranks."""
    of: dict[int, set[Pair]] = {}  # rank -> its pairs that are left
    for pair in pairs:
        for rank in pair:
            of.setdefault(rank, set()).add(pair)

    def entry(rank: int) -> tuple[bool, int, int]:
        """The least of all entries is that of the rank that goes next. It holds for as long as no pair of it goes."""
        return rank not in newcomers, -len(of[rank]), -rank

    entries, gone = [entry(rank) for rank in of], set()
    heapify(entries)
    while entries:
        found = heappop(entries)
        worst = -found[2]
        if not of[worst] or found != entry(worst):
            continue
        gone.add(worst)
        for pair in of.pop(worst):
            other = pair[0] if pair[1] == worst else pair[1]
            of[other].discard(pair)
            heappush(entries, entry(other))
        of[worst] = set()
    return gone
