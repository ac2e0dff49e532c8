"""The stall report: which ranks are missing in operations that others wait for, when to say so, and when to give up.

`find_stalls` finds the operations. What was announced is known exactly. What runs under an id is known only from
ranks that wait for it, so such an operation's missing ranks are those that wait for nothing; one that waits for another
operation may have started this one before, and counts only when every rank waits for something. When this leaves more
than one rank, the report says that it can't know which.

`StallWatch` decides what to say. Sentences and the line for each rank are those of Horovod's stall inspector, by which
people search their logs.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from horovod.base.errors import OperationCode, coded
from horovod.base.words import plural, printable

from .blocked import SETTLE_S
from .join import Joining
from .operations import nobody_waits_for
from .process_set import ProcessSet
from .standing import MAX_KINDS, Standings, counts_in_words

MAX_NAMES = 6  # names in the line of each rank
MAX_RANKS = 64  # ranks that a report names; a world may have thousands
MAX_NAME_LENGTH = 200

UNCERTAIN = (
    " If several ranks are listed as missing for one tensor, some of them may have started it already; it is "
    "only known that they do not wait for it."
)
OVER = "The stall is over: no tensor waits for missing ranks any more."


@dataclass(frozen=True)
class Stall:
    """One operation that some ranks wait for and others did not start."""

    name: str
    waited_s: float
    missing: tuple[int, ...]
    counts: str = ""  # words for a person: how many unnamed operations each rank has started
    certain: bool = True  # False: at least one of `missing` has not started it, and the others may have


def find_stalls(
    sets: Mapping[int, ProcessSet],
    gone: Collection[int],
    joining: Joining,
    standings: Standings,
    now_s: float,
    after_s: float,
) -> list[Stall]:
    """Operations of a world that some rank has waited for longer than `after_s` while others did not start them."""
    found: list[Stall] = []
    waiting = {number: one.reports.recent(now_s) for number, one in sets.items()}
    blocked_ranks = {rank for by_name in waiting.values() for by_rank in by_name.values() for rank in by_rank}
    known: dict[tuple[int, str], str] = {}  # (process set, kind of operation) -> what is said of its count

    def counts(number: int, name: str) -> str:
        """What is said of one unnamed operation holds for all of its kind."""
        key = number, name.rpartition(".")[0]
        if key not in known:
            known[key] = counts_in_words(
                [(number, name)], lambda _: sets[number].ranks, lambda r: standings.of(r, now_s)
            )
        return known[key]

    for number, process_set in sets.items():
        if not process_set.members.isdisjoint(gone):
            continue  # a member is gone, so the data plane fails the operations of this set
        for name, announced in process_set.pending.items():
            waited_s = now_s - next(iter(announced.values())).at_s
            if waited_s > after_s and not nobody_waits_for(name):
                taking_part = {*announced, *waiting[number].get(name, {}), *joining.joined(process_set)}
                missing = tuple(rank for rank in process_set.ranks if rank not in taking_part)
                if missing:
                    found.append(Stall(printable(name), waited_s, missing, counts(number, name)))
        decided = {name for name, _ in process_set.agreed}
        for name, reports in waiting[number].items():
            if name in process_set.pending or name in decided:
                continue
            # A single report may be late: what was sent over a stream that broke comes with the next one.
            repeated = [one.waited_s for one in reports.values() if one.last_s - one.since_s >= SETTLE_S]
            waited_s = max(repeated, default=0.0)
            if waited_s > after_s:
                started = {
                    rank: standings.has_started(rank, (number, name), reports, now_s)
                    for rank in joining.working(process_set)
                    if rank not in reports
                }
                others = [rank for rank, it_has in started.items() if not it_has]
                missing = tuple(
                    [rank for rank in others if started[rank] is False or rank not in blocked_ranks] or others
                )
                certain = len(missing) == 1 or all(started[rank] is False for rank in missing)
                if missing:
                    found.append(Stall(printable(name), waited_s, missing, counts(number, name), certain))
    return found


@dataclass(frozen=True)
class StallTimes:
    """When to warn and when to end the epoch; 0 is never."""

    warning_s: float = 60.0
    shutdown_s: float = 0.0

    @property
    def shortest_s(self) -> float:
        """Stalls up to this need no attention; 0 when none do."""
        return min((time_s for time_s in (self.warning_s, self.shutdown_s) if time_s), default=0.0)


@dataclass(frozen=True)
class Verdict:
    warning: str = ""  # for the log and for the user
    shutdown: str = ""  # the sentence with which the epoch ends; "" while it goes on


def times_of(options: Mapping[str, str]) -> tuple[StallTimes, str]:
    """The times from the options that the members agreed on, and the sentence why one is ignored, or ""."""
    if options.get("stall_check_disable") == "True":
        return StallTimes(0.0, 0.0), ""
    warning_s = _seconds(options, "stall_check_seconds", StallTimes.warning_s)
    shutdown_s = _seconds(options, "stall_shutdown_seconds", StallTimes.shutdown_s)
    if 0 < shutdown_s < warning_s:
        return StallTimes(warning_s, 0.0), (
            f"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={shutdown_s:g} is ignored: it is less than "
            f"HOROVOD_STALL_CHECK_TIME_SECONDS={warning_s:g}, the time of the warning. A stall "
            "will not shut the job down."
        )
    return StallTimes(warning_s, shutdown_s), ""


def _seconds(options: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(options.get(name, default))
    except ValueError:
        return default
    return value if math.isfinite(value) and value >= 0 else default


class StallWatch:
    """Decides what to say about the stalls of one world. After it has ended the epoch it says nothing."""

    def __init__(self, times: StallTimes) -> None:
        self.times = times
        self._said: Mapping[int, Sequence[str]] = {}  # what the last warning said: missing rank -> its tensors
        self._said_at_s = 0.0
        self._ended = False

    def look(self, stalls: Sequence[Stall], now_s: float) -> Verdict:
        """What to do about `stalls`. It warns when they change and again after each warning time."""
        if self._ended:
            return Verdict()
        warning_s, shutdown_s = self.times.warning_s, self.times.shutdown_s
        fatal = [stall for stall in stalls if shutdown_s and stall.waited_s > shutdown_s]
        marked = frozenset(rank for stall in fatal for rank in stall.missing)
        late = [stall for stall in stalls if warning_s and stall.waited_s > warning_s]
        warned = _by_rank(late)
        warning = ""
        if warned and (marked or warned != self._said or now_s - self._said_at_s >= warning_s):
            warning = (
                "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
                f"waiting for remainder of ranks for more than {_in_words(warning_s)}. The missing ranks are slow or "
                f"stuck, or do not call the same operations.{'' if all(one.certain for one in late) else UNCERTAIN}\n"
                f"{_lines(warned, marked)}{_counts(late)}"
            )
            self._said_at_s = now_s
        elif self._said and not warned:
            warning = OVER
        self._said = warned
        if not marked:
            return Verdict(warning)
        self._ended = True
        return Verdict(
            warning,
            coded(
                OperationCode.STALLED,
                f'One or more rank (marked by "!") is stalled for longer than {_in_words(shutdown_s)}. Will shutdown.\n'
                f"{_lines(_by_rank(fatal), marked)}{_counts(fatal)}",
            ),
        )


def _by_rank(stalls: Sequence[Stall]) -> dict[int, list[str]]:
    missing: dict[int, list[str]] = {}
    for stall in stalls:
        for rank in stall.missing:
            missing.setdefault(rank, []).append(stall.name)
    return missing


def _lines(missing: Mapping[int, Sequence[str]], marked: frozenset[int]) -> str:
    """`Missing ranks:` and a line for each: `1!: [allreduce.x, allreduce.y]`."""
    lines = ["Missing ranks:"]
    for rank in sorted(missing)[:MAX_RANKS]:
        names = [name[:MAX_NAME_LENGTH] for name in missing[rank]]
        more = " ..." if len(names) > MAX_NAMES else ""
        lines.append(f"{rank}{'!' if rank in marked else ''}: [{', '.join(names[:MAX_NAMES])}{more}]")
    if len(missing) > MAX_RANKS:
        lines.append(f"and {plural(len(missing) - MAX_RANKS, 'more rank')}")
    return "\n".join(lines)


def _counts(stalls: Sequence[Stall]) -> str:
    """A line for each kind of unnamed operations among the stalls."""
    said = dict.fromkeys(stall.counts for stall in stalls if stall.counts)
    return "".join(f"\n{counts}" for counts in list(said)[:MAX_KINDS])


def _in_words(seconds: float) -> str:
    return f"{seconds:g} second{'' if seconds == 1 else 's'}"
