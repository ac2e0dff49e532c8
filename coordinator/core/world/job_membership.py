"""The members of one job: those that wait for its next world, and those of its running world that are still there."""

from dataclasses import dataclass, field

from horovod.base.words import plural, process_in_words, ranks_in_words, shortened
from horovod.coordinator.core.ending import RankEnded
from horovod.protos.v1 import membership_pb2 as pb

from .formation import Formation
from .life import Life
from .waiting import Waiting


@dataclass
class Present:
    """A member of the running world that has neither left nor been lost."""

    rank: int
    request: pb.JoinRequest
    life: Life = field(default_factory=Life)

    @property
    def member_id(self) -> str:
        return self.request.member_id

    @property
    def started_as(self) -> int:
        """The rank that its launcher gave it."""
        return self.request.requested_rank if self.request.HasField("requested_rank") else self.rank

    def __str__(self) -> str:
        return process_in_words(self.rank, self.request.pid, self.request.host.name)


@dataclass
class LastWorld:
    """The last world of a job: with its secret, former members prove who they were, also after the world has ended."""

    epoch: int
    secret: bytes
    used: set[str] = field(default_factory=set)  # member ids that came with a proof; no member id may come twice


@dataclass
class JobMembership:
    """The waiting and present members of the job with this name."""

    name: str
    waiting: Waiting = field(default_factory=Waiting)
    forming: Formation | None = None
    refused: str = ""  # why the last process that tried to join was refused, for the members that wait
    world: pb.World | None = None
    epoch: int = 0  # of the running world, or of the last one when none runs
    present: dict[str, Present] = field(default_factory=dict)  # by member id
    awaited: dict[str, Present] = field(default_factory=dict)  # those of `present` that have not joined again
    suspected: dict[str, Present] = field(default_factory=dict)  # those of `present` that may be lost
    by_rank: dict[int, Present] = field(default_factory=dict)
    # Process namespace -> its members, also those that are gone.
    by_namespace: dict[str, list[Present]] = field(default_factory=dict)
    gone: dict[int, pb.MemberGone] = field(default_factory=dict)  # rank -> how it left the running world or was lost
    causes: dict[str, str] = field(default_factory=dict)  # member id -> the sentence with which it was declared lost

    def start(self, world: pb.World, requests: dict[str, pb.JoinRequest]) -> None:
        """`world` is the running one from now on, and no member waits any more."""
        self.world = world
        self.epoch = world.epoch
        self.waiting = Waiting()
        self.forming = None
        self.present = {}
        self.by_namespace = {}
        for rank, member in enumerate(world.members):
            one = Present(rank, requests[member.member_id])
            self.present[member.member_id] = one
            if namespace := one.request.process.namespace:
                self.by_namespace.setdefault(namespace, []).append(one)
        self.by_rank = {one.rank: one for one in self.present.values()}
        self.awaited = dict(self.present)
        self.suspected, self.gone, self.causes = {}, {}, {}

    def remove_present(self, member_id: str) -> Present | None:
        one = self.present.pop(member_id, None)
        if one is not None:
            self.awaited.pop(member_id, None)
            self.suspected.pop(member_id, None)
            del self.by_rank[one.rank]
        return one

    def unaware(self, request: pb.JoinRequest) -> Present | None:
        """The member of a taken-over world whose process joins anew, so it never got that world."""
        if self.world is None or not request.process.start_time or request.rejoin.epoch == self.world.epoch:
            return None
        return next((one for one in self.suspected.values() if one.life.unseen and is_same(one.request, request)), None)

    def started_as(self, ended: RankEnded) -> Present | None:
        """The member whose process an agent saw end, or that ran below that process and has the rank given to it."""
        if ended.rank in self.gone:
            return None
        one = self.by_rank.get(ended.rank)
        if one is None or one.request.pid != ended.pid:
            same = (other for other in self.present.values() if other.request.pid == ended.pid)
            one = next((other for other in same if other.request.host.name == ended.host), one)
        if one is None or one.request.host.name != ended.host or ended.incarnation < one.request.incarnation:
            return None
        return one if ended.pid == one.request.pid or ended.rank == one.started_as else None

    def successor(self, request: pb.JoinRequest) -> pb.JoinRequest | None:
        """The member that was started later in the place of the process that sends `request`."""
        return next((one for one in self._same_slot(request) if one.incarnation > request.incarnation), None)

    def predecessors(self, request: pb.JoinRequest) -> list[pb.JoinRequest]:
        """Members in whose place the process was started that sends `request`: their processes have ended."""
        return [one for one in self._same_slot(request) if one.incarnation < request.incarnation]

    def _same_slot(self, request: pb.JoinRequest) -> list[pb.JoinRequest]:
        """Members that the same scheduler has started as the same rank."""
        if not request.incarnation:
            return []
        waiting = self.waiting.by_rank.get(request.requested_rank)
        present = (one.request for one in self.present.values() if one.started_as == request.requested_rank)
        return [one for one in (waiting, *present) if one is not None and one.incarnation]

    def claimed(self, rank: int) -> None:
        """The member of that rank has joined again, so the next world need not wait for its goodbye."""
        if one := self.by_rank.get(rank):
            self.awaited.pop(one.member_id, None)

    def unclaimed(self, rank: int) -> None:
        if one := self.by_rank.get(rank):
            self.awaited[one.member_id] = one

    def is_whole(self) -> bool:
        """True when a world runs of which no member is gone, has joined again, or is away."""
        return self.world is not None and len(self.awaited) == len(self.world.members) and not self.suspected

    def connected(self) -> bool:
        """Whether any member of the running world is connected."""
        return len(self.suspected) < len(self.present) or any(
            one.life.away_since_s is None for one in self.suspected.values()
        )

    def witnesses(self, one: Present) -> list[Present]:
        """Connected members that see the process of `one`, because they share its process namespace."""
        return [
            other
            for other in self.by_namespace.get(one.request.process.namespace, ())
            if other is not one and other.member_id in self.present and other.life.away_since_s is None
        ]

    def progress(self) -> str:
        """What the waiting members wait for, as a sentence; "" while they wait for the store alone."""
        first = self.waiting.first
        if first is None or self.forming is not None:
            return ""
        missing = first.size - len(self.waiting)
        parts: list[str] = []
        if missing and first.HasField("requested_rank"):
            parts.append(f"waiting for {ranks_in_words(set(range(first.size)) - self.waiting.by_rank.keys())}")
        elif missing:
            parts.append(f"waiting for {missing} more")
        if self.awaited and self.world:
            who = shortened([str(one) for one in self.awaited.values()], 4)
            parts.append(f"waiting until the world of epoch {self.world.epoch} has ended, which still has {who}")
        if self.refused:
            parts.append(self.refused)
        return f"{len(self.waiting)} of {plural(first.size, 'member')} of job {self.name!r} joined; {'; '.join(parts)}."


def is_same(one: pb.JoinRequest, other: pb.JoinRequest) -> bool:
    """Whether both come from one process: a pid alone is used again, and another host has its own."""
    return one.pid == other.pid and one.host.name == other.host.name and one.process == other.process
