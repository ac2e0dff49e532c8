"""What ranks that do not get on say of themselves (BlockedReport), and what follows from it for certain.

A report holds what its rank has in flight and, for each process set, how many operations of the set's order log the
rank has run. All members run the same operations in the same order, which gives a proof: if rank A has an operation in
flight, rank B does not, and A has run at least as many as B, then B has not started it. For B has not completed it
either: it would have run it, and so have run more than A. Where B has run more, it may have completed the operation,
and the result is on its way to A, which may be cut off from B or just slow; then nothing follows.

No clock takes part in that, and the reports may be of different moments: B can only start the operation after its
report. Two things could still make a report untrue. Its rank may be in the middle of a change (`moving`). Or a decision
of the coordinator may be on its way to it: what the coordinator refuses ends on each rank when that hears of it, and is
not counted. So a report counts only if its rank has applied all decisions that were sent to it (`heard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from horovod.base.errors import coded_like, without_code
from horovod.base.words import printable, values_by_rank
from horovod.protos.v1 import negotiation_pb2 as pb

from .budget import Budget, text_bytes
from .operations import is_unnamed

FORGET_S = 3.0  # reports further apart than this are about different waits
IDLE_SHARE = 0.05  # share of one processor: a process that uses less counts as idle
MOST_KINDS = 64  # kinds of unnamed operations in one report
MAX_LINE_LENGTH = 200

Operation = tuple[int, str]  # process set, wire name


@dataclass
class Standing:
    """What one rank reported last."""

    said: bytes  # the report without the fields that change even while the rank does nothing
    heard: int
    cpu_us: int
    since_s: float  # since when its report has been the same
    last_s: float
    idle_since_s: float  # since when its process has been idle
    idle_cpu_us: int  # processor time that the process had used at `idle_since_s`
    all_threads: bool
    moving: bool
    cut_short: bool
    operations: Mapping[Operation, pb.Unfinished]  # in flight, oldest first
    executed: Mapping[int, int]  # operations of each process set's log that it has run
    # (process set, kind) -> how many unnamed operations were started.
    unnamed: Mapping[Operation, int] = field(default_factory=dict)
    at: str = ""  # the line of the script at which the main thread stands
    bytes: int = 0  # how much of the rank's budget this takes

    @property
    def awaited(self) -> list[Operation]:
        """If the rank stands still, it starts nothing more before one of these operations completes."""
        return [key for key, one in self.operations.items() if one.awaited or not self.all_threads]

    def lacks(self, operation: Operation, waiter: Standing) -> bool:
        """Whether this rank has certainly not started what `waiter` has in flight."""
        mine, others = self.executed.get(operation[0]), waiter.executed.get(operation[0])
        if mine is None or others is None or self.cut_short or operation in self.operations:
            return False
        return others >= mine


@dataclass
class Standings:
    """The latest reports of the ranks of one world that do not get on."""

    budget: Budget | None = None
    _of: dict[int, Standing] = field(default_factory=dict)
    _told: dict[int, int] = field(default_factory=dict)  # by rank: the serial of the latest decisions sent to it

    def report(self, rank: int, report: pb.BlockedReport, now_s: float) -> None:
        """Raises TooMuchError."""
        old = self._of.get(rank)
        if old is not None and now_s - old.last_s > FORGET_S:
            old = None
        said = _said(report)
        if old is not None and old.said == said:
            old.heard, old.last_s, old.cpu_us = report.heard, now_s, report.cpu_us
            old.at = printable(report.at, MAX_LINE_LENGTH)
            if old.cpu_us - old.idle_cpu_us > IDLE_SHARE * 1e6 * (now_s - old.idle_since_s):
                old.idle_since_s, old.idle_cpu_us = now_s, old.cpu_us
            return
        self.forget(rank)
        count = 2 * len(said) + sum(text_bytes(one.name) for one in report.unfinished)
        unnamed = {(one.process_set, one.name): one.count for one in report.unnamed[:MOST_KINDS]}
        count += sum(text_bytes(name) for _, name in unnamed) + 4 * MAX_LINE_LENGTH
        if self.budget is not None:
            self.budget.charge(rank, count, f"its {len(report.unfinished)} unfinished operations")
        operations = {}
        for one in report.unfinished:
            copy = pb.Unfinished()
            copy.CopyFrom(one)  # a part of a message would keep the whole message in memory
            operations[one.process_set, one.name] = copy
        self._of[rank] = Standing(
            said=said,
            heard=report.heard,
            cpu_us=report.cpu_us,
            since_s=now_s,
            last_s=now_s,
            idle_since_s=now_s,
            idle_cpu_us=report.cpu_us,
            all_threads=report.all_threads,
            moving=report.moving,
            cut_short=report.cut_short,
            operations=operations,
            executed={one.process_set: one.count for one in report.executed},
            unnamed=unnamed,
            at=printable(report.at, MAX_LINE_LENGTH),
            bytes=count,
        )

    def forget(self, rank: int) -> None:
        old = self._of.pop(rank, None)
        if old is not None and self.budget is not None:
            self.budget.release(rank, old.bytes)

    def told(self, ranks: Iterable[int], serial: int) -> None:
        """Decisions are on their way to these ranks."""
        for rank in ranks:
            self._told[rank] = serial

    def new_stream(self, rank: int) -> None:
        """The rank has a new stream, so nothing that was sent before is still on its way to it."""
        self._told.pop(rank, None)

    def of(self, rank: int, now_s: float) -> Standing | None:
        """The rank's report if it still holds; None if there is none, or the rank is about to change."""
        found = self._of.get(rank)
        if found is None or found.moving or now_s - found.last_s > FORGET_S:
            return None
        return found if found.heard >= self._told.get(rank, 0) else None

    def ranks(self, now_s: float, which: Callable[[Standing], bool]) -> set[int]:
        return {rank for rank in self._of if (one := self.of(rank, now_s)) is not None and which(one)}

    def has_started(self, rank: int, operation: Operation, waiters: Iterable[int], now_s: float) -> bool | None:
        """Whether `rank` has started what all of `waiters` have in flight, perhaps completed it; None: not known."""
        it = self.of(rank, now_s)
        if it is None:
            return None
        if operation in it.operations:
            return True
        known = [one for waiter in waiters if (one := self.of(waiter, now_s)) is not None]
        if any(it.lacks(operation, one) for one in known):
            return False
        return None if it.cut_short or not known else True


