#!/usr/bin/env python3
"""How long an elastic job takes to train on when a rank is killed, and to take in a process that comes.

    python benchmarks/elastic.py                   20 kills each in jobs of 2, 3 and 4 ranks, some minutes
    python benchmarks/elastic.py --np 8 --kills 5 --transport tcp

Each job keeps its coordinator and its ranks, which take steps without a framework: an allreduce of 1 MB, then a commit.
Again and again one of them, by turns, gets SIGKILL. The time goes from just before kill(2) to the end of the next step
on the survivor that ends it last. Meanwhile another process, which has imported all that it needs, waits to be told to
call hvd.init(): it is taken in at a commit, and its time goes from there to the end of its first step.

The parts of a kill are those of the survivor that is last:

    news     until HorovodInternalError is raised
    leave    what is saved is restored, engine and session end
    join     hvd.init() until the coordinator has formed the next world: all survivors have left the old one
    connect  the rest of hvd.init(): connections and memory, the engine
    sync     the state is made equal on all ranks
    step     the first step

A newcomer waits until nobody else has come for HOROVOD_ELASTIC_SETTLE_SECONDS, and for the members' next commit
("join"). Exit codes: 0, or 1 when a rank said nothing for a minute, or what it summed up is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.failover import FailoverError, Rank

TRANSPORTS = ("auto", "shm", "tcp")
SECONDS = 60.0
ELEMENTS = 1 << 18
# The moments that a rank notes, each with the part of a world's beginning that it ends.
LOSS_PARTS = ("news", "leave", "join", "connect", "sync", "step")
NEWCOMER_PARTS = ("join", "connect", "sync", "step")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.rank_of_job:
        return _rank()
    load = os.getloadavg()[0]
    if load > 0.7:
        print(f"The load is {load:.1f}: other programs disturb these figures.")
    print(f"{options.kills} kills in each job, {options.settle:g} s to settle; milliseconds\n")
    rows: list[dict[str, Any]] = []
    problem = ""
    for size in map(int, options.np.split(",")):
        try:
            losses, newcomers = _job(options, size)
        except FailoverError as error:
            problem = f"{size} ranks: {error}"
            break
        for event, parts, times in (("lost", LOSS_PARTS, losses), ("newcomer", NEWCOMER_PARTS, newcomers)):
            if not rows:
                print(f"{'np':>3}  {'event':<9}{'median':>8}{'worst':>8}   medians:{_columns(LOSS_PARTS)}")
            totals = [sum(one.values()) for one in times]
            medians = {part: statistics.median(one[part] for one in times) for part in parts}
            rows.append({"np": size, "event": event, "seconds": totals, "parts": times})
            shown = _columns(f"{medians[part] * 1000:.1f}" if part in medians else "-" for part in LOSS_PARTS)
            median, worst = statistics.median(totals) * 1000, max(totals) * 1000
            print(f"{size:>3}  {event:<9}{median:>8.1f}{worst:>8.1f}           {shown}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"load_at_start": load, "rows": rows, "problem": problem}, file, indent=1)
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


def _columns(texts: Any) -> str:
    return "".join(f"{text:>9}" for text in texts)


def _job(options: argparse.Namespace, size: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Kills ranks of one job, one after the other: for each the parts of the time, and those of its successor."""
    from horovod.coordinator.server import EmbeddedCoordinator

    losses, newcomers = [], []
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(EmbeddedCoordinator())
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        environment |= {
            "HOROVOD_COORDINATOR": coordinator.address,
            "HOROVOD_SIZE": str(size),
            "HOROVOD_MIN_SIZE": "1",
            "HOROVOD_MAX_SIZE": str(size),
            "HOROVOD_ELASTIC_SETTLE_SECONDS": str(options.settle),
            "HOROVOD_TRANSPORT": options.transport,
            "HOROVOD_LOG_LEVEL": "error",
            "OMP_NUM_THREADS": "1",
        }

        def started() -> Member:
            member = Member([sys.executable, __file__, "--rank-of-job"], environment)
            stack.callback(member.end)
            return member

        members = [started() for _ in range(size)]
        for member in members:
            member.await_start()
        for member in members:
            member.begin()
        for member in members:
            member.world(size)
        for kill in range(options.kills):
            newcomer = started()
            newcomer.await_start()
            victim = members.pop(kill % size)
            killed = time.monotonic()
            os.kill(victim.process.pid, signal.SIGKILL)
            last = max((member.world(size - 1) for member in members), key=lambda world: world["step"])
            losses.append(_parts(killed, last, LOSS_PARTS))
            newcomer.begin()
            world = newcomer.world(size)
            newcomers.append(_parts(world["init"], world, NEWCOMER_PARTS))
            for member in members:
                member.world(size)
            members.append(newcomer)
            victim.end()
    return losses, newcomers


