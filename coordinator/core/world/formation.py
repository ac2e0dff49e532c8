"""A world about to form, and the message that says what it is once it has.

The message goes to every member, so it is kept small: each host and each of its interfaces is in it once, and members
refer to them by number in two packed arrays (an Endpoint of types.proto for each would take ten times as much).
"""

from dataclasses import dataclass, field

from horovod.coordinator.core.ranks import Place
from horovod.protos.v1 import membership_pb2 as pb


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
