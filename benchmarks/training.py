#!/usr/bin/env python3
"""Trains the same models alone, with torch's DistributedDataParallel over Gloo and with horovod, in turn, in one run.

    python benchmarks/training.py            an MLP, a ResNet and a transformer with 2 ranks: six minutes
    python benchmarks/training.py --quick    tiny models: does everything work? The figures mean nothing

Every rank has one thread. Before a model is measured each library trains it for a few steps, and the parameters must be
those that one process gets from the joined batch; after every timed block all ranks must have the same ones. The same
processes train with each library, in turns of a step or two.

samples/s     of all ranks together. "alone" is one process that trains by itself.
x             how many times as many as with DistributedDataParallel: the median over the rounds, each compared with
              itself, and between which two numbers that median lies in 95 of 100 such runs.
speed-up      over "alone"; as many as there are ranks would be perfect.
waiting       the share of a step that communication adds: 1 - (a step of the same processes, all at once, with a plain
              optimizer and no communication) / (the step), each round compared with itself. They share caches and
              memory as in the step, so what they lose to each other is not counted. Below 0: noise of the machine.

Exit codes: 0, or 1 when a library failed or gave wrong parameters, 2 for a command line that makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.measure import Budget, Row, Turns, alternate
from benchmarks.models import MODELS, TrainingCase
from benchmarks.world import Host, Layout, World, WorldError

RESULTS = Path(__file__).resolve().parent / "results"
LIBRARIES = {"ddp": "DDP over Gloo", "horovod": "horovod"}
TITLES = {**LIBRARIES, "strategy": "MultiWorkerMirroredStrategy", "pmean": "pmean"}  # in *_training.py
# How far a parameter may be from that of one process, as a share of the largest change that the steps have made.
_TOLERANCE = 1e-3
_FULL = Budget(rounds=200, round_seconds=0.1, block_seconds=0.1)
_QUICK = Budget(rounds=2, round_seconds=0.02, block_seconds=0.02)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return report.until_interrupted(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    report.tell_load()
    about = report.machine({})
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    started = time.monotonic()
    print(f"{options.np} ranks of one thread\n{HEADER}")
    with contextlib.ExitStack() as stack:
        ways: dict[str, Way] = {}
        try:
            ways = start(stack, options.libraries, options.np, {}, about["versions"])
        except WorldError as error:
            failures.append(str(error))
            print(report.brief(str(error)))
        for model in options.models:
            case = TrainingCase(model, options.np, tiny=options.quick)
            row, document = measure_training(case, ways, options.budget)
            print(line(case, row), flush=True)
            rows.append(document)
            failures.extend(row.refused.values())
            ways = {name: way for name, way in ways.items() if name not in row.refused}
    document = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": rows,
        "failures": failures,
    }
    report.write_json(options.json, document)
    print(f"{time.monotonic() - started:.0f} s; parameters compared; written to {options.json}")
    return 1 if failures else 0


class Way:
    """One of the ways in which the ranks of a world can train."""

    def __init__(self, world: World, how: str) -> None:
        self._world = world
        self._how = how
        self.size = world.size

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        try:
            return self._world.ask(do, how=self._how, **arguments)
        except WorldError as error:
            raise WorldError(f"While it trained with {TITLES.get(self._how, 'no library')}: {error}") from None


def start(
    stack: contextlib.ExitStack,
    libraries: Sequence[str],
    ranks: int,
    environment: Mapping[str, str],
    versions: dict[str, str],
    module: str = "benchmarks.trainer",
) -> dict[str, Way]:
    """All ways to train: by each library, "apart" by the same ranks without any, and "alone" by one process.

    module: what a rank runs.
    """

    def world(kind: str, size: int, names: Sequence[str]) -> World:
        settings = {**environment, "BENCHMARK_LIBRARIES": ",".join(names)}
        return stack.enter_context(World(kind, Layout((Host(),), size, environment=settings), module))

    alone = world("plain", 1, ())
    trainers = world("horovod" if "horovod" in libraries else "ddp", ranks, libraries)  # ours needs a coordinator
    versions |= {"alone": alone.version, "trainers": trainers.version}
    ways = {name: Way(trainers, name) for name in libraries}
    return {"alone": Way(alone, "plain"), **ways, "apart": Way(trainers, "plain")}


def measure_training(
    case: TrainingCase, ways: dict[str, Way], budget: Budget, peer: str = "ddp"
) -> tuple[Row, dict[str, Any]]:
    """The row of a model, and its JSON. A library whose parameters are wrong gets no figure.

    peer: which of the ways horovod is compared with.
    """
    refused: dict[str, str] = {}
    distances = {}
    with tempfile.TemporaryDirectory(prefix="horovod-training-") as folder:
        if "alone" in ways:
            distances = verify(case, ways, Path(folder), refused)
    turns = {}
    for name, way in ways.items():
        if name not in refused:
            turns[name] = Turns(replace(case, ranks=way.size), way, budget)
    row = alternate(case, turns, budget.rounds)
    row.refused |= refused
    found = {
        "samples_per_second": {name: samples_per_second(case, row, name) for name in row.figures},
        "times_faster_than": {peer: row.ratio(peer)},
        "interval_of_times_faster_than": {peer: row.ratio_interval(peer)},
        "waiting": {name: waiting(row, name) for name in (peer, "horovod")},
        "distance_from_one_process": distances,  # and from "each other"
        "parameters": case.result_elements,
        "batch_of_a_rank": case.batch,
    }
    return row, row.to_json() | found


def verify(case: TrainingCase, ways: Mapping[str, Way], folder: Path, refused: dict[str, str]) -> dict[str, float]:
    """How far each library's parameters are from those of one process, and the two from each other, as a share of the
    largest change. Too far is refused.
    """
    import torch

    saved = {}
    for name, way in ways.items():
        if name == "apart":
            continue
        try:
            way.ask("verify", file=str(folder / name), joined=case.ranks, **replace(case, ranks=way.size).to_json())
            saved[name] = torch.load(folder / name)
        except WorldError as error:
            refused[name] = str(error)
    if "alone" not in saved:
        return {}
    before, wanted = saved["alone"]["before"], saved.pop("alone")["after"]
    change = float((wanted - before).abs().max())
    found = {name: model["after"] for name, model in saved.items()}
    distances = {name: float((after - wanted).abs().max()) / change for name, after in found.items()}
    for name, share in distances.items():
        if not share <= _TOLERANCE:  # also when it is no number
            refused[name] = (
                f"{name} has trained another model than one process with the joined batch: a parameter is off by "
                f"{share:.2g} of the largest change; at most {_TOLERANCE:g} is rounding."
            )
    if len(found) == 2:
        one, other = found.values()
        distances["each other"] = float((one - other).abs().max()) / change
    return distances


def samples_per_second(case: TrainingCase, row: Row, name: str) -> float | None:
    if name not in row.figures:
        return None
    return case.batch * (1 if name == "alone" else case.ranks) / row.figures[name].seconds


def waiting(row: Row, name: str) -> float | None:
    if name not in row.figures or "apart" not in row.figures:
        return None
    pairs = zip(row.figures["apart"].rounds, row.figures[name].rounds, strict=True)
    return statistics.median(1 - alone / together for alone, together in pairs)


def header(peer: str) -> str:
    return (
        f"{'model':>12}{'parameters':>12}{'alone':>10}{peer:>10}{'horovod':>10}{'x':>7}{'':14}"
        f"{'speed-up: ' + peer:>16}{'horovod':>10}{'waiting: ' + peer:>15}{'horovod':>10}"
    )


HEADER = header("DDP")


def line(case: TrainingCase, row: Row, peer: str = "ddp") -> str:
    rates = [samples_per_second(case, row, name) for name in ("alone", peer, "horovod")]
    alone = rates[0]
    ratio = row.ratio(peer)
    speedups = [rate / alone if rate and alone else None for rate in rates[1:]]
    shares = [waiting(row, name) for name in (peer, "horovod")]

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'-' if value is None else format(value, form):>{width}}"

    text = f"{case.operation:>12}{case.label:>12}" + "".join(cell(rate, 10, ".1f") for rate in rates)
    interval = row.ratio_interval(peer)
    between = f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else ""
    text += f"{cell(ratio, 7, '.2f')}{between:<14}" + cell(speedups[0], 16, ".2f") + cell(speedups[1], 10, ".2f")
    text += cell(shares[0], 15, ".1%") + cell(shares[1], 10, ".1%")
    return text + "".join(f"\n    {name} is not reported: {report.brief(why)}" for name, why in row.refused.items())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains models with horovod and DistributedDataParallel on this host.")
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny models and short rounds")
    parser.add_argument("--json", type=Path, default=RESULTS / "training.json", help="default: %(default)s")
    options = parser.parse_args(argv)
    if options.np < 2:
        parser.error(f"--np: {options.np} is no number of ranks that train together; expected 2 or more.")
    for what, known in (("models", MODELS), ("libraries", LIBRARIES)):
        names = tuple(getattr(options, what).split(","))
        for name in names:
            if name not in known:
                parser.error(f"{name!r} is none of the {what}; there are {', '.join(known)}.")
        setattr(options, what, names)
    options.budget = _QUICK if options.quick else _FULL
    return options


if __name__ == "__main__":
    sys.exit(main())
