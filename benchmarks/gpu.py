#!/usr/bin/env python3
"""Measures horovod on GPUs beside raw NCCL (torch.distributed) and DistributedDataParallel, in turn, in one run.

    python benchmarks/gpu.py                 all of it, with 1 rank and with one on each GPU (of one GPU: with 2)
    python benchmarks/gpu.py --np 2 --quick  a few sizes and short rounds
    python benchmarks/gpu.py --rehearsal     tiny, on the CPU, Gloo for NCCL: does it all work? The figures mean nothing

Rank r has GPU r, counted around where there are fewer. NCCL refuses two ranks of a host on one GPU, so that ranks which
share one each pretend to be a host (NCCL_HOSTID) and use sockets: such figures say what the host does, not the GPUs.

The tables: allreduce from 4 B to 1 GB and sets of gradients; the kernel that packs small tensors, by itself, beside the
device's own copy (packing.py); where packing wins (switch_point.py); training in bfloat16.

GB/s    bytes of the tensors, once, in a second.
host    until the calls had returned and torch's stream had been told to wait for the results; the device goes on.
x       how many times as long the other one takes, or its host: the median over the rounds, each with its own.
group   torch.distributed with all gradients in one group call of NCCL, as horovod sends them; NCCL's own column has
        them in flattened buckets of 25 MB, as DistributedDataParallel does. "ours" is what horovod's host takes beyond
        the group call's: the time of a step that is spent in our code.

Every value is compared after each block. Exit codes: 0, or 1 when a library failed or gave wrong values, 2 for a
command line that makes no sense and where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import cases, packing, report, switch_point, training
from benchmarks.cases import FLOAT_BYTES, KIB, MIB
from benchmarks.measure import Budget, Figure, Row, measure
from benchmarks.models import TrainingCase
from benchmarks.peers import TITLES
from benchmarks.world import Host, Layout, World, WorldError

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (*cases.SIZES, 1024 * MIB)
QUICK_SIZES = (4, 64 * KIB, MIB, 64 * MIB)
OPERATIONS = (*cases.COLLECTIVES, *cases.GPU_GRADIENT_SETS)
DEFAULT_OPERATIONS = ("allreduce", *cases.GPU_GRADIENT_SETS)
MODELS = ("resnet", "transformer")
_FULL = Budget(rounds=5, round_seconds=0.2, block_seconds=0.05)
_QUICK = Budget(rounds=3, round_seconds=0.05, block_seconds=0.02, large_rounds=2)
# Short, because to fill and to check 256 tensors takes longer than to reduce them.
_SWITCH_POINT = Budget(rounds=7, round_seconds=0.02, block_seconds=0.01)
_TRAINING = Budget(rounds=50, round_seconds=0.2, block_seconds=0.2)
_QUICK_TRAINING = Budget(rounds=2, round_seconds=0.02, block_seconds=0.02)
_COPY_BYTES, _COPIES = 1024 * MIB, 10


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if not options.rehearsal and (obstacle := why_not()):
        print(obstacle, file=sys.stderr)
        return 2
    options.np = options.np or _default_ranks(options.rehearsal)
    return report.until_interrupted(lambda: _run(options))


def why_not() -> str:
    """The sentence that says why nothing can be measured here; empty: it can."""
    import torch

    from horovod.worker.runtime.devices import gpu_obstacle

    if torch.version.cuda is None:
        return "There is nothing to measure: this PyTorch is built without CUDA, so it knows no GPU (--rehearsal)."
    if not torch.cuda.is_available():
        return "There is nothing to measure: PyTorch finds no CUDA device on this machine (--rehearsal)."
    if not torch.distributed.is_nccl_available():
        return "There is nothing to compare with: this PyTorch is built without NCCL (--rehearsal)."
    return gpu_obstacle()


def _default_ranks(rehearsal: bool) -> tuple[int, ...]:
    return (1, 2 if rehearsal else max(2, _devices()))


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


def _run(options: argparse.Namespace) -> int:
    about = report.machine({})
    about["gpus"] = [] if options.rehearsal else gpus()
    rows: list[dict[str, Any]] = []
    trained: list[dict[str, Any]] = []
    copies: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    switching: dict[str, Any] = {}
    failures: list[str] = []
    started = time.monotonic()

    def save() -> None:  # after each part: who is stopped half way has the rest
        report.write_json(
            options.json,
            {
                "machine": about,
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "rehearsal": options.rehearsal,
                "rows": rows,
                "training": trained,
                "copy_bytes_per_second": copies,
                "packing": packed,
                "switch_point": switching,
                "failures": failures,
            },
        )

    for gpu in about["gpus"]:
        print(gpu)
    for ranks in options.np:
        with contextlib.ExitStack() as stack:
            worlds = _start(stack, ("horovod", "nccl", "group"), ranks, options, about, failures)
            if worlds and not copies:
                copies = _copy(worlds[0], options, failures)
                packed = _pack(worlds[0], options, failures)
                print(HEADER)
            for case in cases.cases(ranks, options.ops, options.sizes):
                taking_part = [world for world in worlds if case.is_gradient_set or world.library != "group"]
                row = measure(case, taking_part, options.budget)
                print(line(row), flush=True)
                rows.append({**row.to_json(), "host": host_figures(row)})
                failures.extend(row.refused.values())
                worlds = [world for world in worlds if world.library not in row.refused]
        save()
    if options.switch_point:
        switching = _switch_point(options, failures)
        save()
    if options.models:
        print(training.HEADER)
    for ranks in options.np if options.models else ():
        with contextlib.ExitStack() as stack:
            ways: dict[str, training.Way] = {}
            try:
                ways = training.start(stack, (*training.LIBRARIES,), ranks, _environment(options), about["versions"])
            except WorldError as error:
                failures.append(str(error))
                print(report.brief(str(error)))
            for model in options.models:
                trained.append(_train(model, ranks, ways, options, failures))
                ways = {name: way for name, way in ways.items() if name not in trained[-1]["refused"]}
                save()
    save()
    print(f"{time.monotonic() - started:.0f} s; all values checked; written to {options.json}")
    return 1 if failures else 0


def _start(
    stack: contextlib.ExitStack,
    libraries: Sequence[str],
    ranks: int,
    options: argparse.Namespace,
    about: dict[str, Any],
    failures: list[str],
) -> list[World]:
    """The worlds that came up; a line and a failure for each that did not."""
    worlds = []
    for library in libraries:
        layout = Layout((Host(),), ranks, environment=_environment(options))
        try:
            worlds.append(stack.enter_context(World(library, layout)))
            about["versions"][TITLES.get(library, library)] = worlds[-1].version
        except WorldError as error:
            failures.append(str(error))
            print(report.brief(str(error)))
    return worlds


def _environment(options: argparse.Namespace) -> dict[str, str]:
    environment = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    return environment | {"BENCHMARK_DEVICE": "cpu" if options.rehearsal else "cuda", "BENCHMARK_DTYPE": "bfloat16"}


# What a person may want to change for Horovod's ranks; World takes all other settings out of their environment.
_PASSED_ON = (
    "HOROVOD_CUDA_LIBRARY",
    "HOROVOD_NCCL_LIBRARY",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_ENABLE_ASYNC_COMPLETION",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_NVRTC_LIBRARY",
    "HOROVOD_GPU_OPERATIONS",
    "HOROVOD_GPU_PACK_THRESHOLD",
    "HOROVOD_GPU_PACK_COUNT",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
)


def _copy(world: World, options: argparse.Namespace, failures: list[str]) -> dict[str, float]:
    """Bytes a second of copies on rank 0, while the others do the same."""
    size, times = (MIB, 1) if options.rehearsal else (_COPY_BYTES, _COPIES)
    try:
        found: dict[str, float] = world.ask("copy", bytes=size, times=times)[0]
    except WorldError as error:
        failures.append(str(error))
        print(f"Copies are not reported: {report.brief(str(error))}")
        return {}
    rates = ", ".join(f"{report.rate_text(rate)} GB/s {what}" for what, rate in found.items())
    print(f"copies of {cases.size_text(size)}: {rates}", flush=True)
    return found


def _pack(world: World, options: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    """What the packing kernel of the engine does on rank 0, by the name of the set of tensors."""
    found: dict[str, Any] = {}
    print(packing.HEADER)
    for name, sizes in packing.sets(options.rehearsal).items():
        try:
            found[name] = world.ask("pack", sizes=sizes)[0]
        except WorldError as error:
            failures.append(str(error))
            print(f"{name} is not reported: {report.brief(str(error))}")
            break
        print(packing.line(name, found[name]), flush=True)
    for obstacle in {figures["obstacle"] for figures in found.values()} - {""}:
        print(obstacle)
        failures.extend([] if options.rehearsal else [obstacle])
    return found


def _switch_point(options: argparse.Namespace, failures: list[str]) -> dict[str, Any]:
    ranks = max(options.np)
    if ranks < 2:
        print("Where packing wins is not measured: a rank that is alone packs nothing (--np 2).")
        return {}
    if not options.rehearsal and ranks > _devices():
        print("Ranks share a GPU here: where packing wins for them says little of ranks with one each.")
    budget = _QUICK if options.quick else _SWITCH_POINT
    return switch_point.sweep(ranks, _environment(options), options.quick, budget, failures)


def _train(
    model: str, ranks: int, ways: dict[str, training.Way], options: argparse.Namespace, failures: list[str]
) -> dict[str, Any]:
    case = TrainingCase(model, ranks, tiny=options.rehearsal or options.quick, large=not options.quick)
    budget = _QUICK_TRAINING if options.rehearsal or options.quick else _TRAINING
    row, document = training.measure_training(case, ways, budget)
    print(training.line(case, row), flush=True)
    failures.extend(row.refused.values())
    return document


_COLUMNS = (
    ("np", 3), ("operation", 16), ("size", 24), ("horovod", 10), ("GB/s", 8), ("host", 9), ("NCCL", 10), ("x", 7),
    ("host x", 8), ("group", 10), ("x", 7), ("host", 9), ("ours", 10),
)  # fmt: skip
HEADER = "".join(f"{name:>{width}}" for name, width in _COLUMNS)


def line(row: Row) -> str:
    case, ours, group = row.case, row.figures.get("horovod"), row.figures.get("group")
    size = sum(case.elements) * FLOAT_BYTES * (case.ranks if case.operation == "allgather" else 1)
    host = host_figures(row)

    def seconds(figure: Figure | None) -> str:
        return report.time_text(figure.seconds if figure else None)

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

    beyond = host["beyond_group"]
    cells = [
        str(case.ranks),
        case.operation,
        case.label,
        seconds(ours),
        report.rate_text(size / ours.seconds if ours else 0.0),
        report.time_text(host["seconds"].get("horovod")),
        seconds(row.figures.get("nccl")),
        ratio(row.ratio("nccl")),
        ratio(host["times_shorter_than"].get("nccl")),
        seconds(group),
        ratio(row.ratio("group")),
        report.time_text(host["seconds"].get("group")),
        "-" if beyond is None else ("-" if beyond < 0 else "") + report.time_text(abs(beyond)),
    ]
    text = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
    return text + "".join(
        f"\n    {library} is not reported: {report.brief(why)}" for library, why in row.refused.items()
    )


def host_figures(row: Row) -> dict[str, Any]:
    """Seconds of the host in one call, by library; how many times as long others take; ours beyond the group call's."""
    rounds = {name: figure.host_rounds for name, figure in row.figures.items() if figure.host_rounds}
    ours = rounds.get("horovod", [])

    def over_rounds(name: str, both: Any) -> float | None:
        pairs = zip(ours, rounds.get(name, []), strict=False)
        found = [both(mine, theirs) for mine, theirs in pairs]
        return statistics.median(found) if found else None

    others = [name for name in rounds if name != "horovod"]
    return {
        "seconds": {name: statistics.median(each) for name, each in rounds.items()},
        "times_shorter_than": {name: over_rounds(name, lambda mine, theirs: theirs / mine) for name in others},
        "beyond_group": over_rounds("group", lambda mine, theirs: mine - theirs),
    }


