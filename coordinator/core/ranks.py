"""Rank assignment: host-major and stable.

Without requested ranks, hosts come in the order in which their first member joined, and members of a host in the
order in which they joined. A launcher that already decided requests every rank; its choice is honoured as it is.

Vocabulary: rank counts all members, local_rank those on the same host, cross_rank the hosts that have a member with
the same local_rank (so cross_size may differ between ranks when hosts have different numbers of members).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from horovod.base.errors import WorldCode, coded
from horovod.base.words import ranks_in_words


@dataclass(frozen=True)
class Seat:
    """What one member asks for, in join order: its host and, from a launcher, its rank."""

    member_id: str
    host: str
    requested_rank: int | None = None
    slot: int | None = None  # the number that a launcher gave it, which is no rank; orders the local ranks of a host


@dataclass(frozen=True)
class Place:
    """What it gets."""

    member_id: str
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def assign(seats: Sequence[Seat]) -> tuple[Place, ...] | str:
    """Places in rank order, or the sentence why the requested ranks can't be honoured."""
    requested = [seat.requested_rank for seat in seats if seat.requested_rank is not None]
    if requested and len(requested) != len(seats):
        return coded(
            WorldCode.INVALID_RANK,
            f"{len(requested)} of {len(seats)} members asked for a rank; either all of them do (HOROVOD_RANK, set by a "
            "launcher) or none.",
        )
    if requested:
        missing = set(range(len(seats))) - set(requested)
        if missing:
            return coded(
                WorldCode.INVALID_RANK,
                f"The members asked for {ranks_in_words(requested)}, so nobody is {ranks_in_words(missing)}; "
                f"each rank from 0 to {len(seats) - 1} must be asked for exactly once.",
            )
        order = sorted(seats, key=lambda seat: seat.requested_rank or 0)
    else:
        hosts = {host: place for place, host in enumerate(dict.fromkeys(seat.host for seat in seats))}
        order = sorted(seats, key=lambda seat: hosts[seat.host])  # stable: join order within a host

    on_host: dict[str, list[Seat]] = defaultdict(list)  # seats of each host, in the order of the hosts' lowest ranks
    for seat in order:
        on_host[seat.host].append(seat)
    local_rank_of: dict[str, int] = {}
    for together in on_host.values():
        if all(seat.slot is not None for seat in together):  # a process keeps its local rank, and its GPU, if it can
            together.sort(key=lambda seat: seat.slot or 0)
        local_rank_of |= {seat.member_id: local_rank for local_rank, seat in enumerate(together)}
    local_ranks = [local_rank_of[seat.member_id] for seat in order]
    members_of_host = {host: len(together) for host, together in on_host.items()}
    # hosts_with[l]: position, among the hosts that have a local rank l, of each such host. Positions follow the
    # hosts and not the ranks, so that a host keeps its place even where a launcher deals ranks out host by host.
    hosts_with: dict[int, dict[str, int]] = defaultdict(dict)
    for host, count in members_of_host.items():
        for local_rank in range(count):
            hosts_with[local_rank][host] = len(hosts_with[local_rank])
    return tuple(
        Place(
            member_id=seat.member_id,
            rank=rank,
            local_rank=local_rank,
            local_size=members_of_host[seat.host],
            cross_rank=hosts_with[local_rank][seat.host],
            cross_size=len(hosts_with[local_rank]),
        )
        for rank, (seat, local_rank) in enumerate(zip(order, local_ranks, strict=True))
    )
