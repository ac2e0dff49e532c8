"""What the coordinator knows of one process set of a world: its members, and where its operations are.

An operation is pending until all members have announced it, then agreed until it gets an id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from horovod.protos.v1 import types_pb2
from horovod.protos.v1 import types_pb2 as pb

from .blocked import Announced, BlockedReports
from .budget import SHARED_BYTES, Budget, operation_bytes, text_bytes
from .ids import IdTable, Key
from .operations import Signature


class PendingOperations(Mapping[str, Mapping[int, Announced]]):
    """By wire name and rank, the oldest announcement of a name first. Each is charged to its rank while it is here.

    Ranks that announce the same share one copy of it: the first has paid for it, each other pays for its own entry.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._by_name: dict[str, dict[int, Announced]] = {}

    def __getitem__(self, name: str) -> Mapping[int, Announced]:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def put(self, rank: int, op: pb.Operation, its_signature: Signature, now_s: float) -> None:
        """Adds an announcement, in place of the rank's earlier one under that name. Raises TooMuchError."""
        name = op.name
        announced = self._by_name.get(name, {})
        same = next(iter(announced.values()), None)
        if same is not None and same.signature != its_signature:
            same = next((one for one in announced.values() if one.signature == its_signature), None)
        if same is not None:
            new = Announced(same.op, same.signature, now_s, SHARED_BYTES)
        else:
            copy = pb.Operation()
            copy.CopyFrom(op)  # a part of a message would keep the whole message in memory
            new = Announced(copy, its_signature, now_s, operation_bytes(op))
        old = announced.get(rank)
        self._budget.charge(rank, new.bytes, f"operation {name[:200]!r}")
        if old is not None:
            self._budget.release(rank, old.bytes)
            del announced[rank]  # the rank is added again at the end, so that the oldest stays first
        announced[rank] = new
        self._by_name[name] = announced

    def pop(self, name: str) -> dict[int, Announced]:
        """Removes the operation and returns it by rank; empty when no rank has announced it."""
        announced = self._by_name.pop(name, {})
        for rank, one in announced.items():
            self._budget.release(rank, one.bytes)
        return announced

    def forget(self, rank: int, name: str) -> bool:
        """Drops what the rank has announced under that name; False when it has announced nothing."""
        announced = self._by_name.get(name, {})
        if (one := announced.pop(rank, None)) is None:
            return False
        self._budget.release(rank, one.bytes)
        if not announced:
            del self._by_name[name]
        return True

    def forget_rank(self, rank: int) -> None:
        for name in list(self._by_name):
            self.forget(rank, name)

    def clear(self) -> None:
        for name in list(self._by_name):
            self.pop(name)


@dataclass(frozen=True)
class Agreed:
    """An operation that all members announced alike."""

    op: types_pb2.Operation
    payer: int  # the rank to whose budget it is charged
    bytes: int


@dataclass
class ProcessSet:
    number: int
    ranks: tuple[int, ...]
    members: frozenset[int]  # the ranks of the set, for look-ups
    ids: IdTable
    pending: PendingOperations
    reports: BlockedReports
    registrant: int  # the rank that added the set first, which pays for it
    whole: bool = True  # False while a coordinator that took over the world waits for the hellos of the set's ranks
    agreed: dict[Key, Agreed] = field(default_factory=dict)  # waiting for an id, oldest first

    def waiting(self) -> dict[str, tuple[int, ...]]:
        """By name, the operations that have no id yet, each with the members that wait for one."""
        waiting = {name: tuple(sorted(announced)) for name, announced in self.pending.items()}
        waiting.update((name, self.ranks) for name, _ in self.agreed)
        return waiting

    def clear(self, budget: Budget) -> None:
        """Forgets all operations, and releases what was charged for them and for the set."""
        self.pending.clear()
        self.reports.clear()
        self.ids.clear()
        for one in self.agreed.values():
            budget.release(one.payer, one.bytes)
        budget.release(self.registrant, set_bytes(self.members))


def set_bytes(ranks: Collection[int]) -> int:
    """What a process set takes of the memory of the coordinator, without its operations."""
    return text_bytes() + 128 * len(ranks)
