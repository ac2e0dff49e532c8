"""What comes out: a table to read, JSON to keep, a plot for the docs."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import COLLECTIVES, FLOAT_BYTES, size_text
from benchmarks.measure import Row
from benchmarks.peers import TITLES

PEERS = ("gloo", "mpi")
_QUIET_LOAD = 0.7


def machine(versions: Mapping[str, str]) -> dict[str, Any]:
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "unknown")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
        "versions": dict(versions),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def until_interrupted(run: Callable[[], int]) -> int:
    """The exit code of `run`; 130 when Ctrl-C or a polite kill cuts it short, after it has tidied up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def tell_load() -> None:
    load = os.getloadavg()[0]
    if load > _QUIET_LOAD:
        print(f"The load is {load:.1f}: other programs disturb these figures; ratios suffer less than times and rates.")


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def rate_text(bytes_per_second: float) -> str:
    """GB/s; nothing where the size is too small for it to mean anything."""
    return f"{bytes_per_second / 1e9:.2f}" if bytes_per_second >= 1e7 else "-"


def header(extra: Sequence[str] = ()) -> str:
    names = ["np", "operation", "size", "horovod", "GB/s", "Gloo", "x", "Open MPI", "x", *extra]
    return "".join(f"{name:>{width}}" for name, width in zip(names, _WIDTHS, strict=False))


_WIDTHS = (3, 14, 23, 10, 7, 10, 7, 10, 7, 11, 10, 7, 26)


def line(row: Row, extra: Sequence[str] = ()) -> str:
    ours = row.figures.get("horovod")
    size = sum(row.case.elements) * FLOAT_BYTES
    if row.case.operation == "allgather":
        size *= row.case.ranks
    cells = [
        str(row.case.ranks),
        row.case.operation,
        row.case.label,
        time_text(ours.seconds if ours else None),
        rate_text(size / ours.seconds if ours else 0.0),
    ]
    for peer in PEERS:
        figure, ratio = row.figures.get(peer), row.ratio(peer)
        cells += [
            time_text(figure.seconds if figure else None),
            "-" if ratio is None else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}",
        ]
    text = "".join(f"{cell:>{width}}" for cell, width in zip([*cells, *extra], _WIDTHS, strict=False))
    return text + "".join(f"\n    {library} is not reported: {brief(why)}" for library, why in row.refused.items())


def cost_of_adasum(rows: Sequence[Row]) -> list[str]:
    """A sentence for each size of one world: no peer has Adasum, what its user could do instead is to sum."""
    sums = {row.case.bytes: row.figures["horovod"] for row in rows if _is_ours(row, "allreduce")}
    return [
        f"{row.case.ranks} ranks of horovod: Adasum of {row.case.label} takes "
        f"{row.figures['horovod'].seconds / sums[row.case.bytes].seconds:.2f} times as long as its allreduce."
        for row in rows
        if _is_ours(row, "adasum") and row.case.bytes in sums
    ]


def _is_ours(row: Row, operation: str) -> bool:
    return row.case.operation == operation and "horovod" in row.figures


def brief(failure: str) -> str:
    """A sentence and the last line of the output that follows it; all of it is in the JSON."""
    lines = failure.splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def plot(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """Time against size, both logarithmic: a row of panels for each number of ranks, a panel for each collective."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    worlds = sorted({row.case.ranks for row in rows})
    operations = [name for name in COLLECTIVES if any(row.case.operation == name and row.case.bytes for row in rows)]
    if not operations:
        print("Nothing to plot: no operation has a size.", file=sys.stderr)
        return
    figure, axes = pyplot.subplots(
        len(worlds), len(operations), figsize=(3.2 * len(operations), 3.0 * len(worlds)), sharex=True, squeeze=False
    )
    for across, ranks in enumerate(worlds):
        for down, operation in enumerate(operations):
            axis = axes[across][down]
            for library, title in TITLES.items():
                points = [
                    (row.case.bytes, row.figures[library].seconds * 1e6)
                    for row in rows
                    if row.case.ranks == ranks and row.case.operation == operation and library in row.figures
                ]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=title)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{operation}, {ranks} ranks", fontsize=9)
            axis.grid(True, which="major", linewidth=0.3)
            ticks = [4, 1 << 10, 1 << 16, 1 << 20, 1 << 28]
            axis.set_xticks(ticks, [size_text(size) for size in ticks], fontsize=7)
            axis.tick_params(axis="y", labelsize=7)
        axes[across][0].set_ylabel("microseconds", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"float32 on {about['cores']} cores ({about['cpu']})", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