def gpus() -> list[str]:
    """What each GPU is, as the driver's own tool tells it, or PyTorch where that is missing."""
    import torch

    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return [f"GPU {text}" for text in done.stdout.splitlines()]
    return [f"GPU {number}, {torch.cuda.get_device_name(number)}" for number in range(torch.cuda.device_count())]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures horovod, NCCL and DistributedDataParallel on GPUs.")
    parser.add_argument("--np", default="", help="numbers of ranks (default: 1 and the number of GPUs, at least 2)")
    parser.add_argument("--sizes", default="", help="message sizes such as 4,16K,1024M (default: 4 to 1024M)")
    parser.add_argument("--ops", help=f"default: {','.join(DEFAULT_OPERATIONS)}")
    parser.add_argument("--models", default=",".join(MODELS), help="to train; empty: none (default: %(default)s)")
    parser.add_argument("--no-switch-point", dest="switch_point", action="store_false", help="not where packing wins")
    parser.add_argument("--quick", action="store_true", help="few sizes, small models and short rounds")
    parser.add_argument("--rehearsal", action="store_true", help="all of it on the CPU, tiny, with Gloo for NCCL")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json", help="default: %(default)s")
    options = parser.parse_args(argv)
    try:
        options.np = tuple(_ranks(text) for text in options.np.split(",") if options.np)
        sizes = tuple(cases.parse_size(text) for text in options.sizes.split(",") if options.sizes)
    except ValueError as error:
        parser.error(str(error))
    options.quick = options.quick or options.rehearsal
    if options.ops is None:  # the transformer's gradients are 1.4 GB for each rank of each library
        options.ops = ",".join(DEFAULT_OPERATIONS[: 2 if options.rehearsal else None])
    options.sizes = sizes or (QUICK_SIZES[:2] if options.rehearsal else QUICK_SIZES if options.quick else SIZES)
    for what, known in (("ops", OPERATIONS), ("models", MODELS)):
        names = tuple(name for name in getattr(options, what).split(",") if name)
        for name in names:
            if name not in known:
                parser.error(f"--{what}: {name!r} is not known; there are {', '.join(known)}.")
        setattr(options, what, names)
    options.budget = _QUICK if options.quick else _FULL
    return options


def _ranks(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"--np: {text!r} is no number of ranks; expected 1 or more.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
