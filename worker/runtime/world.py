"""The world: an immutable value that says who the members of one epoch are and which of them this process is.

A new epoch is a new World; nothing here ever changes. It is checked once, when the coordinator's message comes in, so
that the rest of the runtime can rely on it.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from horovod.base.errors import EngineCode, coded
from horovod.base.words import printable
from horovod.worker.runtime.errors import StartError

if TYPE_CHECKING:
    from horovod.protos.v1 import membership_pb2


_LEAST_SECRET_BYTES = 16
MAX_TEXT = 4096  # characters; a coordinator accepts no longer texts


@dataclass(frozen=True)
class Endpoint:
    """Where a member's data plane listens. How many interfaces there are decides how many connections; see mesh.py."""

    address: str
    port: int
    interface: str = ""

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port} ({self.interface})" if self.interface else f"{host}:{self.port}"

    def is_usable(self) -> bool:
        """A port at a numeric address, so that no name has to be looked up."""
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            return False
        return 0 < self.port < 1 << 16


@dataclass(frozen=True)
class Member:
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    member_id: str
    host: str
    shared_memory_domain: str
    pid: int
    endpoints: tuple[Endpoint, ...] = ()
    segment_address: str = ""


@dataclass(frozen=True)
class World:
    """Members in rank order, seen from `rank`."""

    job: str
    epoch: int
    rank: int
    members: tuple[Member, ...]
    secret: bytes = field(default=b"", repr=False)
    options: Mapping[str, str] = field(default_factory=dict)
    newcomers: frozenset[int] = frozenset()  # ranks that were not in the job's last world, if others were

    @classmethod
    def of_one(cls, job: str, host: str, pid: int) -> World:
        """The world of a process that runs alone, without a coordinator."""
        alone = Member(0, 0, 1, 0, 1, member_id="", host=host, shared_memory_domain="", pid=pid)
        return cls(job, epoch=1, rank=0, members=(alone,))

    @classmethod
    def from_message(cls, message: membership_pb2.World, member_id: str) -> World:
        """Checks the coordinator's message. StartError when it is not a world that this member is part of."""
        try:
            members = _members(message)
        except (IndexError, ValueError) as error:
            raise _unusable(message, str(error)) from error
        mine = [m.rank for m in members if m.member_id == member_id]
        useless = [str(e) for m in members for e in m.endpoints if not e.is_usable()]
        problem = ""
        if len(mine) != 1:
            problem = f"this process is in it {len(mine)} times"
        elif len(members) > 1 and len(message.secret) < _LEAST_SECRET_BYTES:
            problem = f"its secret has {len(message.secret)} bytes, fewer than {_LEAST_SECRET_BYTES}"
        elif useless:
            problem = f"{useless[0]!r} is no address and port"
        if problem:
            raise _unusable(message, problem)
        newcomers = frozenset(message.newcomers)
        return cls(message.job, message.epoch, mine[0], members, message.secret, dict(message.options), newcomers)

    @property
    def me(self) -> Member:
        return self.members[self.rank]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def local_rank(self) -> int:
        return self.me.local_rank

    @property
    def local_size(self) -> int:
        return self.me.local_size

    @property
    def cross_rank(self) -> int:
        return self.me.cross_rank

    @property
    def cross_size(self) -> int:
        return self.me.cross_size

    @property
    def is_homogeneous(self) -> bool:
        """True when every host has the same number of ranks."""
        return len(set(Counter(m.host for m in self.members).values())) <= 1

    def label(self, rank: int) -> str:
        """How messages name a rank: "rank 1 (pid 4242) on host node-b"."""
        member = self.members[rank]
        return f"rank {rank} (pid {member.pid}) on host {member.host}"

    def subset(
        self, ranks: Sequence[int], secret: bytes = b"", endpoints: Mapping[int, tuple[Endpoint, ...]] | None = None
    ) -> World:
        """The members of a process set, this process among them, numbered by their place in it; for connecting them.

        Messages keep calling them by their ranks in the world. `endpoints`, by those ranks, replace the world's.
        """
        members = tuple(
            replace(self.members[rank], rank=place, endpoints=(endpoints or {}).get(rank, ()))
            for place, rank in enumerate(ranks)
        )
        mine = list(ranks).index(self.rank)
        return _Subset(self.job, self.epoch, mine, members, secret, self.options, world_ranks=tuple(ranks))

    def why_not_shared_memory(self) -> str | None:
        """None when all members can map each other's segments, else the reason as part of a sentence."""
        for member in self.members:
            if not member.segment_address:
                return f"{self.label(member.rank)} has no shared-memory segment"
            if member.host != self.me.host:
                return f"{self.label(member.rank)} is on another host than {self.label(self.rank)}"
            if member.shared_memory_domain != self.me.shared_memory_domain:
                return (
                    f"{self.label(member.rank)} and {self.label(self.rank)} run on different machines, in different "
                    "containers or as different users"
                )
        return None

    def placement(self) -> list[int]:
        """A number for each rank, equal for ranks of one host."""
        first: dict[str, int] = {}
        return [first.setdefault(member.host, member.rank) for member in self.members]

    def sharing_hosts(self) -> list[int]:
        """A number for each rank, equal for ranks that can map each other's segments; empty when no two ranks can."""
        first: dict[tuple[object, ...], int] = {}
        numbers = []
        for member in self.members:
            place = (member.host, member.shared_memory_domain) if member.segment_address else (member.rank,)
            numbers.append(first.setdefault(place, member.rank))
        return numbers if len(first) < self.size else []


