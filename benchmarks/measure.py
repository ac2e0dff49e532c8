"""Rounds in which the libraries take turns, so that noise of the machine hits all alike, and the figures they give."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from benchmarks.cases import FLOAT_BYTES, Case
from benchmarks.world import World, WorldError

_MOST_BLOCKS = 60


class UncheckedError(Exception):
    """A time came without all of its values having been checked, or with wrong ones."""


@dataclass(frozen=True)
class Budget:
    """How long one library is measured in one round, and in how many rounds."""

    rounds: int = 5
    round_seconds: float = 0.08
    block_seconds: float = 0.02
    large_rounds: int = 3
    large_bytes: int = 64 << 20
    settle_seconds: float = 1.0

    def rounds_of(self, case: Case) -> int:
        return self.large_rounds if sum(case.elements) * FLOAT_BYTES >= self.large_bytes else self.rounds


@dataclass
class Figure:
    """Seconds for one call, one number for each round. Only `checked_times` makes what goes in here."""

    rounds: list[float] = field(default_factory=list)
    host_rounds: list[float] = field(default_factory=list)  # until the calls had returned, where a device goes on
    best: float = math.inf  # of all blocks: what a machine that others use allows in its quietest moment
    calls: int = 0
    values_checked: int = 0

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def host_seconds(self) -> float:
        return statistics.median(self.host_rounds)

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "rounds": self.rounds,
            "host_rounds": self.host_rounds,
            "best": self.best,
            "calls": self.calls,
            "values_checked": self.values_checked,
        }


@dataclass
class Row:
    """One case: a figure, or the sentence why there is none, for each library."""

    case: Case
    figures: dict[str, Figure] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def ratio(self, peer: str, of: str = "horovod") -> float | None:
        """How many times faster than `peer` that library is: the median over the rounds, each compared with its own."""
        ratios = self._ratios(peer, of)
        return statistics.median(ratios) if ratios else None

    def ratio_interval(self, peer: str) -> tuple[float, float] | None:
        """Between which of the ratios the true median lies with a probability of 95%; None for less than 8 rounds.

        Half of the rounds are above the true median, give or take two standard deviations of as many coins.
        """
        ratios = self._ratios(peer)
        if len(ratios) < 8:
            return None
        first = math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2)
        return ratios[first], ratios[-1 - first]

    def _ratios(self, peer: str, of: str = "horovod") -> list[float]:
        ours, theirs = self.figures.get(of), self.figures.get(peer)
        if ours is None or theirs is None:
            return []
        return sorted(b / a for a, b in zip(ours.rounds, theirs.rounds, strict=True))

    def to_json(self) -> dict[str, Any]:
        peers = [peer for peer in self.figures if peer != "horovod"]
        return {
            **self.case.to_json(),
            "label": self.case.label,
            "figures": {library: figure.to_json() for library, figure in self.figures.items()},
            "times_faster_than": {peer: self.ratio(peer) for peer in peers},
            "refused": self.refused,
        }


def checked_times(case: Case, blocks: int, calls: int, replies: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of one call in each block (the slowest rank counts), from the replies of all ranks to "run".

    Raises:
        UncheckedError: a rank did not check all values of all blocks, or a barrier let a rank pass too early.
    """
    if len(replies) != case.ranks:
        raise UncheckedError(f"{len(replies)} of {case.ranks} ranks reported values.")
    for rank, reply in enumerate(replies):
        wanted = blocks * case.result_elements
        if reply.get("checked") != wanted:
            raise UncheckedError(f"Rank {rank} checked {reply.get('checked', 0)} of {wanted} values.")
        if len(reply["seconds"]) != blocks:
            raise UncheckedError(f"Rank {rank} reported {len(reply['seconds'])} blocks of {blocks}.")
    if case.operation == "barrier":
        for passes in zip(*(reply["barriers"] for reply in replies), strict=True):
            if max(entered for entered, _ in passes) > min(left for _, left in passes):
                raise UncheckedError("A rank left the barrier before all had entered it.")
        if any(len(reply["barriers"]) != blocks for reply in replies):
            raise UncheckedError("Not every block's barrier was checked.")
    return [max(block) / calls for block in zip(*(reply["seconds"] for reply in replies), strict=True)]


