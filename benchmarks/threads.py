#!/usr/bin/env python3
"""Trains ResNet-18 by horovodrun with as many threads as PyTorch takes by itself, and with those that horovodrun gives.

    python benchmarks/threads.py             2 ranks, on images of 224 x 224: three minutes
    python benchmarks/threads.py --quick     a narrow network and small images: does it work? The figures mean nothing

The two are jobs of their own, since a process learns at its start how many threads it has, and take turns. "PyTorch's"
is `horovodrun --no-set-num-threads`, "horovodrun's" is without that flag; OMP_NUM_THREADS and MKL_NUM_THREADS, which
would decide for both, are taken out of the environment.

images/s      of all ranks together: the median of the rounds. Steps are timed from a barrier to a barrier, after one
              that is not; then the parameters must be finite and the same on all ranks.
times as many the median over the rounds, each compared with itself.

Exit codes: 0, or 1 when a job failed, 2 for a command line that makes no sense.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report

RESULTS: Final = Path(__file__).resolve().parent / "results"
WAYS: Final = {"PyTorch's": ["--no-set-num-threads"], "horovodrun's": []}
_DEADLINE_S: Final = 600  # of one job
_FULL: Final = {"width": 64, "side": 224, "batch": 4, "steps": 6}
_QUICK: Final = {"width": 8, "side": 32, "batch": 1, "steps": 2}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.rank is not None:
        _train(json.loads(options.rank))
        return 0
    return report.until_interrupted(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    report.tell_load()
    about = report.machine({})
    case = _QUICK if options.quick else _FULL
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    failures: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="horovod-threads-") as folder:
        for number in range(options.rounds):
            names = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
            for name in names:
                try:
                    found[name].append(_job(options.np, WAYS[name], {**case, "file": f"{folder}/{number}"}))
                except RuntimeError as error:
                    failures.append(f"With {name} threads: {error}")
            if failures:
                break
    if failures:
        print(report.brief(failures[0]), file=sys.stderr)
    else:
        print(f"ResNet-18, {options.np} ranks on {about['cores']} processors")
        print(f"{'threads':>14}{'of a rank':>11}{'images/s':>10}")
        for name, rounds in found.items():
            print(f"{name:>14}{rounds[0]['threads']:>11}{statistics.median(_rates(rounds)):>10.1f}")
        print(f"{statistics.median(_ratios(found)):.2f} times as many with those of horovodrun.")
    document = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "case": case,
        "ranks": options.np,
        "rounds": found,
        "failures": failures,
    }
    report.write_json(options.json, document)
    print(f"{time.monotonic() - started:.0f} s; parameters compared; written to {options.json}")
    return 1 if failures else 0


def _rates(rounds: Sequence[dict[str, Any]]) -> list[float]:
    return [one["images_per_second"] for one in rounds]


def _ratios(found: dict[str, list[dict[str, Any]]]) -> list[float]:
    before, after = (_rates(rounds) for rounds in found.values())
    return [ours / theirs for theirs, ours in zip(before, after, strict=True)]


def _job(ranks: int, flags: Sequence[str], case: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of a job has found. RuntimeError when the job fails."""
    decided = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HOROVOD_SET_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in decided}
    program = [sys.executable, str(Path(__file__).resolve()), "--rank", json.dumps(case)]
    launcher = [sys.executable, "-m", "horovod.launch", "-np", str(ranks), *flags, *program]
    try:
        done = subprocess.run(
            launcher, check=False, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the job did not end within {_DEADLINE_S} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"horovodrun ended with {done.returncode}: {done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(Path(case["file"]).read_text())
    return result


def _train(case: dict[str, Any]) -> None:
    """A rank: some steps on random images."""
    import torch
    from torch import nn

    import horovod.torch as hvd
    from benchmarks.models import ResNet18

    hvd.init()
    torch.manual_seed(0)
    model = ResNet18(case["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    torch.manual_seed(1 + hvd.rank())
    images = torch.randn(case["batch"], 3, case["side"], case["side"])
    labels = torch.randint(1000, (case["batch"],))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    hvd.barrier()
    start = time.perf_counter()
    for _ in range(case["steps"]):
        step()
    hvd.barrier()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        parameters = torch.cat([parameter.flatten() for parameter in model.parameters()])
    if not bool(parameters.isfinite().all()):
        raise ValueError(f"Rank {hvd.rank()} has trained parameters that are not finite.")
    if len(set(hvd.allgather_object(hashlib.sha256(parameters.numpy().tobytes()).hexdigest()))) > 1:
        raise ValueError("The ranks have trained different parameters.")
    if hvd.rank() == 0:
        found = {
            "threads": torch.get_num_threads(),
            "images_per_second": case["steps"] * case["batch"] * hvd.size() / seconds,
        }
        Path(case["file"]).write_text(json.dumps(found))
    hvd.shutdown()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains ResNet-18 with PyTorch's threads and with horovodrun's.")
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a narrow network, small images and one round")
    parser.add_argument("--json", type=Path, default=RESULTS / "threads.json", help="default: %(default)s")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("np", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: {getattr(options, name)} is less than 1.")
    if options.quick:
        options.rounds = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
