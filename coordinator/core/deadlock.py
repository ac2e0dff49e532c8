"""Finds a deadlock: ranks that wait for each other, each in another operation, because their scripts took other ways.

A rank with blocked threads reports every second which operations it has started that are not complete (BlockedReport).
From the reports follows, for each operation, which of the reporting ranks have started it and which have not. A rank
stands still when all its threads that ever waited for an operation are blocked, and it has started and completed
nothing for some seconds (DeadlockTimes.still_s).

A set of ranks is in a deadlock if all of them stand still, and each operation that their threads wait for has not been
started by some rank of the set. To find the largest such set, begin with all ranks that stand still, and remove, until
nothing changes, each rank that may go on: one that waits for an operation which only ranks outside of the set have not
started. What the ranks that are left wait for can never complete.

Other ranks may still be on their way to the same operations. If the waiting ranks got their errors first, such a rank
would then wait alone; so no operation is ended before all ranks of the process sets concerned stand still, unless that
takes longer than DeadlockTimes.patience_s.

A rank that computes, or has a thread that may yet start something, does not stand still, so a job that is only slow is
never taken for one that hangs.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from horovod.protos.v1 import negotiation_pb2 as pb

from .blocked import FORGET_S
from .budget import Budget, text_bytes
from .words import ranks_in_words, shortened

MAX_PARTS = 8  # of the sentence

Operation = tuple[int, str]  # process set, wire name
# The ranks that must start an operation of a process set; those that have joined are not among them.
Members = Callable[[int], Collection[int]]


@dataclass(frozen=True)
class DeadlockTimes:
    still_s: float = 5.0  # without any progress, after which a rank stands still
    patience_s: float = 60.0  # with ranks that have not come to a stop yet
    look_s: float = 1.0  # between two searches: a large world sends a report every few milliseconds


USUAL_TIMES = DeadlockTimes()


@dataclass
class _Standing:
    """What one rank said last."""

    report: pb.BlockedReport
    since_s: float  # it has said the same since
    last_s: float
    bytes: int = 0  # charged to it

    def __post_init__(self) -> None:
        self.operations: dict[Operation, bool] = {  # oldest first; whether a thread waits for it
            (one.process_set, one.name): one.awaited for one in self.report.unfinished
        }


@dataclass(frozen=True)
class Deadlock:
    """None of `operations` can complete; each ends with `sentence` on the ranks of its process set."""

    operations: tuple[Operation, ...]
    sentence: str


class DeadlockDetector:
    """The ranks of one world that have blocked threads."""

    def __init__(self, times: DeadlockTimes = USUAL_TIMES, budget: Budget | None = None) -> None:
        self._times = times
        self._budget = budget
        self._standing: dict[int, _Standing] = {}
        self._looked_s = -times.look_s

    def report(self, rank: int, report: pb.BlockedReport, now_s: float) -> None:
        """Raises TooMuchError."""
        old = self._standing.get(rank)
        if old is not None and old.report == report and now_s - old.last_s <= FORGET_S:
            old.last_s = now_s
            return
        self.forget(rank)
        copy = pb.BlockedReport()
        copy.CopyFrom(report)  # a part of a message would keep the whole message in memory
        count = 2 * report.ByteSize() + sum(text_bytes(one.name) for one in report.unfinished)
        if self._budget is not None:
            self._budget.charge(rank, count, f"its {len(report.unfinished)} unfinished operations")
        self._standing[rank] = _Standing(copy, now_s, now_s, count)

    def forget(self, rank: int) -> None:
        old = self._standing.pop(rank, None)
        if old is not None and self._budget is not None:
            self._budget.release(rank, old.bytes)

    def has_started(self, rank: int, operation: Operation, now_s: float) -> bool | None:
        """Whether `rank` has started `operation`, which is known to be not complete; None when it did not say."""
        standing = self._standing.get(rank)
        if standing is None or now_s - standing.last_s > FORGET_S:
            return None
        if operation in standing.operations:
            return True
        return None if standing.report.cut_short else False

    def find(self, members: Members, now_s: float) -> Deadlock | None:
        """Ranks that wait for each other, if there are some; looks at most once in DeadlockTimes.look_s."""
        if now_s - self._looked_s < self._times.look_s:
            return None
        self._looked_s = now_s
        ranks = {
            rank
            for rank, one in self._standing.items()
            if one.report.all_threads
            and not one.report.cut_short
            and now_s - one.last_s <= FORGET_S
            and one.last_s - one.since_s >= self._times.still_s
        }
        while True:
            lacking = _Lacking(self._standing, ranks, members)
            free = {rank for rank in ranks if not self._is_held(rank, lacking)}
            if not free:
                break
            ranks -= free
        if not ranks:
            return None
        if now_s - max(self._standing[rank].since_s for rank in ranks) < self._times.patience_s:
            numbers = {number for rank in ranks for number, _ in self._standing[rank].operations}
            if any(rank not in ranks for number in numbers for rank in members(number)):
                return None
        parted: dict[int, Operation] = {}
        ended: dict[Operation, None] = {}
        for rank in sorted(ranks):
            for operation in self._standing[rank].operations:
                if lacking.of(operation):
                    parted.setdefault(rank, operation)
                    ended[operation] = None
        for rank in ranks:
            self.forget(rank)  # what it says next is about what it does after the error
        return Deadlock(tuple(ended), _sentence(parted, lacking))

    def _is_held(self, rank: int, lacking: "_Lacking") -> bool:
        awaited = [operation for operation, by_thread in self._standing[rank].operations.items() if by_thread]
        return bool(awaited) and all(lacking.of(operation) for operation in awaited)


class _Lacking:
    """Which of `ranks` have not started an operation that others have."""

    def __init__(self, standing: Mapping[int, _Standing], ranks: Collection[int], members: Members) -> None:
        self._standing = standing
        self._ranks = ranks
        self._members = members
        self._known: dict[Operation, list[int]] = {}

    def of(self, operation: Operation) -> list[int]:
        known = self._known.get(operation)
        if known is None:
            known = self._known[operation] = [
                rank
                for rank in self._members(operation[0])
                if rank in self._ranks and operation not in self._standing[rank].operations
            ]
        return known


def _sentence(parted: Mapping[int, Operation], lacking: _Lacking) -> str:
    groups: dict[Operation, list[int]] = {}
    for rank, operation in parted.items():
        groups.setdefault(operation, []).append(rank)
    parts = []
    for operation, ranks in groups.items():
        number, name = operation
        where = f" in process set {number}" if number else ""
        others = lacking.of(operation)
        waits, have = ("waits" if len(ranks) == 1 else "wait"), ("has" if len(others) == 1 else "have")
        parts.append(
            f"{ranks_in_words(ranks)} {waits} for {name}{where}, which {ranks_in_words(others)} {have} not started"
        )
    return (
        f"The ranks submit different operations and wait for each other: {shortened(parts, MAX_PARTS)}. "
        "These are the first operations at which they part. All ranks of a process set must call the same operations; "
        "look for a condition that differs between ranks, such as their number or the length of their data (hvd.join() "
        "is for ranks with less data)."
    )
