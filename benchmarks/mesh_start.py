#!/usr/bin/env python3
"""What the data plane's connections cost as a world grows: descriptors and memory of each rank, and the time to start.

    python benchmarks/mesh_start.py                  8, 16, 32 and 64 ranks on this host, over TCP
    python benchmarks/mesh_start.py --full-mesh-members 1      the same with connections to partners only
    python benchmarks/mesh_start.py --allreduce 1K,4M          and how long operations take then
    python benchmarks/mesh_start.py --ranks 64 --transport shm

Ranks are processes that fork from one which has imported everything, so a start is joining and connecting and nothing
else; the coordinator is a process of its own. All share this machine's processors. An allreduce is checked in each.

  sockets   of the data plane, open in each rank (the greatest)
  joined    until the last rank has its world, its connections and its engine
  reduced   until the last rank has the sum of a first allreduce
  memory    resident, of a rank (the greatest), beyond what the process it forked from had
  1K, ...   an allreduce of so many bytes, 21 one after the other: the median of rank 0
"""

from __future__ import annotations

import argparse
import os
import stat
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cases import parse_size

if TYPE_CHECKING:
    from horovod._core import Engine

LIMIT_SECONDS = 120.0
OPERATIONS = 21


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Descriptors and start times of worlds over TCP.")
    parser.add_argument("--ranks", default="8,16,32,64", help="default: %(default)s")
    parser.add_argument("--transport", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--full-mesh-members", type=int, help="as HOROVOD_FULL_MESH_MEMBERS")
    parser.add_argument("--allreduce", default="", metavar="SIZES", help="such as 1K,4M; default: none")
    options = parser.parse_args(argv)
    sizes = [size for size in options.allreduce.split(",") if size]
    settings = {"transport": options.transport}
    if options.full_mesh_members is not None:
        settings["full_mesh_members"] = options.full_mesh_members
    print(
        f"{'ranks':>6} {'sockets':>8} {'joined':>8} {'reduced':>8} {'memory':>9}" + "".join(f"{s:>11}" for s in sizes)
    )
    for count in map(int, options.ranks.split(",")):
        start, medians_s = measure(count, settings, [parse_size(size) for size in sizes])
        operations = "".join(f"{1000 * median_s:>8.2f} ms" for median_s in medians_s)
        print(
            f"{count:>6} {start.sockets:>8} {start.joined_s:>7.2f}s {start.reduced_s:>7.2f}s {start.memory_mb:>6.1f} MB"
            f"{operations}",
            flush=True,
        )
    return 0


@dataclass(frozen=True)
class Start:
    sockets: int
    joined_s: float
    reduced_s: float
    memory_mb: float


def measure(count: int, settings: dict[str, Any], sizes: Sequence[int] = ()) -> tuple[Start, list[float]]:
    """How a world of `count` ranks starts, and the seconds of an allreduce of each of `sizes` bytes."""
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", "--insecure"]
    coordinator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    context = get_context("fork")
    pipes, processes = [], []
    try:
        assert coordinator.stdout is not None
        address = coordinator.stdout.readline().split()[-1]
        import horovod.worker.runtime.epoch
        import horovod.worker.runtime.session  # noqa: F401 - what is imported here need not be by each rank

        began = time.monotonic()
        for rank in range(count):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_rank, args=(address, rank, count, settings, sizes, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        answers = []
        for pipe in pipes:
            if not pipe.poll(max(0.0, began + LIMIT_SECONDS - time.monotonic())):
                raise TimeoutError(f"{count} ranks had not started after {LIMIT_SECONDS:g} s.")
            answers.append(pipe.recv())
        medians_s = answers[0][4]
        for pipe in pipes:
            pipe.send("over")
        for process in processes:
            process.join(20)
        sockets, joined, reduced, memory, _ = zip(*answers, strict=True)
        return Start(max(sockets), max(joined) - began, max(reduced) - began, max(memory)), medians_s
    finally:
        for process in processes:
            process.kill()
            process.join()
        coordinator.terminate()
        coordinator.wait()


def _rank(address: str, rank: int, size: int, settings: dict[str, Any], sizes: Sequence[int], pipe: Connection) -> None:
    from horovod._core import DType, OpSpec, OpType
    from horovod.base.settings import resolve
    from horovod.worker.runtime.epoch import begin, end

    before_kb = _resident_kb()
    explicit = {"coordinator": address, "size": size, "rank": rank, "start_timeout_seconds": LIMIT_SECONDS}
    explicit |= {"network_interfaces": "lo", **settings}
    context = begin(resolve({}, explicit))
    joined = time.monotonic()
    data = array("f", [float(rank)])
    pointer = data.buffer_info()[0]
    spans = [(pointer, pointer, DType.FLOAT32, (1,))]
    context.engine.submit(OpSpec(OpType.ALLREDUCE), "allreduce.first", spans).result()
    reduced = time.monotonic()
    assert data[0] in (size * (size - 1) / 2, (size - 1) / 2), data
    sockets = sum(_inode(name) in context.socket_inodes for name in os.listdir("/proc/self/fd"))
    memory_mb = (_resident_kb() - before_kb) / 1024
    pipe.send((sockets, joined, reduced, memory_mb, [_median_s(context.engine, size_bytes) for size_bytes in sizes]))
    pipe.recv()
    end(context)


def _median_s(engine: Engine, size_bytes: int) -> float:
    from horovod._core import DType, OpSpec, OpType

    data = array("f", bytes(max(size_bytes, 4)))
    pointer = data.buffer_info()[0]
    seconds = []
    for _ in range(OPERATIONS + 2):  # the first two find their id and their memory
        began = time.perf_counter()
        tensor = (pointer, pointer, DType.FLOAT32, (len(data),))
        engine.submit(OpSpec(OpType.ALLREDUCE), f"allreduce.{size_bytes}", [tensor], wait_follows=True).result()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def _inode(name: str) -> int:
    try:
        found = os.fstat(int(name))
    except OSError:
        return 0
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0


def _resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


if __name__ == "__main__":
    sys.exit(main())
