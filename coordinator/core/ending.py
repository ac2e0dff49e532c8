"""How a job ended, in one sentence and one exit code; and which of its hosts are seen to live."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from horovod.base.errors import without_code
from horovod.base.words import capitalized, joined, ranks_in_words

# A rank that dies takes its peers down with it, and the end of a peer may be reported first. The end of the rank itself
# follows within so long: milliseconds, but for a busy machine.
AFTERMATH_S = 0.5
# When others notice a loss, this long is waited for the report of the rank's agent, which knows how the process ended.
AGENT_S = 0.5


class Outcome(Protocol):
    """How one rank ended."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def code(self) -> int | None:
        """Negative for a signal, None when not even SIGKILL ended it."""

    @property
    def stopped(self) -> bool:
        """It ended after its agent had sent it a signal."""

    @property
    def ended_s(self) -> float:
        """When it ended, by one clock for all ranks."""

    @property
    def lost(self) -> str:
        """Why it is not known how the rank ended; empty where it is known."""

    @property
    def incarnation(self) -> int:
        """Which of the processes that were started as this rank it was."""


@dataclass(frozen=True)
class RankEnded:
    """An agent saw the process end that it had started as a rank, or is lost together with its host."""

    job: str
    rank: int  # the rank with which the process was started
    host: str
    pid: int
    cause: str  # completes "rank 1 was lost: ..." and has no full stop
    incarnation: int = 1  # the process's place among those that were started as this rank
    well: bool = False  # the process ended with exit code 0


AnyOutcome = TypeVar("AnyOutcome", bound=Outcome)


def exit_code(code: int | None) -> int:
    """What a shell would show: 128 + N for signal N."""
    return 255 if code is None else 128 - code if code < 0 else code


def first_failure(outcomes: Sequence[AnyOutcome]) -> AnyOutcome | None:
    """The failure that came first; `outcomes` are in the order in which they ended.

    A rank that a signal ended goes before one that gave up by itself a moment earlier: the kernel closes the sockets of
    a killed process before it reports the end, so a peer that notices may be the first to be gone.
    """
    first = next((outcome for outcome in outcomes if outcome.code != 0), None)
    if first is None or _was_killed(first):
        return first
    # That a host is lost is known only after a grace, long after its peers have given up.
    if lost := next((outcome for outcome in outcomes if outcome.lost), None):
        return lost
    close = (outcome for outcome in outcomes if outcome.ended_s - first.ended_s <= AFTERMATH_S)
    return next((outcome for outcome in close if _was_killed(outcome)), first)


def follows(outcome: Outcome, others: Sequence[Outcome]) -> bool:
    """Whether this rank gave up by itself right after another was killed or lost, and so most likely because of it."""
    if outcome.lost or not outcome.code or outcome.code < 0:
        return False
    return any(
        (other.lost or (other.code or 0) < 0) and 0 <= outcome.ended_s - other.ended_s <= AFTERMATH_S
        for other in others
        if other.rank != outcome.rank
    )


def _was_killed(outcome: Outcome) -> bool:
    return outcome.code is not None and outcome.code < 0 and not outcome.stopped


def explain(outcomes: Sequence[Outcome], hosts: Mapping[int, str] | Sequence[str], noun: str = "rank") -> str | None:
    """Which rank failed first and how the others ended; None when none failed. hosts[rank] is the rank's host.

    noun: what `outcomes` are of, "rank" or "worker".
    """
    first = first_failure(outcomes)
    if first is None:
        return None
    pid = f" (pid {first.pid})" if first.pid else ""
    sentence = f"{capitalized(noun)} {first.rank} on host {hosts[first.rank]}{pid} {how(first)}"
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.code == 0 or outcome is first:
            continue
        ended = "stopped by this launcher" if outcome.stopped else how(outcome)
        groups.setdefault(ended, []).append(outcome.rank)
    rest = [_with_verb(ranks, ended, noun) for ended, ranks in groups.items()]
    return f"{sentence}; after that {joined(rest)}." if rest else f"{sentence}."


def _with_verb(ranks: list[int], ended: str, noun: str) -> str:
    if ended.startswith("is lost") and len(ranks) > 1:
        ended = f"are{ended.removeprefix('is')}"
    verb = ("was " if len(ranks) == 1 else "were ") if ended.startswith("stopped") else ""
    return f"{ranks_in_words(ranks, noun)} {verb}{ended}"


def how(outcome: Outcome) -> str:
    """Completes `rank 1 ...`."""
    if outcome.lost:
        return f"is lost: {without_code(outcome.lost)}"
    code = outcome.code
    if code is None:
        return "did not end even after SIGKILL (it waits in the kernel, often for a file system or a device)"
    return f"ended with {_in_words(code)}" if code >= 0 else f"ended by {_in_words(code)}"


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal has no name
        name = ""
    return f"signal {-code}{name}"


def rank_ended(job: str, host: str, outcome: Outcome) -> RankEnded:
    """The event for the rank's world that follows from how the rank ended."""
    cause = without_code(outcome.lost) or "its agent saw its process end"
    if not outcome.lost and outcome.code is not None:
        cause = f"{cause}: {_in_words(outcome.code)}"
    well = outcome.code == 0 and not outcome.lost
    return RankEnded(job, outcome.rank, host, outcome.pid, cause, outcome.incarnation, well)


# What serves the world of a job knows which of its hosts live, and what schedules the job asks.


@dataclass(frozen=True)
class Attendance:
    """The hosts of a job's running world; each is in one of the sets at most."""

    connected: frozenset[str] = frozenset()  # hosts of which a rank has a stream to the coordinator
    away: frozenset[str] = frozenset()  # hosts whose ranks are in the world, none of them with a stream
    lost: frozenset[str] = frozenset()  # hosts whose ranks are not in the world any more, one or more of them lost
