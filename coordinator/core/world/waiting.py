"""The members that wait for a job's next world: how many it may have, who waits, and what it is to be like."""

from __future__ import annotations

from dataclasses import dataclass, field

from horovod.base.words import plural
from horovod.coordinator.core.ranks import Place
from horovod.protos.v1 import membership_pb2 as pb


@dataclass(frozen=True)
class Sizes:
    """Of a job of fixed size, both numbers are equal and is_elastic is false."""

    fewest: int
    most: int
    is_elastic: bool

    def __str__(self) -> str:
        """`4 members`, `2 to 8 members`."""
        return plural(self.most, "member") if self.fewest == self.most else f"{self.fewest} to {self.most} members"


def sizes_of(request: pb.JoinRequest) -> Sizes:
    if request.HasField("sizes"):
        return Sizes(request.sizes.fewest, request.sizes.most, is_elastic=True)
    return Sizes(request.size, request.size, is_elastic=False)


def sizes_of_world(world: pb.World) -> Sizes:
    if world.HasField("sizes"):
        return Sizes(world.sizes.fewest, world.sizes.most, is_elastic=True)
    return Sizes(len(world.members), len(world.members), is_elastic=False)


# The members that wait for a job's next world, in the order in which they joined.

MOST_TOLD_PER_S = 1000  # progress messages of one job; what they cost must not grow faster than their number
TELL_EVERY_S = 0.2  # seconds between two progress messages to the same members, at least


@dataclass
class Waiting:
    requests: dict[str, pb.JoinRequest] = field(default_factory=dict)  # by member id, in join order
    by_rank: dict[int, pb.JoinRequest] = field(default_factory=dict)  # requested rank -> the request
    claims: dict[int, str] = field(default_factory=dict)  # rank of the last world -> who has proved to have been it
    claim_of: dict[str, int] = field(default_factory=dict)  # member id -> the rank that it has proved to have been
    bytes: int = 0  # bytes of all requests, without the options, which are the same in all of them
    kept_bytes: int = 0  # bytes of all requests, options included
    told: dict[str, str] = field(default_factory=dict)  # member id -> the progress sentence that it was sent last
    told_at_s: float | None = None
    tell_later: bool = False  # an effect TellLater was returned and is not due yet
    expected: int = 0  # for how many members the first world of an elastic job waits; 0: nobody has said so

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, member_id: object) -> bool:
        return member_id in self.requests

    @property
    def first(self) -> pb.JoinRequest | None:
        return next(iter(self.requests.values()), None)

    def add(self, request: pb.JoinRequest, claim: int | None) -> None:
        self.requests[request.member_id] = request
        self.bytes += bytes_of(request)
        self.kept_bytes += request.ByteSize()
        self.expected = max(self.expected, request.size)
        if request.HasField("requested_rank"):
            self.by_rank[request.requested_rank] = request
        if claim is not None:
            self.claims[claim] = request.member_id
            self.claim_of[request.member_id] = claim

    def remove(self, member_id: str) -> int | None:
        """Removes the member. Returns the rank of the last world that it had claimed, or None."""
        request = self.requests.pop(member_id)
        self.bytes -= bytes_of(request)
        self.kept_bytes -= request.ByteSize()
        self.told.pop(member_id, None)
        if request.HasField("requested_rank"):
            self.by_rank.pop(request.requested_rank, None)
        claim = self.claim_of.pop(member_id, None)
        if claim is not None:
            del self.claims[claim]
        return claim

    def tell_after_s(self, now_s: float) -> float:
        """How long progress must not be told yet, so that it is told at a bounded rate; 0: now."""
        if self.told_at_s is None:
            return 0.0
        return max(0.0, self.told_at_s + max(TELL_EVERY_S, len(self) / MOST_TOLD_PER_S) - now_s)


def bytes_of(request: pb.JoinRequest) -> int:
    options = sum(len(name) + len(value) for name, value in request.options.items())
    return max(0, request.ByteSize() - options)


# A world about to form, and the message that says what it is once it has.
#
# The message goes to every member, so it is kept small: each host and each of its interfaces is in it once, and members
# refer to them by number in two packed arrays (an Endpoint of types.proto for each would take ten times as much).