@dataclass(frozen=True)
class _Subset(World):
    world_ranks: tuple[int, ...] = ()

    def label(self, rank: int) -> str:
        member = self.members[rank]
        return f"rank {self.world_ranks[rank]} (pid {member.pid}) on host {member.host}"


def _unusable(message: membership_pb2.World, problem: str) -> StartError:
    return StartError(
        coded(
            EngineCode.INTERNAL,
            f"The coordinator sent a world (job {message.job!r}, number {message.epoch}) that is not usable: "
            f"{problem}. This is a bug of the coordinator; please report it.",
        )
    )


def _members(message: membership_pb2.World) -> tuple[Member, ...]:
    """IndexError or ValueError where parts of the message do not fit together."""
    names = [printable(host.identity.name) for host in message.hosts]
    for member in message.members:
        if member.host >= len(names):
            raise IndexError(f"a member is on host {member.host} of {len(names)}")
    ranks = zip(message.members, message.local_ranks, message.cross_ranks, strict=True)
    local_sizes = Counter(names[member.host] for member in message.members)
    cross_sizes = Counter(message.local_ranks)
    return tuple(
        Member(
            rank=rank,
            local_rank=local_rank,
            local_size=local_sizes[names[member.host]],
            cross_rank=cross_rank,
            cross_size=cross_sizes[local_rank],
            member_id=member.member_id,
            host=names[member.host],
            shared_memory_domain=message.hosts[member.host].identity.shared_memory_domain,
            pid=member.pid,
            endpoints=_endpoints(member, message.hosts[member.host]),
            segment_address=member.segment_address,
        )
        for rank, (member, local_rank, cross_rank) in enumerate(ranks)
    )


def _endpoints(member: membership_pb2.Member, host: membership_pb2.Host) -> tuple[Endpoint, ...]:
    endpoints = []
    for place, port in zip(member.interfaces, member.ports, strict=True):
        if place >= len(host.interfaces):
            raise IndexError(f"a member is at interface {place} of {len(host.interfaces)}")
        interface = host.interfaces[place]
        endpoints.append(Endpoint(printable(interface.address, MAX_TEXT), port, printable(interface.name, MAX_TEXT)))
    return tuple(endpoints)


@dataclass(frozen=True)
class WorldChange:
    """Why all members are to leave the world of this epoch together: the next one has the newcomers, and not the
    leavers. Those that are coming are no reason yet.
    """

    epoch: int
    newcomers: int = 0  # how many wait to be taken in
    coming: int = 0  # how many are being started, and will wait once they have imported all that they need
    leavers: tuple[int, ...] = ()  # the ranks of members that leave for good


# Called by the thread of the membership. A later change of one epoch comes beside an earlier one.
OnWorldChange = Callable[[WorldChange], None]


def ignore_changes(change: WorldChange) -> None:
    """For members that never change their world."""
