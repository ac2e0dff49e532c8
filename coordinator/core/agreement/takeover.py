"""What the ranks of a running world tell a coordinator that has taken it over from another one.

The earlier coordinator took with it which ids it had given, who had joined and what had failed. The ranks know all of
that that matters, because it matters through them alone: each says it in the hello of its first stream, and from then
on applies no decision of an earlier term (negotiation.proto). So when every member of a process set has said hello, the
whole truth about the set is here and nothing can be added to it. Until then the set only collects announcements: none
of its operations could be decided without the missing ranks anyway.

Then, for each set (`Negotiation` carries it out):

* an id that all members know stays in use. What it stands for is not asked: they all know it, so none announces it;
* any other id was on its way to the members or back when the earlier coordinator ended. It is recalled from those that
  know it, so that they announce again what waits under it. No id gets a new meaning before all have let go of it;
* a rank that announces what others have heard to have failed is told so;
* a member that is behind by a round of hvd.join() is told that the round is over; the round that runs goes on.

Pure.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from horovod.base.errors import OperationCode, coded
from horovod.protos.v1 import negotiation_pb2 as pb

from .budget import text_bytes

MAX_FAILED = 64  # errors that one hello may hold

_ID_BYTES = 100  # memory of an id in sets and dictionaries, measured as in budget.py


class ContradictionError(Exception):
    """What a member says can't be true in this world; its stream is to be ended with this sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(coded(OperationCode.CONTRADICTION, sentence))


@dataclass
class Told:
    """What one rank has told."""

    ids: dict[int, set[int]] = field(default_factory=dict)  # process set -> the ids that it may use
    # Process set -> those of its ids whose recall the rank has got.
    recalled: dict[int, set[int]] = field(default_factory=dict)
    rounds_over: int = 0
    last_joined: int = 0
    join: pb.Join | None = None
    failed: dict[int, pb.OperationError] = field(default_factory=dict)  # number of the error -> the error
    bytes: int = 0


@dataclass(frozen=True)
class Ids:
    """What becomes of the ids of one process set."""

    kept: list[int]
    recalled: dict[int, frozenset[int]]  # id -> the ranks that know it


class Takeover:
    def __init__(self, size: int) -> None:
        self._missing = set(range(size))
        self._told: dict[int, Told] = {}

    def awaits(self, rank: int) -> bool:
        return rank in self._missing

    def is_missing_any(self, ranks: Collection[int]) -> bool:
        return not self._missing.isdisjoint(ranks)

    def is_over(self) -> bool:
        return not self._missing

    def tell(self, rank: int, told: Told) -> None:
        self._told[rank] = told
        self._missing.discard(rank)

    def freed(self, rank: int, process_set: int, ids: Collection[int]) -> None:
        """The rank has answered a recall of the earlier coordinator."""
        if (told := self._told.get(rank)) is not None:
            for kind in (told.ids, told.recalled):
                kind.get(process_set, set()).difference_update(ids)

    def joined(self, rank: int, join: pb.Join) -> None:
        if (told := self._told.get(rank)) is not None:
            told.join = join

    def forget(self, rank: int) -> int:
        """The rank is gone. Returns the bytes that were charged for it."""
        self._missing.discard(rank)
        told = self._told.pop(rank, None)
        return told.bytes if told else 0

    def bytes(self) -> dict[int, int]:
        """rank -> bytes that were charged to it."""
        return {rank: told.bytes for rank, told in self._told.items()}

    # -- what follows from it -----------------------------------------------------------------------------------------

    def ids(self, process_set: int, members: Collection[int]) -> Ids:
        """members: those that are not gone; all have said hello."""
        holders: dict[int, set[int]] = {}
        recalled: set[int] = set()
        for rank in members:
            for one in self._told[rank].ids.get(process_set, ()):
                holders.setdefault(one, set()).add(rank)
            recalled |= self._told[rank].recalled.get(process_set, set())
        kept = [one for one in sorted(holders) if len(holders[one]) == len(members) and one not in recalled]
        others = {one: frozenset(ranks) for one, ranks in sorted(holders.items())}
        for one in kept:
            del others[one]
        return Ids(kept, others)

    def missed_errors(self, process_set: int, members: Collection[int]) -> list[tuple[int, pb.OperationError]]:
        """Errors that some members have heard of, each with one that has not."""
        failed = {
            number: error
            for rank in members
            for number, error in self._told[rank].failed.items()
            if error.process_set == process_set
        }
        return [
            (rank, error)
            for number, error in sorted(failed.items())
            for rank in members
            if number not in self._told[rank].failed
        ]

    def rounds_over(self, members: Collection[int]) -> tuple[int, int]:
        """How many rounds of hvd.join() are over, and who joined last in the latest of them."""
        latest = max((self._told[rank] for rank in members), key=lambda told: told.rounds_over, default=Told())
        return latest.rounds_over, latest.last_joined

    def behind(self, members: Collection[int]) -> tuple[int, ...]:
        """Ranks that have not heard that the latest round is over."""
        over, _ = self.rounds_over(members)
        return tuple(sorted(rank for rank in members if self._told[rank].rounds_over < over))

    def joins(self, members: Collection[int]) -> list[tuple[int, pb.Join]]:
        """Who has joined, in the order that was told; then those that had not heard of their place."""
        joins = [(rank, join) for rank in sorted(members) if (join := self._told[rank].join) is not None]
        return sorted(joins, key=lambda one: one[1].place if one[1].HasField("place") else len(joins))


def read(hello: pb.Hello, join: pb.Join | None, id_capacity: int) -> Told:
    """What a hello says. Raises ContradictionError."""
    told = Told(rounds_over=hello.rounds_over, last_joined=hello.last_joined, join=join)
    for known in hello.known:
        ids = told.ids.setdefault(known.process_set, set())
        ids.update(known.ids)
        told.recalled.setdefault(known.process_set, set()).update(known.recalled)
        if wrong := [one for one in ids if not 0 < one < id_capacity]:
            raise ContradictionError(f"Rank {hello.rank} says that it knows the id {wrong[0]}, which there is not.")
        if not told.recalled[known.process_set] <= ids:
            raise ContradictionError(f"Rank {hello.rank} says that ids are recalled that it does not know.")
        told.bytes += _ID_BYTES * len(ids)
    if len(hello.failed) > MAX_FAILED:
        raise ContradictionError(f"Rank {hello.rank} reports {len(hello.failed)} errors; the limit is {MAX_FAILED}.")
    told.failed = {error.number: error for error in hello.failed if error.number}
    told.bytes += sum(text_bytes(error.name, error.sentence) for error in hello.failed)
    return told
