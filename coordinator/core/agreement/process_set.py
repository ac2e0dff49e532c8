"""What the coordinator knows of one process set of a world: its members, and where its operations are.

An operation is pending until all members have announced it, then agreed until it gets an id.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from horovod.protos.v1 import types_pb2

from .blocked import BlockedReports
from .budget import Budget, text_bytes
from .ids import IdTable, Key
from .pending import PendingOperations


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
