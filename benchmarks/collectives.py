#!/usr/bin/env python3
"""Measures horovod, torch.distributed with Gloo and Open MPI in turn on this host, in one run.

    python benchmarks/collectives.py            every collective, 4 B to 256 MB, 2 and 4 ranks: several minutes
    python benchmarks/collectives.py --quick    a few sizes, under a minute

Exit codes: 0, or 1 when a library failed or gave wrong values, 2 for a command line that makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import cases, report
from benchmarks.measure import Budget, Row, idle_cpu, measure, settle
from benchmarks.peers import NAMES, TITLES
from benchmarks.world import Host, Layout, World, WorldError, why_missing

QUICK_SIZES = (4, 16 << 10, 1 << 20, 16 << 20)
QUICK = Budget(rounds=3, round_seconds=0.03, block_seconds=0.01, large_rounds=2, large_bytes=16 << 20, settle_seconds=0)
RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return report.until_interrupted(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    libraries = []
    for name in options.libraries:
        missing = why_missing(name)
        if missing:
            print(missing)
        else:
            libraries.append(name)
    report.tell_load()
    about = report.machine({})
    rows: list[Row] = []
    idle: dict[int, Any] = {}
    failures: list[str] = []
    print(report.header())
    started = time.monotonic()
    for ranks in options.np:
        with contextlib.ExitStack() as stack:
            worlds: list[World] = []
            for library in libraries:
                try:
                    worlds.append(stack.enter_context(World(library, layout(library, ranks))))
                except WorldError as error:
                    failures.append(str(error))
                    print(report.brief(str(error)))
            about["versions"] |= {TITLES[world.library]: world.version for world in worlds}
            chosen = cases.cases(ranks, options.ops, options.sizes)
            settle(chosen[0], worlds, options.budget)
            for case in chosen:
                row = measure(case, worlds, options.budget)
                print(report.line(row), flush=True)
                rows.append(row)
                failures.extend(row.refused.values())
                worlds = [world for world in worlds if world.library not in row.refused]
            for sentence in report.cost_of_adasum([row for row in rows if row.case.ranks == ranks]):
                print(sentence)
            if options.idle and worlds:
                idle[ranks] = _idle(worlds, options.idle)
    document: dict[str, Any] = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    document |= {"rows": [row.to_json() for row in rows], "idle": idle, "failures": failures}
    report.write_json(options.json, document)
    print(f"{time.monotonic() - started:.0f} s; values of every block checked; written to {options.json}")
    if options.plot:
        report.plot(options.plot, rows, about)
    return 1 if failures else 0


def layout(library: str, ranks: int) -> Layout:
    return Layout((Host(),), ranks, mpi_options=("--oversubscribe",))


def _idle(worlds: Sequence[World], seconds: float) -> dict[str, Any]:
    percent = idle_cpu(worlds, seconds, time.sleep)
    late = 0.5
    found: dict[str, Any] = {"seconds": seconds}
    for world in worlds:
        waiting = [reply["cpu_seconds"] for reply in world.ask("straggle", seconds=late)][:-1]
        found[world.library] = {"idle_percent_of_a_core": percent[world.library], "waiting_cpu_seconds": waiting}
        shares = " ".join(f"{share:.2f}%" for share in percent[world.library])
        print(
            f"{world.size} ranks of {TITLES[world.library]}: idle for {seconds:g} s each took {shares} of a core; "
            f"waiting {late:g} s for a late rank took {' '.join(report.time_text(cpu) for cpu in waiting)} of CPU."
        )
    return found


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures collectives of horovod and its peers on this host.")
    parser.add_argument("--np", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--sizes", help="message sizes such as 4,16K,256M (default: 4 to 256M, few of adasum)")
    parser.add_argument("--ops", default=",".join(cases.OPERATIONS), help="default: %(default)s")
    parser.add_argument("--libraries", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few sizes and short rounds")
    idle_help = "also measure the CPU use of idle ranks for this long; 0: do not (default: 10, with --quick 0)"
    parser.add_argument("--idle", type=float, metavar="SECONDS", help=idle_help)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/collectives.json")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw a plot (needs matplotlib)")
    options = parser.parse_args(argv)
    try:
        options.np = tuple(_whole(text) for text in options.np.split(","))
        sizes = tuple(cases.parse_size(text) for text in options.sizes.split(",")) if options.sizes else None
        options.ops = cases.parse_names(options.ops, "operation", cases.OPERATIONS)
        options.libraries = cases.parse_names(options.libraries, "library", NAMES)
    except ValueError as error:
        parser.error(str(error))
    options.sizes = sizes or (QUICK_SIZES if options.quick else None)
    options.budget = QUICK if options.quick else Budget()
    options.json = options.json or RESULTS / "collectives.json"
    if options.idle is None:
        options.idle = 0.0 if options.quick else 10.0
    return options


def _whole(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 2:
        raise ValueError(f"--np: {text!r} is no number of ranks; expected 2 or more.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
