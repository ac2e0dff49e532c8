"""Checks, from what the processes of an elastic job wrote down, that no committed work was lost or done again unsaid.

A log is a list of records. Each process of the training appends its own to a file, and the test appends what it did and
what the launcher said. `check(log)` returns the rules that the run has broken, each with the records that show it.

The training takes steps 1, 2, ... `total`. Step `n` adds `weight(n)` to a value, whatever the world: so the value says
which steps it has, each of them once.

    what       by                 and the record has
    job        the test           total, min (size of a world), anew (the training may begin anew)
    starts     a process          (before it joins)
    begins     a process          world, rank, size, step, value: with what it begins in a world, after sync()
    saves      a process          world, rank, size, step, value: it has saved that
    returns    a process          the same: its elastic function has returned
    fails      a process          it is about to end by an error of its own, as the plan of the run wants
    faulted    the test           whom: a process that was killed, or told to leave, to fail or to crash
    stopped    the test           whom: a process that was stopped for a while, or its host cut off
    exit       the test           whom, code, said: how a process ended that no launcher had started
    over       the test           code, said: how the launcher ended; said is all that it and its processes printed
    runs       the test           still: what ran a while after the end; [] if nothing did

`who` is the process (its id), and `at` a number that grows (nanoseconds of a clock that all processes share).

A commit counts once all ranks of its world have saved it. What only some have saved is lost with them; and what a
process saves by itself after a stop, when the others have gone on without it, counts for nobody.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
STATE_LOST = "[state-lost]"
_CODED = re.compile(r"\[[a-z]+(-[a-z]+)+\]")


def weight(step: int) -> int:
    """What a step adds: not the same for all, so that a step that is lost shows if another one is applied twice."""
    return 1 + step * step % 11


def value_of(steps: int) -> int:
    """The value after so many steps."""
    return sum(weight(step) for step in range(1, steps + 1))


@dataclass(frozen=True)
class Broken:
    """A rule, what has happened instead, and the records that show it."""

    rule: str
    sentence: str
    records: tuple[Record, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}: {self.sentence}", *(f"    {json.dumps(record)}" for record in self.records)])


def read(folder: Path) -> list[Record]:
    """All records under `folder`, in the order in which they were written. A line that a kill has cut is left out."""
    found: list[Record] = []
    for path in folder.glob("*.log"):
        found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return sorted(found, key=lambda record: int(record["at"]))


def check(log: Sequence[Record]) -> list[Broken]:
    """The rules that this run has broken; [] if there are none."""
    return Run(log).broken()


class Run:
    """What the rules ask of a log."""

    def __init__(self, log: Sequence[Record]) -> None:
        self.log = sorted(log, key=lambda record: int(record["at"]))
        self.job = next(record for record in self.log if record["what"] == "job")
        self.begins = self._by_world("begins")
        self.saves = self._by_world("saves")
        self.returns = [record for record in self.log if record["what"] == "returns"]
        self.over = [record for record in self.log if record["what"] == "over"]
        self.done_at = self._done_at()
        self.faulted = {record["whom"] for record in self.log if record["what"] == "faulted"}
        self.faulted |= {record["who"] for record in self.log if record["what"] == "fails"}

    def _done_at(self) -> int | None:
        """Since when the work is done: all ranks of a world have saved the last step, or a function has returned."""
        commits = [one for world in self.saves if (one := self.complete(world)) is not None]
        ends = [int(one["at"]) for one in (*commits, *self.returns) if one["step"] == self.job["total"]]
        return min(ends, default=None)

    def _by_world(self, what: str) -> dict[int, list[Record]]:
        found: dict[int, list[Record]] = defaultdict(list)
        for record in self.log:
            if record["what"] == what:
                found[record["world"]].append(record)
        return dict(sorted(found.items()))

    def broken(self) -> list[Broken]:
        return [one for rule in RULES for one in rule(self)]

    def complete(self, world: int) -> Record | None:
        """The last commit that all ranks of a world have saved: the record of the one that saved it last."""
        ranks: dict[int, dict[int, Record]] = defaultdict(dict)
        for record in self.saves.get(world, []):
            ranks[record["step"]][record["rank"]] = record
        whole = [step for step, saved in ranks.items() if len(saved) == next(iter(saved.values()))["size"]]
        return max(ranks[max(whole)].values(), key=lambda record: int(record["at"])) if whole else None

    def last_commit(self, before: int) -> Record | None:
        """The commit with the most steps in worlds before this one, and after the training began anew, if it did."""
        found = [self.complete(world) for world in self.saves if self.anew_since(before) <= world < before]
        return max((one for one in found if one), key=lambda record: int(record["step"]), default=None)

    def anew_since(self, before: int) -> int:
        """The last world before this one in which the training was allowed to begin anew, and did."""
        anew = [world for world in self.begins if world < before and self._may_begin_anew(world)]
        return max(anew, default=0)

    def _may_begin_anew(self, world: int) -> bool:
        return (
            bool(self.job["anew"])
            and all(record["step"] == 0 for record in self.begins[world])
            and not [one for one in self.holders(world) if one not in self.faulted]
        )

    def holders(self, before: int) -> list[Any]:
        """The processes that have the state of the latest world before this one."""
        worlds = [world for world in self.begins if world < before]
        return [record["who"] for record in self.begins[max(worlds)]] if worlds else []

    def said(self) -> str:
        return "\n".join(record["said"] for record in self.log if record["what"] in ("over", "exit"))


END = 1 << 62  # after all worlds


def _values(run: Run) -> Iterable[Broken]:
    for record in run.log:
        if "value" in record and record["value"] != value_of(record["step"]):
            sentence = f"after {record['step']} steps the value is {value_of(record['step'])} if each counts once"
            yield Broken("each step counts once", sentence, (record,))


def _equal(run: Run) -> Iterable[Broken]:
    for world, records in run.begins.items():
        if len({(record["step"], record["size"]) for record in records}) > 1:
            yield Broken("ranks begin alike", f"those of world {world} do not", tuple(records))
        if len({record["rank"] for record in records}) < len(records):
            yield Broken("ranks are processes", f"two of world {world} have one rank", tuple(records))


def _sizes(run: Run) -> Iterable[Broken]:
    for world, records in run.begins.items():
        small = tuple(record for record in records if record["size"] < run.job["min"])
        if small:
            yield Broken("no world is too small", f"world {world} has fewer than {run.job['min']}", small)


def _goes_on(run: Run) -> Iterable[Broken]:
    for world, records in run.begins.items():
        first = records[0]
        commit = run.last_commit(world)
        if commit is None or first["step"] >= commit["step"] or run._may_begin_anew(world):
            continue
        rule = "no world goes back" if first["step"] else "a world begins at 0 only where nothing was committed"
        yield Broken(rule, f"world {world} begins with {first['step']} steps of {commit['step']}", (commit, first))


def _own_saves(run: Run) -> Iterable[Broken]:
    """Who was in the latest world does not go back behind what it has saved there itself."""
    worlds = [*run.begins]
    for earlier, world in itertools.pairwise(worlds):
        members = {record["who"]: record for record in run.begins[world]}
        for saved in run.saves.get(earlier, []):
            begun = members.get(saved["who"])
            stops = [one["at"] for one in run.log if one["what"] == "stopped" and one["whom"] == saved["who"]]
            since = min((one["at"] for one in run.begins[earlier] if one["who"] == saved["who"]), default=0)
            if any(since < at < saved["at"] for at in stops):
                continue
            if begun is not None and begun["at"] > saved["at"] and begun["step"] < saved["step"]:
                yield Broken("nobody goes back behind its own commit", f"in world {world}", (saved, begun))


def _done(run: Run) -> Iterable[Broken]:
    for record in run.returns:
        if record["step"] != run.job["total"]:
            yield Broken("all steps are taken", f"the function returned without all {run.job['total']}", (record,))
    if run.returns:
        first = min(run.returns, key=lambda record: int(record["world"]))
        members = {record["who"] for record in run.begins.get(first["world"], [])}
        for world, records in run.begins.items():
            # A member that lost others in the last step may still end as they have, with nothing left to do.
            again = [one for one in records if one["step"] < run.job["total"] or one["who"] not in members]
            if world > first["world"] and again:
                yield Broken("work that is done stays done", f"world {world} begins after", (first, again[0]))


def _end(run: Run) -> Iterable[Broken]:
    """How the launcher ended fits what its processes did."""
    for over in run.over:
        code, said = over["code"], over["said"]
        if code == 0 and run.done_at is None:
            yield Broken("0 is for work that is done", "the last step was not committed", (over,))
        if code and not _CODED.search(said) and run.done_at is None:
            yield Broken("a failure is told", f"the launcher ended with {code}, and without a sentence", (over,))
        if code and run.done_at is not None:
            late = [one for one in run.log if one["what"] in ("faulted", "fails") and one["at"] > run.done_at]
            crashed = [one for one in run.log if one["what"] == "faulted" and one.get("how") == "crash at the end"]
            if not late and not crashed:
                sentence = f"the launcher ended with {code} although no process failed after the work was done"
                yield Broken("work that is done ends well", sentence, (*run.returns[:1], over))
        if code and run.done_at is None and STATE_LOST not in said:
            yield Broken("a job that can go on does", f"it ended with {code} before its work was done", (over,))


def _ends(run: Run) -> Iterable[Broken]:
    """How processes ended that nobody replaces: the ones that nothing was done to end well, or say why not."""
    exits = [record for record in run.log if record["what"] == "exit"]
    for record in exits:
        if record["code"] and record["whom"] not in run.faulted and STATE_LOST not in record["said"]:
            sentence = f"{record['whom']} ended with {record['code']}"
            yield Broken("who is not disturbed ends well", sentence, (record,))
    if exits and not run.over and run.done_at is None and STATE_LOST not in run.said():
        yield Broken("a job that can go on does", "all processes have ended and the work is not done", tuple(exits))


def _lost(run: Run) -> Iterable[Broken]:
    """A job says that its state is lost only if something was committed, and all that held it are gone."""
    if STATE_LOST not in run.said():
        return
    commit = run.last_commit(END)
    begun = [record for records in run.begins.values() for record in records]
    if not begun or not any(run.saves.values()):
        yield Broken("the state is lost only if there was one", "nothing was committed", tuple(run.over))
    left = [who for who in run.holders(END) if who not in run.faulted]
    if left:
        sentence = f"nothing was done to {', '.join(map(str, left))}"
        yield Broken("the state is lost only with all that hold it", sentence, (commit or begun[-1], *run.over))


def _nothing_is_left(run: Run) -> Iterable[Broken]:
    for record in run.log:
        if record["what"] == "runs" and record["still"]:
            yield Broken("after the end nothing runs", ", ".join(map(str, record["still"])), (record,))


def _ended(run: Run) -> Iterable[Broken]:
    if not any(record["what"] in ("over", "exit") for record in run.log):
        yield Broken("a job ends", "neither the launcher nor a process has ended")


RULES: tuple[Callable[[Run], Iterable[Broken]], ...] = (
    _values, _equal, _sizes, _goes_on, _own_saves, _done, _end, _ends, _lost, _nothing_is_left, _ended,
)  # fmt: skip