def _said(report: pb.BlockedReport) -> bytes:
    copy = pb.BlockedReport()
    copy.CopyFrom(report)
    copy.ClearField("heard")
    copy.ClearField("cpu_us")
    copy.ClearField("at")
    return copy.SerializeToString(deterministic=True)


# What ranks say of their unnamed operations, for errors and stall reports about one.
#
# Unnamed operations match by their number, so one that only some ranks call shifts all later ones (ADR 4, ADR 96). How
# many each rank has started, and at which line it stands, lead to the call that the others do not make.

ADVICE = (
    "If only some ranks call one of them, HOROVOD_CHECK_CALL_SITES=1 shows the line. Operations with names (name=) "
    "can't be mixed up."
)
MAX_KINDS = 3  # kinds of operations that a sentence tells of
MAX_DIGITS = 20  # digits in the largest count of 64 bits


def counts_in_words(
    operations: Iterable[Operation],
    ranks_of: Callable[[int], Iterable[int]],
    standing_of: Callable[[int], Standing | None],
    *,
    all_announced: bool = False,
) -> str:
    """How many of these unnamed operations each rank has started, as far as it says so; "" if all have names.

    ranks_of: the ranks of a process set. all_announced: all of them have announced `operations`.
    """
    numbers: dict[Operation, int] = {}
    for process_set, name in operations:
        if is_unnamed(name):
            kind = process_set, name.rpartition(".")[0]
            numbers[kind] = max(place(name), numbers.get(kind, 0))
    parts = []
    for kind, number in list(numbers.items())[:MAX_KINDS]:
        process_set, name = kind
        said: dict[int, str] = {}
        for rank in ranks_of(process_set):
            one = standing_of(rank)
            count = _count(one, kind) if one is not None else None
            if all_announced:
                count = max(count or 0, number)
            if count is not None:
                said[rank] = f"started {count}{f' and is at {one.at}' if one is not None and one.at else ''}"
        if said:
            where = f" in process set {process_set}" if process_set else ""
            parts.append(f"of {printable(name)}{where}, {values_by_rank(said)}")
    if not parts:
        return ""
    return f"Operations without a name match by their number: {'; '.join(parts)}. {ADVICE}"


def _count(one: Standing, kind: Operation) -> int | None:
    count = one.unnamed.get(kind, 0 if len(one.unnamed) < MOST_KINDS else None)
    for process_set, name in one.operations:
        if process_set == kind[0] and is_unnamed(name) and name.rpartition(".")[0] == kind[1]:
            count = max(count or 0, place(name))
    return count


def place(name: str) -> int:
    """Of an unnamed operation among those of its kind, from 1."""
    return int(name.rpartition(".")[2][:MAX_DIGITS]) + 1


def with_counts(sentence: str, counts: str) -> str:
    """The sentence, which has a code, and then the counts."""
    return coded_like(sentence, f"{without_code(sentence)} {counts}") if counts else sentence
