"""Finds ranks that wait for different things, which announcements alone can't show.

Two cases: all ranks use one user name, but for different operations ("allreduce.x" here, "allgather.x" there:
different wire names, which never meet); or all use one wire name, but some under an id that was agreed earlier
while others announce a new signature of it. Ranks report operations that have not got on for a while, and repeat the
report every second or so for as long as that lasts.

Such a report may be out of date as soon as it was sent, and a rank that is cut off from the others is behind them
without knowing. So it counts only with what its rank said of itself at the same moment (standing.py): where all ranks
have run the same number of operations, they are in the same one of a name.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod.base.errors import OperationCode, coded
from horovod.base.words import values_by_rank
from horovod.protos.v1 import types_pb2 as pb

from .agreement import disagreement
from .budget import Budget, operation_bytes
from .operations import Signature, is_unnamed, signature, type_name, user_name
from .standing import FORGET_S, Standing, Standings, counts_in_words, place, with_counts

SETTLE_S = 0.25  # for so long after an answer, a report may still have been sent before the rank got that answer
MAX_REPORTS = 256  # reports kept of one rank; beyond that the oldest is dropped
MANY = 64  # a process set with more ranks is a large one
LOOKED_AT_PER_S = 1000  # reports about one name that are looked at in a second, in a large process set


@dataclass(frozen=True)
class Announced:
    op: pb.Operation
    signature: Signature
    at_s: float
    bytes: int = 0  # how much of its rank's budget this takes


@dataclass(frozen=True)
class Report:
    op: pb.Operation
    signature: Signature
    since_s: float
    last_s: float
    bytes: int = 0  # how much of its rank's budget this takes
    waited_s: float = 0.0  # by the rank's own clock, since it submitted the operation
    number: int = 0  # which of the rank's submissions it is; a name may be submitted many times


@dataclass(frozen=True)
class Disagreement:
    """Each of `names` ends with `sentence` on every rank."""

    names: tuple[str, ...]
    sentence: str


class BlockedReports:
    """What the ranks of one process set reported."""

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self._by_user_name: dict[str, dict[int, dict[str, Report]]] = {}  # user name -> rank -> wire name
        self._names: dict[int, OrderedDict[str, None]] = {}  # by rank, least recently reported first
        self._answered_at_s: OrderedDict[str, float] = OrderedDict()  # name -> when ranks were last sent an answer
        # User name -> when it was looked at last, for names that all ranks of a large set have reported.
        self._looked_at_s: dict[str, float] = {}
        self._restarted_at_s: float | None = None

    def add(self, rank: int, op: pb.Operation, now_s: float, waited_s: float = 0.0, number: int = 0) -> None:
        """Raises TooMuchError."""
        if now_s < self._answered_at_s.get(op.name, -SETTLE_S) + SETTLE_S:
            return  # the rank sent this report before it got the answer
        old = self._by_user_name.get(user_name(op.name), {}).get(rank, {}).get(op.name)
        its_signature = signature(op)
        if self._restarted_at_s is not None:
            waited_s = min(waited_s, now_s - self._restarted_at_s)
        if old is not None and old.signature == its_signature:
            since_s = old.since_s if now_s - old.last_s <= FORGET_S else now_s
            report = Report(old.op, its_signature, since_s, now_s, old.bytes, waited_s, number)
        else:
            copy = pb.Operation()
            copy.CopyFrom(op)  # a part of a message would keep the whole message in memory
            report = Report(copy, its_signature, now_s, now_s, operation_bytes(op), waited_s, number)
            if self._budget is not None:
                self._budget.charge(rank, report.bytes, f"the report that it waits for {op.name[:200]!r}")
                if old is not None:
                    self._budget.release(rank, old.bytes)
        self._by_user_name.setdefault(user_name(op.name), {}).setdefault(rank, {})[op.name] = report
        names = self._names.setdefault(rank, OrderedDict())
        names[op.name] = None
        names.move_to_end(op.name)
        if len(names) > MAX_REPORTS:
            self.forget(rank, next(iter(names)))

    def restart(self, now_s: float) -> None:
        """The job and its coordinator were suspended: the time that ranks say they have waited does not count."""
        self._restarted_at_s = now_s

    def answered(self, name: str, now_s: float) -> None:
        """Drops the reports about `name`, because every rank is sent an answer for it now."""
        for rank in list(self.of(user_name(name))):
            self.forget(rank, name)
        self._answered_at_s[name] = now_s
        self._answered_at_s.move_to_end(name)
        while next(iter(self._answered_at_s.values())) + SETTLE_S < now_s:
            self._answered_at_s.popitem(last=False)

    def forget(self, rank: int, name: str) -> None:
        """Drops the report of `rank` about `name`, which the rank has announced again."""
        names = self._names.get(rank)
        if names is None or name not in names:
            return
        del names[name]
        by_rank = self._by_user_name[user_name(name)]
        report = by_rank[rank].pop(name)
        if self._budget is not None:
            self._budget.release(rank, report.bytes)
        if not by_rank[rank]:
            del by_rank[rank]
        if not by_rank:
            del self._by_user_name[user_name(name)]
            self._looked_at_s.pop(user_name(name), None)

    def forget_rank(self, rank: int) -> None:
        for name in list(self._names.get(rank, {})):
            self.forget(rank, name)
        self._names.pop(rank, None)

    def clear(self) -> None:
        for rank in list(self._names):
            self.forget_rank(rank)

    def is_due(self, user: str, members: int, now_s: float) -> bool:
        """Whether to compare the reports of all `members` now. In a large set that is not done for each of them."""
        if members <= MANY:
            return True
        due = now_s - self._looked_at_s.get(user, -math.inf) >= members / LOOKED_AT_PER_S
        if due:
            self._looked_at_s[user] = now_s
        return due

    def of(self, user: str) -> Mapping[int, Mapping[str, Report]]:
        """Reports by rank and wire name."""
        return self._by_user_name.get(user, {})

    def recent(self, now_s: float) -> dict[str, dict[int, Report]]:
        """What ranks wait for now, by wire name and rank."""
        found: dict[str, dict[int, Report]] = {}
        for rank, names in self._names.items():
            for name in reversed(names):
                report = self._by_user_name[user_name(name)][rank][name]
                if now_s - report.last_s > FORGET_S:
                    break  # all reports that follow are older still
                found.setdefault(name, {})[rank] = report
        return found


def find(
    number: int,
    user: str,
    members: Sequence[int],
    reports: BlockedReports,
    standings: Standings,
    now_s: float,
    *,
    deadlocks: bool,
) -> Disagreement | None:
    """Why nothing called `user` in the script can ever complete in process set `number`, if the reports show it.

    deadlocks: whether ranks that do different things under one name count, as long as their threads are blocked there.
    """
    said = reports.of(user)
    if not members or len(said) < len(members) or not reports.is_due(user, len(members), now_s):
        return None  # all ranks have joined, or one rank is just late, which is the usual stall
    if not said.keys() >= set(members):
        return None
    standing: dict[int, Standing] = {}
    current: dict[int, dict[str, Report]] = {}
    for rank in members:
        one = standings.of(rank, now_s)
        if one is None:
            return None
        standing[rank] = one
        # A report is about one submission. Meanwhile the rank may have submitted the same name again.
        current[rank] = {
            name: report
            for name, report in said[rank].items()
            if (unfinished := one.operations.get((number, name))) and unfinished.number == report.number
        }
    if not all(current.values()):
        return None
    names = sorted({name for by_name in current.values() for name in by_name})
    for name in names:
        if all(name in by_name for by_name in current.values()):
            return _one_name(number, name, members, current, standing)
    return _several_names(number, user, names, members, current, standing) if deadlocks else None


def _one_name(
    number: int,
    name: str,
    members: Sequence[int],
    current: Mapping[int, Mapping[str, Report]],
    standing: Mapping[int, Standing],
) -> Disagreement | None:
    """Every rank is in `name`, with signatures that differ."""
    if len({standing[rank].executed.get(number) for rank in members}) > 1:
        return None  # a rank that has run more operations may be in a later operation of that name
    sentence = disagreement({rank: current[rank][name].op for rank in members}, members)
    if not sentence:
        return None
    counts = counts_in_words([(number, name)], lambda _: members, standing.get)
    return Disagreement((name,), with_counts(sentence, counts))


def _several_names(
    number: int,
    user: str,
    names: Sequence[str],
    members: Sequence[int],
    current: Mapping[int, Mapping[str, Report]],
    standing: Mapping[int, Standing],
) -> Disagreement | None:
    """Every rank is blocked on something called `user`, but not on the same operation."""
    for rank in members:
        one = standing[rank]
        if not one.all_threads or not any((number, name) in one.awaited for name in current[rank]):
            return None
        if not all(any(standing[other].lacks(key, one) for other in members) for key in one.awaited):
            return None  # one of the rank's threads is not blocked and may go on
    latest = {rank: max(current[rank].values(), key=lambda report: report.number).op for rank in members}
    what = {rank: _in_words(op) for rank, op in latest.items()}
    one_way = what[members[0]]
    another = next((value for value in what.values() if value != one_way), None)
    if another is None:
        return None
    if is_unnamed(names[0]):
        called = f"for the unnamed operation number {place(names[0])}"
        advice = "Call unnamed operations in the same order on every rank, or give them names."
    else:
        called = f"under the name {user!r}"
        advice = "Call the same operation under one name on every rank."
    sentence = coded(
        OperationCode.MISMATCHED,
        f"Mismatched operations: One rank did {one_way}, but another rank did {another}, {called}: "
        f"{values_by_rank(what)}. {advice}",
    )
    counts = counts_in_words([(number, name) for name in names], lambda _: members, standing.get)
    return Disagreement(tuple(names), with_counts(sentence, counts))


def _in_words(op: pb.Operation) -> str:
    return f"grouped {type_name(op)}" if op.name.startswith("grouped_") else type_name(op)
