#!/usr/bin/env python3
"""Measures torch.distributed with the backend horovod and with Gloo, and hvd.* itself, in turn in one run.

    python benchmarks/torch_distributed.py            collectives of 4 B to 256 MB, 2 and 4 ranks: several minutes
    python benchmarks/torch_distributed.py --quick    a few sizes, under a minute

Columns: the backend's time; how many times faster it is than Gloo; what a call takes longer than the same one of hvd.*.
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
from benchmarks.collectives import QUICK, QUICK_SIZES, RESULTS, layout
from benchmarks.measure import Budget, Row, measure, settle
from benchmarks.world import World, WorldError

LIBRARIES = ("backend", "gloo", "horovod")
OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")
_WIDTHS = (3, 14, 23, 10, 7, 10, 7, 10, 12)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return report.until_interrupted(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    report.tell_load()
    about = report.machine({})
    rows: list[Row] = []
    failures: list[str] = []
    print(_cells("np", "operation", "size", "backend", "GB/s", "Gloo", "x", "hvd", "more"))
    started = time.monotonic()
    for ranks in options.np:
        with contextlib.ExitStack() as stack:
            worlds: list[World] = []
            for library in LIBRARIES:
                try:
                    worlds.append(stack.enter_context(World(library, layout(library, ranks))))
                except WorldError as error:
                    failures.append(str(error))
                    print(report.brief(str(error)))
            chosen = cases.cases(ranks, options.ops, options.sizes)
            settle(chosen[0], worlds, options.budget)
            for case in chosen:
                row = measure(case, worlds, options.budget)
                print(_line(row), flush=True)
                rows.append(row)
                failures.extend(row.refused.values())
                worlds = [world for world in worlds if world.library not in row.refused]
    document: dict[str, Any] = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": [row.to_json() for row in rows],
        "failures": failures,
    }
    report.write_json(options.json, document)
    print(f"{time.monotonic() - started:.0f} s; values of every block checked; written to {options.json}")
    return 1 if failures else 0


def _line(row: Row) -> str:
    ours, gloo, direct = (row.figures.get(library) for library in LIBRARIES)
    size = sum(row.case.elements) * cases.FLOAT_BYTES * (row.case.ranks if row.case.operation == "allgather" else 1)
    ratio = row.ratio("gloo", of="backend")
    text = _cells(
        str(row.case.ranks),
        row.case.operation,
        row.case.label,
        report.time_text(ours.seconds if ours else None),
        report.rate_text(size / ours.seconds if ours else 0.0),
        report.time_text(gloo.seconds if gloo else None),
        "-" if ratio is None else f"{ratio:.2f}",
        report.time_text(direct.seconds if direct else None),
        f"{(ours.seconds - direct.seconds) * 1e6:.1f} us" if ours and direct else "-",
    )
    return text + "".join(
        f"\n    {library} is not reported: {report.brief(why)}" for library, why in row.refused.items()
    )


def _cells(*cells: str) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the backend horovod of torch.distributed beside Gloo.")
    parser.add_argument("--np", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--sizes", help="message sizes such as 4,16K,256M (default: 4 to 256M)")
    parser.add_argument("--ops", default=",".join(OPERATIONS), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few sizes and short rounds")
    parser.add_argument("--json", type=Path, default=RESULTS / "torch_distributed.json", help="default: %(default)s")
    options = parser.parse_args(argv)
    try:
        options.np = tuple(int(text) for text in options.np.split(","))
        sizes = tuple(cases.parse_size(text) for text in options.sizes.split(",")) if options.sizes else None
        options.ops = cases.parse_names(options.ops, "operation", OPERATIONS)
    except ValueError as error:
        parser.error(str(error))
    options.sizes = sizes or (QUICK_SIZES if options.quick else None)
    options.budget = QUICK if options.quick else Budget()
    return options


if __name__ == "__main__":
    sys.exit(main())
