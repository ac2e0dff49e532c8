"""Finds a deadlock: ranks that wait for each other, each in another operation, because their scripts took other ways.

A rank with operations that do not get on reports every second what it has in flight and what it has run. What follows
from these reports for certain stands in standing.py: which rank has not started what another one waits for.

A rank stands still if it will start nothing before something that it has in flight completes. There are two signs:

* All threads of its script that are known to use Horovod are blocked in operations, no graph of a framework has
  any in flight, and the rank has started and completed nothing for some seconds (DeadlockTimes.still_s). Then it waits
  for what those threads wait for.
* Nobody may be known to be blocked: graphs leave their operations to the engine, scripts poll, and threads that were
  busy once may be idle for ever. Then nothing has changed, and the whole process has computed as good as nothing, for
  a minute (DeadlockTimes.idle_s). Such a rank waits for everything that it has in flight.

A set of ranks is in a deadlock if all of them stand still, and each operation that one of them waits for has not been
started by some rank of the set. To find the largest such set, begin with all ranks that stand still, and remove, until
nothing changes, each rank that may go on: one that waits for an operation which no rank of the set lacks. What the
ranks that are left wait for can never complete: the first of them to go on would need an operation of another one
that had gone on before.

Other ranks may still be on their way to the same operations. If the waiting ranks got their errors first, such a rank
would then wait alone; so no operation is ended before all ranks of the process sets concerned stand still, unless that
takes longer than DeadlockTimes.patience_s.

A rank that computes, or has a thread that may yet start something, does not stand still, so a job that is only slow is
never taken for one that hangs. Nor is one whose hosts are cut off from each other: its ranks have not run the same.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from horovod.base.errors import OperationCode, coded
from horovod.base.words import ranks_in_words, shortened

from .operations import nobody_waits_for, without_optimizer
from .standing import Operation, Standing, Standings, counts_in_words

MAX_PARTS = 8  # groups of ranks for which the sentence says what each waits for

# The ranks that must start an operation of a process set; those that have joined are not among them.
Members = Callable[[int], Collection[int]]


@dataclass(frozen=True)
class DeadlockTimes:
    still_s: float = 5.0  # a rank with blocked threads stands still after so long without progress
    idle_s: float = 60.0  # a rank whose process computes nothing stands still after so long
    patience_s: float = 60.0  # for so long nothing is ended while some rank does not stand still
    look_s: float = 1.0  # between two searches for a deadlock: a large world sends a report every few milliseconds


USUAL_TIMES = DeadlockTimes()


def times_of(options: Mapping[str, str], times: DeadlockTimes = USUAL_TIMES) -> DeadlockTimes | None:
    """None where the members agreed that deadlocks are not looked for."""
    return None if options.get("deadlock_check_disable") == "True" else times


@dataclass(frozen=True)
class Deadlock:
    """None of `operations` can complete; each ends with `sentence` on the ranks of its process set."""

    operations: tuple[Operation, ...]
    sentence: str


class DeadlockDetector:
    """Looks for deadlocks in one world."""

    def __init__(self, standings: Standings, times: DeadlockTimes = USUAL_TIMES) -> None:
        self._standings = standings
        self._times = times
        self._looked_s = -times.look_s

    def find(self, members: Members, now_s: float) -> Deadlock | None:
        """Ranks that wait for each other, if there are some; looks at most once in DeadlockTimes.look_s."""
        if now_s - self._looked_s < self._times.look_s:
            return None
        self._looked_s = now_s
        still: dict[int, Standing] = {}
        for rank in self._standings.ranks(now_s, lambda one: self._still_since(one, now_s) is not None):
            one = self._standings.of(rank, now_s)
            assert one is not None
            still[rank] = one
        while True:
            lacking = _Lacking(still, members)
            free = [rank for rank in still if not _is_held(rank, lacking)]
            if not free:
                break
            for rank in free:
                del still[rank]
        if not still:
            return None
        latest_s = max(self._still_since(one, now_s) or now_s for one in still.values())
        if now_s - latest_s < self._times.patience_s:
            numbers = {number for one in still.values() for number, _ in one.operations}
            if any(rank not in still for number in numbers for rank in members(number)):
                return None
        parted: dict[int, Operation] = {}
        ended: dict[Operation, None] = {}
        for rank in sorted(still):
            for operation, unfinished in still[rank].operations.items():
                if lacking.of(rank, operation):
                    if unfinished.awaited or not nobody_waits_for(operation[1]):
                        parted.setdefault(rank, operation)
                    ended[operation] = None
        counts = counts_in_words(sorted(set(parted.values())), members, still.get)
        sentence = _sentence(parted, lacking, counts)
        for rank in still:
            self._standings.forget(rank)  # its next report is about what it does after the error
        return Deadlock(tuple(ended), sentence)

    def _still_since(self, one: Standing, now_s: float) -> float | None:
        """Since when the rank stands still; None: it does not."""
        if one.cut_short:
            return None
        if one.all_threads and one.last_s - one.since_s >= self._times.still_s:
            return one.since_s + self._times.still_s
        if one.last_s - one.idle_since_s >= self._times.idle_s:
            return one.idle_since_s + self._times.idle_s
        return None


class _Lacking:
    """Which of the ranks that stand still have not started an operation that another one has in flight."""

    def __init__(self, still: Mapping[int, Standing], members: Members) -> None:
        self.still = still
        self._members = members
        self._known: dict[tuple[Operation, int | None], list[int]] = {}

    def of(self, waiter: int, operation: Operation) -> list[int]:
        one = self.still[waiter]
        key = operation, one.executed.get(operation[0])
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = [
                rank
                for rank in self._members(operation[0])
                if rank in self.still and self.still[rank].lacks(operation, one)
            ]
        return known


def _is_held(rank: int, lacking: _Lacking) -> bool:
    awaited = lacking.still[rank].awaited
    return bool(awaited) and all(lacking.of(rank, operation) for operation in awaited)


def _sentence(parted: Mapping[int, Operation], lacking: _Lacking, counts: str) -> str:
    groups: dict[tuple[Operation, tuple[int, ...]], list[int]] = {}
    for rank, operation in parted.items():
        groups.setdefault((operation, tuple(lacking.of(rank, operation))), []).append(rank)
    parts = []
    for ((number, name), others), ranks in groups.items():
        where = f" in process set {number}" if number else ""
        waits, have = ("waits" if len(ranks) == 1 else "wait"), ("has" if len(others) == 1 else "have")
        parts.append(
            f"{ranks_in_words(ranks)} {waits} for {name}{where}, which {ranks_in_words(others)} {have} not started"
        )
    names = {name for (_, name), _ in groups}
    numbers = ""
    if len({without_optimizer(name) for name in names}) < len(names):
        numbers = (
            " Names that differ only in a number, as in weight#2, are of several distributed optimizers whose "
            "parameters have equal names. A rank counts them in the order in which it makes them (PyTorch, JAX) or "
            "first uses them (Keras, MXNet), so do both in the same order on all ranks. Give an optimizer that only "
            "some ranks make a process set of these ranks."
        )
    return coded(
        OperationCode.DEADLOCK,
        f"The ranks submit different operations and wait for each other: {shortened(parts, MAX_PARTS)}. "
        "These are the first operations at which they part. All ranks of a process set must call the same operations; "
        "look for a condition that differs between ranks, such as their number or the length of their data (hvd.join() "
        f"is for ranks with less data).{numbers}{counts and f' {counts}'}",
    )