def measure(case: Case, worlds: Sequence[World], budget: Budget) -> Row:
    """Measures one case with every library that knows it in turn. One that fails or has wrong values gets no figure."""
    turns = {world.name: Turns(case, world, budget) for world in worlds if case.is_known_to(world.library)}
    return alternate(case, turns, budget.rounds_of(case))


def settle(case: Case, worlds: Sequence[World], budget: Budget) -> None:
    """Measures a case in vain for a while, so that what is measured first does not pay for what comes with a start.

    Small operations of horovod's are slower in the first second of a job: names are negotiated, and the threads of gRPC
    that did it come to rest. Who fails here fails again, and is told of, when it is measured.
    """
    end = time.monotonic() + budget.settle_seconds
    while worlds and time.monotonic() < end:
        measure(case, worlds, replace(budget, rounds=1, large_rounds=1))


def alternate(case: Case, turns: dict[str, Turns], rounds: int) -> Row:
    """Rounds of all turns, each round beginning with the next one. Who fails is left out of the rest."""
    row = Row(case)

    def take(step: Callable[[Turns], None], order: Sequence[str]) -> None:
        for library in order:
            try:
                step(turns[library])
            except (WorldError, UncheckedError) as error:
                row.refused[library] = str(error)
                del turns[library]

    take(Turns.plan, list(turns))
    for number in range(rounds):
        order = list(turns)
        first = number % max(1, len(order))
        take(Turns.round, order[first:] + order[:first])
    take(Turns.drop, list(turns))
    row.figures = {library: turn.figure for library, turn in turns.items()}
    return row


class Asked(Protocol):
    """Whoever answers for the ranks of a world."""

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]: ...


class Turns:
    """One library's part in a case: `case.ranks` are those of its world."""

    def __init__(self, case: Case, world: Asked, budget: Budget) -> None:
        self.figure = Figure()
        self._case = case
        self._world = world
        self._budget = budget
        self._blocks = self._calls = 1
        self._host_times: list[float] = []  # of the last run

    def plan(self) -> None:
        """Warms up and decides how many blocks of how many calls fit into a round."""
        case, budget = self._case, self._budget
        self._world.ask("prepare", **case.to_json())
        # The first calls negotiate, touch memory and wake sleeping ranks: go on until a block is long enough.
        self._calls = min(2, case.most_calls())
        self._run()
        while True:
            once = max(1e-9, self._run()[0])
            fitting = max(1, min(case.most_calls(), round(budget.block_seconds / once)))
            if fitting <= 2 * self._calls:
                break
            self._calls = min(fitting, 8 * self._calls)
        self._calls = fitting
        overhead = 0.0005 + sum(case.elements) * FLOAT_BYTES / 2e9  # new inputs, the check, the barrier
        self._blocks = max(1, min(_MOST_BLOCKS, round(budget.round_seconds / (once * self._calls + overhead))))
        self.figure = Figure()

    def round(self) -> None:
        self.figure.rounds.append(statistics.median(self._run()))
        if self._host_times:
            self.figure.host_rounds.append(statistics.median(self._host_times))

    def drop(self) -> None:
        self._world.ask("drop")

    def _run(self) -> list[float]:
        replies = self._world.ask("run", blocks=self._blocks, calls=self._calls)
        times = checked_times(self._case, self._blocks, self._calls, replies)
        host = [reply["host_seconds"] for reply in replies if "host_seconds" in reply]
        self._host_times = [max(block) / self._calls for block in zip(*host, strict=True)]
        self.figure.best = min(self.figure.best, *times)
        self.figure.calls += self._blocks * self._calls
        self.figure.values_checked += sum(reply["checked"] for reply in replies)
        return times


def idle_cpu(worlds: Sequence[World], seconds: float, sleep: Callable[[float], None]) -> dict[str, list[float]]:
    """Percent of a core that each rank of each library takes while nothing is asked of it."""
    before = {world.library: [_cpu_seconds(pid) for pid in world.pids] for world in worlds}
    sleep(seconds)
    percent = {}
    for world in worlds:
        used = [_cpu_seconds(pid) - first for pid, first in zip(world.pids, before[world.library], strict=True)]
        percent[world.library] = [100.0 * spent / seconds for spent in used]
    return percent


def _cpu_seconds(pid: int) -> float:
    """Of all its threads, to the nanosecond; the ticks of /proc/PID/stat are 0.1% of 10 s each."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), which Python does not have
