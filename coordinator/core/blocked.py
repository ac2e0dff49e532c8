"""Finds ranks that wait for different things, which announcements alone can't show.

Two cases: all ranks use one user name, but for different operations ("allreduce.x" here, "allgather.x" there:
different wire names, which never meet); or all use one wire name, but some under an id that was agreed earlier
while others announce a new signature of it. Ranks report operations on which a thread has been blocked for a while,
and repeat the report every second or so for as long as that lasts.

What a rank announced is known here exactly until it is decided. What runs under an id is not: a report about it may
be out of date as soon as it was sent. So such a report counts only if it came clearly later than everything that it
is held against; a rank that is still blocked will repeat it. A false alarm would end a healthy job, a late one
costs a second.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod.protos.v1 import types_pb2 as pb

from .agreement import disagreement
from .budget import Budget, operation_bytes
from .operations import UNNAMED, Signature, signature, type_name, user_name
from .words import values_by_rank

SETTLE_S = 0.25  # how much later a report must be than what it contradicts
FORGET_S = 3.0  # reports further apart than this are about different waits
MAX_REPORTS = 256  # of one rank; the oldest goes first


@dataclass(frozen=True)
class Announced:
    op: pb.Operation
    signature: Signature
    at_s: float
    bytes: int = 0  # charged to its rank


Pending = Mapping[str, Mapping[int, Announced]]  # by wire name and rank


@dataclass(frozen=True)
class Report:
    op: pb.Operation
    signature: Signature
    since_s: float
    last_s: float
    bytes: int = 0  # charged to its rank
    waited_s: float = 0.0  # for this very submission, as its rank said; reports of several may follow each other


@dataclass(frozen=True)
class Disagreement:
    """Each of `names` ends with `sentence` on every rank."""

    names: tuple[str, ...]
    sentence: str


class BlockedReports:
    """What the ranks of one process set reported."""

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self._by_user_name: dict[str, dict[int, dict[str, Report]]] = {}  # then by rank and wire name
        self._names: dict[int, OrderedDict[str, None]] = {}  # by rank, least recently reported first
        self._answered_at_s: OrderedDict[str, float] = OrderedDict()  # names decided a moment ago
        self._restarted_at_s: float | None = None

    def add(self, rank: int, op: pb.Operation, now_s: float, waited_s: float = 0.0) -> None:
        """Raises TooMuchError."""
        if now_s < self._answered_at_s.get(op.name, -SETTLE_S) + SETTLE_S:
            return  # the report and the answer crossed
        old = self._by_user_name.get(user_name(op.name), {}).get(rank, {}).get(op.name)
        its_signature = signature(op)
        if self._restarted_at_s is not None:
            waited_s = min(waited_s, now_s - self._restarted_at_s)
        if old is not None and old.signature == its_signature:
            since_s = old.since_s if now_s - old.last_s <= FORGET_S else now_s
            report = Report(old.op, its_signature, since_s, now_s, old.bytes, waited_s)
        else:
            copy = pb.Operation()
            copy.CopyFrom(op)  # a part of a message would keep the whole message in memory
            report = Report(copy, its_signature, now_s, now_s, operation_bytes(op), waited_s)
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
        """The job was stopped with its coordinator: what ranks have waited by their own clocks does not count."""
        self._restarted_at_s = now_s

    def answered(self, name: str, now_s: float) -> None:
        """Every rank gets an answer for `name` now; what they reported about it before is over."""
        for rank in list(self.of(user_name(name))):
            self.forget(rank, name)
        self._answered_at_s[name] = now_s
        self._answered_at_s.move_to_end(name)
        while next(iter(self._answered_at_s.values())) + SETTLE_S < now_s:
            self._answered_at_s.popitem(last=False)

    def forget(self, rank: int, name: str) -> None:
        """`rank` started anew with `name`."""
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

    def forget_rank(self, rank: int) -> None:
        for name in list(self._names.get(rank, {})):
            self.forget(rank, name)
        self._names.pop(rank, None)

    def clear(self) -> None:
        for rank in list(self._names):
            self.forget_rank(rank)

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
                    break  # those before are older
                found.setdefault(name, {})[rank] = report
        return found


def find(
    user: str, members: Sequence[int], pending: Pending, reports: BlockedReports, now_s: float
) -> Disagreement | None:
    """Why nothing called `user` in the script can ever complete, if the reports show it."""
    reported = reports.of(user)
    names = sorted({name for by_name in reported.values() for name in by_name})
    taking_part = set(reported).union(*(pending.get(name, {}) for name in names))
    if not members or len(taking_part) < len(members):
        return None  # all have joined; or the usual stall: some rank is just late
    # Reports that may still be true: those on announcements that are not decided, and recent ones.
    valid: dict[int, dict[str, Report]] = {
        rank: {
            name: report
            for name, report in reported.get(rank, {}).items()
            if rank in pending.get(name, {}) or now_s - report.last_s <= FORGET_S
        }
        for rank in members
    }
    for name in names:
        found = _one_name(name, members, pending.get(name, {}), valid)
        if found:
            return found
    return _several_names(user, names, members, pending, valid)


def _one_name(
    name: str, members: Sequence[int], announced: Mapping[int, Announced], reports: Mapping[int, Mapping[str, Report]]
) -> Disagreement | None:
    """Every rank is in `name`, with signatures that differ."""
    ops: dict[int, pb.Operation] = {}
    under_id: dict[int, Report] = {}
    for rank in members:
        if rank in announced:
            ops[rank] = announced[rank].op
        elif name in reports[rank]:
            under_id[rank] = reports[rank][name]
            ops[rank] = under_id[rank].op
        else:
            return None
    for report in under_id.values():
        contradicted = [one.at_s for one in announced.values()]
        contradicted += [one.since_s for one in under_id.values() if one.signature != report.signature]
        if contradicted and report.last_s < max(contradicted) + SETTLE_S:
            return None
    sentence = disagreement(ops, members)
    return Disagreement((name,), sentence) if sentence else None


def _several_names(
    user: str,
    names: Sequence[str],
    members: Sequence[int],
    pending: Pending,
    reports: Mapping[int, Mapping[str, Report]],
) -> Disagreement | None:
    """Every rank is blocked on something called `user`, but not on the same operation."""
    if len(names) < 2 or not all(reports.values()):
        return None
    for name in names:
        if all(rank in pending.get(name, {}) or name in reports[rank] for rank in members):
            return None  # this one can complete
    for rank in members:
        newest_s = max(one.since_s for other in members if other != rank for one in reports[other].values())
        for name, report in reports[rank].items():
            if rank not in pending.get(name, {}) and report.last_s < newest_s + SETTLE_S:
                return None
    latest = {rank: max(reports[rank].values(), key=lambda report: report.last_s).op for rank in members}
    what = {rank: _in_words(op) for rank, op in latest.items()}
    one = what[members[0]]
    another = next((value for value in what.values() if value != one), None)
    if another is None:
        return None
    if user.startswith(UNNAMED):
        called = f"for the unnamed operation number {user.removeprefix(UNNAMED)}"
        advice = "Call unnamed operations in the same order on every rank, or give them names."
    else:
        called = f"under the name {user!r}"
        advice = "Call the same operation under one name on every rank."
    return Disagreement(
        tuple(names),
        f"Mismatched operations: One rank did {one}, but another rank did {another}, {called}: "
        f"{values_by_rank(what)}. {advice}",
    )


def _in_words(op: pb.Operation) -> str:
    return f"grouped {type_name(op)}" if op.name.startswith("grouped_") else type_name(op)
