"""From where packing wins: groups of equal tensors that are reduced once with all of them packed and once with none.

What comes out is what HOROVOD_GPU_PACK_COUNT and HOROVOD_GPU_PACK_THRESHOLD should be on such a machine. A rank that is
alone packs nothing, so that it takes two; and where they share a GPU, the host is measured and not the GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.cases import KIB, MIB, Case, size_text
from benchmarks.measure import Budget, Row, measure
from benchmarks.world import Host, Layout, World, WorldError
from horovod.base.settings import resolve

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256)
SIZES = (256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
QUICK_COUNTS, QUICK_SIZES = (2, 16, 128), (KIB, 64 * KIB, MIB)
_MOST_BYTES = 64 * MIB  # of a group: HOROVOD_FUSION_THRESHOLD of the buffer is twice that by default
_WORLDS = {
    "horovod": {"HOROVOD_GPU_PACK_THRESHOLD": str(1 << 30), "HOROVOD_GPU_PACK_COUNT": "1"},
    "apart": {"HOROVOD_GPU_PACK_THRESHOLD": "0"},
}


@dataclass(frozen=True)
class Cell:
    """Seconds for `count` tensors of `bytes` each."""

    count: int
    bytes: int
    packed: float
    apart: float


@dataclass(frozen=True)
class Setting:
    """Tensors up to `threshold_bytes` are packed where there are `count` or more; nothing is with a threshold of 0."""

    threshold_bytes: int
    count: int

    def packs(self, cell: Cell) -> bool:
        return cell.bytes <= self.threshold_bytes and cell.count >= self.count


def best(cells: Sequence[Cell]) -> Setting:
    """The setting that loses least against choosing well in every cell; of equals the one that packs least.

    What a cell loses is the logarithm of how many times as long it takes, so that no size counts for more than others.
    """
    sizes, counts = sorted({cell.bytes for cell in cells}), sorted({cell.count for cell in cells}, reverse=True)
    settings = [Setting(0, 1), *(Setting(size, count) for size in sizes for count in counts)]
    return min(settings, key=lambda setting: loss(setting, cells))


def loss(setting: Setting, cells: Sequence[Cell]) -> float:
    """How many times as long all cells take as with the better choice in each: the geometric mean."""
    lost = (
        math.log((cell.packed if setting.packs(cell) else cell.apart) / min(cell.packed, cell.apart)) for cell in cells
    )
    return math.exp(math.fsum(lost) / len(cells)) if cells else 1.0


def wins_from(cells: Sequence[Cell]) -> dict[int, int | None]:
    """By size, the number of tensors from which packing is faster, and at all higher ones measured; None: at none."""
    found: dict[int, int | None] = {}
    for cell in sorted(cells, key=lambda cell: (cell.bytes, -cell.count)):
        if cell.bytes not in found:
            found[cell.bytes] = None
            winning = True
        winning = winning and cell.packed < cell.apart
        if winning:
            found[cell.bytes] = cell.count
    return found


def sweep(
    ranks: int, environment: Mapping[str, str], quick: bool, budget: Budget, failures: list[str]
) -> dict[str, Any]:
    """Measures it, prints the table and says what the settings should be. What fails is added to `failures`."""
    rows: list[Row] = []
    print(HEADER)
    with contextlib.ExitStack() as stack:
        worlds = []
        try:
            for name, settings in _WORLDS.items():
                layout = Layout((Host(),), ranks, environment={**environment, **settings})
                worlds.append(stack.enter_context(World("horovod", layout, name=name)))
        except WorldError as error:
            failures.append(str(error))
            print(f"Where packing wins is not reported: {report.brief(str(error))}")
            return {}
        for case in cases(ranks, quick):
            row = measure(case, worlds, budget)
            rows.append(row)
            print(line(row), flush=True)
            failures.extend(row.refused.values())
            if row.refused:
                break
    cells = [
        Cell(row.case.tensors, row.case.bytes, row.figures["horovod"].seconds, row.figures["apart"].seconds)
        for row in rows
        if len(row.figures) == len(_WORLDS)
    ]
    setting = best(cells)
    print(sentence(setting, cells))
    return {
        "rows": [row.to_json() for row in rows],
        "wins_from": {str(size): count for size, count in wins_from(cells).items()},
        "threshold_bytes": setting.threshold_bytes,
        "count": setting.count,
        "loss": loss(setting, cells),
        "loss_of_the_default": loss(default(), cells),
    }


def default() -> Setting:
    """What holds where nobody has set anything."""
    settings = resolve({})
    return Setting(settings.gpu_pack_threshold_bytes, settings.gpu_pack_count)


def cases(ranks: int, quick: bool) -> list[Case]:
    sizes, counts = (QUICK_SIZES, QUICK_COUNTS) if quick else (SIZES, COUNTS)
    return [
        Case("grouped", ranks, size, tensors=count) for size in sizes for count in counts if size * count <= _MOST_BYTES
    ]


_COLUMNS = (("np", 3), ("grouped", 16), ("size", 24), ("packed", 10), ("host", 9), ("apart", 10), ("host", 9), ("x", 7))
HEADER = "".join(f"{name:>{width}}" for name, width in _COLUMNS)


def line(row: Row) -> str:
    case, ratio = row.case, row.ratio("apart")
    times = []
    for name in _WORLDS:
        figure = row.figures.get(name)
        times += [report.time_text(figure.seconds if figure else None)]
        times += [report.time_text(figure.host_seconds if figure and figure.host_rounds else None)]
    cells = [str(case.ranks), f"{case.tensors} tensors", f"{size_text(case.bytes)} each", *times]
    cells.append("-" if ratio is None else f"{ratio:.2f}")
    text = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
    return text + "".join(f"\n    {name} is not reported: {report.brief(why)}" for name, why in row.refused.items())


def sentence(setting: Setting, cells: Sequence[Cell]) -> str:
    """What a person should set, and what it is worth."""
    if not cells:
        return "Where packing wins is not known: nothing was measured."
    by_size = ", ".join(
        f"{size_text(size)}: {f'{count} tensors' if count else 'nowhere'}" for size, count in wins_from(cells).items()
    )
    if setting.threshold_bytes == 0:
        advice = "HOROVOD_GPU_PACK_THRESHOLD=0 (packing never pays)"
    else:
        advice = f"HOROVOD_GPU_PACK_THRESHOLD={setting.threshold_bytes} HOROVOD_GPU_PACK_COUNT={setting.count}"
    return (
        f"packing wins from: {by_size}\n"
        f"best here: {advice}, {100 * (loss(setting, cells) - 1):.0f}% slower than the better choice in each row; the "
        f"defaults ({size_text(default().threshold_bytes)}, {default().count} tensors): "
        f"{100 * (loss(default(), cells) - 1):.0f}%"
    )
