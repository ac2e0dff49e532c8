"""Random scripts of ranks whose results and reports are late by any time: whoever is accused is stuck, and nobody else.

The model has one thread for each rank. Operations of a process set are in its log when all members have started them;
each member runs the log in its order, when it comes to that: a rank that is cut off runs nothing for long. Reports
reach the coordinator in the order in which their rank sent them, and at any time.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
import tiers

from horovod.coordinator.core.agreement.deadlock import DeadlockDetector, DeadlockTimes
from horovod.coordinator.core.agreement.standing import Standings
from horovod.protos.v1 import negotiation_pb2 as pb

AT_ONCE = DeadlockTimes(still_s=0.0, idle_s=1e9, patience_s=0.0, look_s=0.0)  # what is proven needs no time

Operation = tuple[int, str]


@dataclass
class Rank:
    script: list[tuple[str, Operation]]  # "start" or "wait"; to start one waits for an earlier one of that name
    at: int = 0
    started: int = 0
    in_flight: dict[Operation, int] = field(default_factory=dict)  # with its number
    executed: dict[int, int] = field(default_factory=dict)

    def is_over(self) -> bool:
        return self.at == len(self.script)

    def is_blocked(self) -> bool:
        return not self.is_over() and self.script[self.at][1] in self.in_flight

    def step(self) -> None:
        what, operation = self.script[self.at]
        if what == "start":
            self.in_flight[operation] = self.started
            self.started += 1
        self.at += 1

    def can_step(self) -> bool:
        """It waits for nothing; nor is there an earlier operation of the name that it is to start."""
        return not self.is_over() and self.script[self.at][1] not in self.in_flight

    def report(self) -> pb.BlockedReport:
        waits_for = self.script[self.at][1] if self.is_blocked() else None
        return pb.BlockedReport(
            started=self.started,
            all_threads=self.is_blocked(),
            executed=[pb.Executed(process_set=number, count=count) for number, count in self.executed.items()],
            unfinished=[
                pb.Unfinished(process_set=one[0], name=one[1], number=number, awaited=one == waits_for)
                for one, number in self.in_flight.items()
            ],
        )


class World:
    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        size = dice.randint(2, 4)
        self.members = {0: tuple(range(size))}
        for number in range(1, dice.randint(1, 3)):
            self.members[number] = tuple(sorted(dice.sample(range(size), dice.randint(2, size))))
        common = [self._operation() for _ in range(dice.randint(1, 6))]
        self.ranks = []
        for rank in range(size):
            mine = {number: 0 for number, members in self.members.items() if rank in members}
            self.ranks.append(Rank(self._script(common, list(mine)), executed=mine))
        self.logs: dict[int, list[Operation]] = {number: [] for number in self.members}
        self.sent: list[deque[pb.BlockedReport]] = [deque() for _ in self.ranks]

    def _operation(self) -> Operation:
        return self.dice.choice(list(self.members)), self.dice.choice("abc")

    def _script(self, common: list[Operation], mine: list[int]) -> list[tuple[str, Operation]]:
        """Most of what all do, in the same order; and now and then something else."""
        script = []
        for common_one in common:
            operation = self._operation() if self.dice.random() < 0.15 else common_one
            if operation[0] not in mine or self.dice.random() < 0.05:
                continue
            script.append(("start", operation))
            if self.dice.random() < 0.6:
                script.append(("wait", operation))
        return script

    # -- what may happen ---------------------------------------------------------------------------------------------

    def agree(self) -> bool:
        """An operation that all members have started and that is not in the log for them yet is appended."""
        for number, members in self.members.items():
            for operation in self.ranks[members[0]].in_flight:
                if operation[0] == number and all(self._arrived(rank, operation) for rank in members):
                    self.logs[number].append(operation)
                    return True
        return False

    def _arrived(self, rank: int, operation: Operation) -> bool:
        one, log = self.ranks[rank], self.logs[operation[0]]
        return operation in one.in_flight and operation not in log[one.executed[operation[0]] :]

    def run_one(self, rank: int) -> bool:
        """The rank runs the next operation of a log."""
        one = self.ranks[rank]
        ready = [number for number, count in one.executed.items() if count < len(self.logs[number])]
        if not ready:
            return False
        number = self.dice.choice(ready)
        del one.in_flight[self.logs[number][one.executed[number]]]
        one.executed[number] += 1
        return True

    def step(self, rank: int) -> bool:
        if not self.ranks[rank].can_step():
            return False
        self.ranks[rank].step()
        return True

    def finish(self) -> None:
        """Everything happens that still can."""
        ranks = range(len(self.ranks))
        while self.agree() or any(self.run_one(rank) or self.step(rank) for rank in ranks):
            pass

    def stuck(self) -> set[int]:
        """After finish(): the ranks that wait for each other, and for nobody else."""
        held = {rank for rank, one in enumerate(self.ranks) if one.is_blocked()}
        while True:
            free = {rank for rank in held if not self._lacking(rank) & held}
            if not free:
                return held
            held -= free

    def _lacking(self, rank: int) -> set[int]:
        one = self.ranks[rank]
        operation = one.script[one.at][1]
        return {other for other in self.members[operation[0]] if operation not in self.ranks[other].in_flight}


def play(seed: int) -> str:
    dice = random.Random(seed)
    world = World(dice)
    standings = Standings()
    detector = DeadlockDetector(standings, AT_ONCE)
    last: dict[int, pb.BlockedReport] = {}
    now_s = 0.0

    def hear(rank: int) -> None:
        """The coordinator gets the next report of `rank`."""
        nonlocal now_s
        now_s += 0.001
        last[rank] = world.sent[rank].popleft()
        standings.report(rank, last[rank], now_s)

    def accused() -> set[int]:
        before = set(standings._of)
        found = detector.find(lambda number: world.members[number], now_s)
        return before - set(standings._of) if found else set()

    ranks = range(len(world.ranks))
    slow = set(dice.sample(ranks, dice.randint(0, 1)))  # cut off: it runs nothing for long
    for _ in range(150):
        rank = dice.choice(ranks)
        kind = dice.random()
        if kind < 0.35:
            world.step(rank)
        elif kind < 0.5:
            world.agree()
        elif kind < 0.7:
            if rank not in slow or dice.random() < 0.05:
                world.run_one(rank)
        elif kind < 0.85:
            world.sent[rank].append(world.ranks[rank].report())
        elif world.sent[rank]:
            hear(rank)
            numbers = {one: [each.number for each in last[one].unfinished if each.awaited] for one in accused()}
            if not numbers:
                continue
            world.finish()
            for one, awaited in numbers.items():
                assert set(awaited) <= set(world.ranks[one].in_flight.values()), f"rank {one} went on"
            return "early"
    world.finish()
    stuck = world.stuck()
    for rank in ranks:
        world.sent[rank].append(world.ranks[rank].report())
        while world.sent[rank]:
            hear(rank)
    assert accused() == stuck
    return "in the end" if stuck else "none"


@pytest.mark.longer
@pytest.mark.timeout(600)
def test_whoever_is_accused_is_stuck_and_whoever_is_stuck_is_found() -> None:
    count = tiers.pick(3_000, 40_000)
    seen = {"early": 0, "in the end": 0, "none": 0}
    for seed in range(count):
        try:
            seen[play(seed)] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert min(seen.values()) > count / 50, seen