def _parts(start: float, moments: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    ends = [start, *(moments[name] for name in names)]
    return {name: end - begin for name, begin, end in zip(names, ends, ends[1:], strict=False)}


class Member(Rank):
    """A process of the job, which has imported what it needs and waits to be told to join."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(command, environment, subprocess.PIPE)

    def await_start(self) -> None:
        if self.next(SECONDS) is None:
            raise FailoverError("a process did not start")

    def begin(self) -> None:
        """Tells it to join."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def world(self, size: int) -> dict[str, float]:
        """The moments of its next world with so many ranks, when its first step there has ended."""
        while (said := self.next(SECONDS)) is not None:
            if said["size"] == size:
                return said
        raise FailoverError(f"a process (pid {self.process.pid}) has ended")


def _rank() -> int:
    """One rank: steps and commits until it is killed. The clock is the same in all processes of a host."""
    import numpy as np

    import horovod.worker.runtime.session  # noqa: F401 (what hvd.init() imports is no part of its time)
    from horovod._core import DType, OpSpec, OpType
    from horovod.common import basics as hvd
    from horovod.common.elastic import ObjectState, run_fn
    from horovod.common.exceptions import HorovodInternalError
    from horovod.common.ops import objects
    from horovod.common.process_sets import global_process_set
    from horovod.worker.runtime import formation
    from horovod.worker.runtime.context import current

    moments: dict[str, float] = {}

    def note_before(module: Any, function: str, moment: str) -> None:
        original = getattr(module, function)

        def noting(*arguments: Any, **options: Any) -> Any:
            moments[moment] = time.monotonic()
            return original(*arguments, **options)

        setattr(module, function, noting)

    note_before(hvd, "init", "leave")  # as join_again() calls it
    note_before(formation, "choose_transport", "join")

    class Weights(ObjectState):
        weights: np.ndarray

        def reset(self) -> None:
            moments["connect"] = time.monotonic()

        def sync(self) -> None:
            self._choose_source(lambda mine, name: objects.allgather_object(mine, name, global_process_set))
            super().sync()

    def broadcast_object(value: Any, root_rank: int = 0) -> Any:
        return objects.broadcast_object(value, root_rank, None, global_process_set)

    def train(state: Weights) -> None:
        moments["sync"] = time.monotonic()
        engine, size = current().engine, hvd.size()
        gradient = np.empty(ELEMENTS, np.float32)
        tensor = (gradient.ctypes.data, gradient.ctypes.data, DType.FLOAT32, gradient.shape)
        try:
            for step in itertools.count():
                gradient.fill(1)
                engine.submit(OpSpec(OpType.ALLREDUCE), "allreduce.gradient", [tensor], wait_follows=True).result()
                if not (gradient == size).all():
                    raise SystemExit(f"The sum of {size} ones is not {gradient.min()} to {gradient.max()}.")
                state.weights -= gradient / size
                if step == 0:
                    print(json.dumps({**moments, "step": time.monotonic(), "size": size}), flush=True)
                state.commit()
        except HorovodInternalError:
            moments["news"] = time.monotonic()
            raise

    print(json.dumps("ready"), flush=True)
    sys.stdin.read()
    begin = time.monotonic()
    hvd.init()
    moments |= {"init": begin, "connect": time.monotonic()}
    state = Weights(broadcast_object, hvd.rank, weights=np.zeros(ELEMENTS, np.float32))
    run_fn(train, hvd.join_again)(state)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How long an elastic job takes over a rank that is lost or comes.")
    parser.add_argument("--np", default="2,3,4", help="ranks of each job (default 2,3,4)")
    parser.add_argument("--kills", type=int, default=20, help="in each job (default 20)")
    parser.add_argument("--settle", type=float, default=0.1, help="HOROVOD_ELASTIC_SETTLE_SECONDS (default 0.1)")
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS, help="default auto: shared memory")
    parser.add_argument("--json", help="also write every time to this file")
    parser.add_argument("--rank-of-job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if any(not size.isdecimal() or int(size) < 2 for size in options.np.split(",")):
        parser.error(f"--np: {options.np!r} are not numbers of ranks, each at least 2.")
    return options


if __name__ == "__main__":
    sys.exit(main())
