#!/usr/bin/env python3
"""Ray: how workers start, what a call of them costs, and how an elastic job recovers.

    python benchmarks/ray.py                     ten minutes; needs PyTorch and pandas for what it is compared with
    python benchmarks/ray.py --parts recovery    one minute: killed actors, and a killed node
    python benchmarks/ray.py --quick             does everything work? The figures mean nothing
    python benchmarks/ray.py --parts recovery --elastic-np 4 --kills 5 --spares 1 --nodes 0

What is measured is told in ray_start.py and ray_recovery.py beside this file. All processes share this machine's
processors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not this folder, whose ray.py is this file

from ray import cloudpickle  # noqa: E402

from benchmarks import ray_recovery, ray_start  # noqa: E402

PARTS = ("start", "recovery")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--np", type=int, nargs="+", default=[2, 8], help="start: numbers of workers")
    parser.add_argument("--rounds", type=int, default=5, help="start: for each number")
    parser.add_argument("--without-trainer", action="store_true", help="start: leave TorchTrainer out")
    parser.add_argument("--elastic-np", type=int, default=2, help="recovery: actors of a world")
    parser.add_argument("--kills", type=int, default=10, help="recovery: actors that are killed")
    parser.add_argument("--spares", type=int, default=0, help="recovery: actors that wait")
    parser.add_argument("--nodes", type=int, default=1, help="recovery: nodes that are killed")
    parser.add_argument("--quick", action="store_true", help="the least of everything")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"--parts: unknown {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.quick:
        options.np, options.rounds, options.without_trainer, options.kills = [2], 1, True, 1
    if (load := os.getloadavg()[0]) > 0.7:
        print(f"The load is {load:.1f}: other programs disturb these figures.")
    for module in (ray_start, ray_recovery):  # actors have another import path
        cloudpickle.register_pickle_by_value(module)
    figures: dict[str, list[float]] = {}
    if "start" in options.parts:
        figures |= shown(ray_start.figures(options.np, options.rounds, not options.without_trainer))
    if "recovery" in options.parts:
        figures |= shown(ray_recovery.figures(options.elastic_np, options.kills, options.spares, options.nodes))
    if options.json:
        Path(options.json).write_text(json.dumps({"load_at_start": load, "seconds": figures}, indent=1))
    return 0


def shown(figures: Mapping[str, list[float]]) -> Mapping[str, list[float]]:
    """Prints them."""
    for name, seconds in figures.items():
        median, worst = statistics.median(seconds) * 1000, max(seconds) * 1000
        print(f"{name:<32} median {median:9.1f} ms   worst {worst:9.1f} ms", flush=True)
    return figures


if __name__ == "__main__":
    sys.exit(main())