@dataclass(eq=False)
class Formation:
    """A world about to form. If a member goes away, a new Formation replaces it; they are compared by identity."""

    job: str
    requests: dict[str, pb.JoinRequest]
    places: tuple[Place, ...]
    newcomers: frozenset[str] = frozenset()  # ids of members that were not in the last world, when others were
    work: pb.JobWork = field(default_factory=pb.JobWork)  # what the job has done until now
    anew: str = ""  # what the user is told when the training begins anew although the job has committed

    def world(self, epoch: int, secret: bytes) -> pb.World:
        hosts = _Hosts()
        members = []
        for place in self.places:
            request = self.requests[place.member_id]
            host = hosts.place_of(request.host)
            member = pb.Member(
                member_id=place.member_id, host=host, pid=request.pid, segment_address=request.segment_address
            )
            for endpoint in request.endpoints:
                member.interfaces.append(hosts.interface(host, endpoint.address, endpoint.interface))
                member.ports.append(endpoint.port)
            members.append(member)
        return pb.World(
            job=self.job,
            epoch=epoch,
            members=members,
            secret=secret,
            options=self._first.options,
            hosts=hosts.messages,
            local_ranks=[place.local_rank for place in self.places],
            cross_ranks=[place.cross_rank for place in self.places],
            sizes=self._first.sizes if self._first.HasField("sizes") else None,
            newcomers=[rank for rank, place in enumerate(self.places) if place.member_id in self.newcomers],
            hears_of_work=self._first.HasField("sizes"),
            has_commits=bool(self.work.committed_epoch),
            notice=self.anew,
            version=self._first.version,
        )

    @property
    def _first(self) -> pb.JoinRequest:
        return next(iter(self.requests.values()))

    def record(self, epoch: int, secret: bytes) -> pb.WorldRecord:
        """What the store keeps of the world."""
        requests = [self.requests[place.member_id] for place in self.places]
        incarnations = [request.incarnation for request in requests]
        slots = [request.requested_rank + 1 if request.HasField("requested_rank") else 0 for request in requests]
        return pb.WorldRecord(
            world=self.world(epoch, secret),
            processes=[request.process for request in requests],
            incarnations=incarnations if any(incarnations) else [],
            slots=slots if self._first.HasField("sizes") and any(slots) else [],
            work=self.work if self._first.HasField("sizes") else None,
        )


def requests_of(record: pb.WorldRecord) -> list[pb.JoinRequest]:
    """The other way round: as much of the requests of a world's members as is needed once it runs, in rank order."""
    world = record.world
    identities = [host.identity for host in world.hosts]
    return [
        pb.JoinRequest(
            job=world.job,
            member_id=member.member_id,
            size=len(world.members),
            host=identities[member.host],
            pid=member.pid,
            segment_address=member.segment_address,
            options=world.options,
            process=record.processes[rank] if rank < len(record.processes) else None,
            incarnation=record.incarnations[rank] if rank < len(record.incarnations) else 0,
            requested_rank=record.slots[rank] - 1 if rank < len(record.slots) and record.slots[rank] else None,
            sizes=world.sizes if world.HasField("sizes") else None,
            version=world.version,
        )
        for rank, member in enumerate(world.members)
    ]


class _Hosts:
    """Each host and each of its interfaces once."""

    def __init__(self) -> None:
        self.messages: list[pb.Host] = []
        self._places: dict[tuple[str, str], int] = {}
        self._interfaces: dict[tuple[int, str, str], int] = {}

    def place_of(self, identity: pb.HostIdentity) -> int:
        key = (identity.name, identity.shared_memory_domain)
        if key not in self._places:
            self._places[key] = len(self.messages)
            self.messages.append(pb.Host(identity=identity))
        return self._places[key]

    def interface(self, host: int, address: str, name: str) -> int:
        key = (host, address, name)
        if key not in self._interfaces:
            self._interfaces[key] = len(self.messages[host].interfaces)
            self.messages[host].interfaces.add(address=address, name=name)
        return self._interfaces[key]
