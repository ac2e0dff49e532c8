#!/usr/bin/env python3
"""What the data plane's connections cost as a world grows: descriptors and memory of each rank, and the time to start.

    python benchmarks/mesh_start.py                  8, 16, 32 and 64 ranks on this host, over TCP
    python benchmarks/mesh_start.py --full-mesh-members 1      the same with connections to partners only
    python benchmarks/mesh_start.py --ranks 64 --transport shm

Ranks are processes that fork from one which has imported everything, so a start is joining and connecting and nothing
else; the coordinator is a process of its own. All share this machine's processors. An allreduce is checked in each.

  sockets   of the data plane, open in each rank (the greatest)
  joined    until the last rank has its world, its connections and its engine
  reduced   until the last rank has the sum of a first allreduce
  memory    resident, of a rank (the greatest), beyond what the process it forked from had
"""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Descriptors and start times of worlds over TCP.")
    parser.add_argument("--ranks", default="8,16,32,64", help="default: %(default)s")
    parser.add_argument("--transport", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--full-mesh-members", type=int, help="as HOROVOD_FULL_MESH_MEMBERS")
    options = parser.parse_args(argv)
    settings = {"transport": options.transport}
    if options.full_mesh_members is not None:
        settings["full_mesh_members"] = options.full_mesh_members
    print(f"{'ranks':>6} {'sockets':>8} {'joined':>8} {'reduced':>8} {'memory':>9}")
    for count in map(int, options.ranks.split(",")):
        sockets, joined_s, reduced_s, memory_mb = measure(count, settings)
        print(f"{count:>6} {sockets:>8} {joined_s:>7.2f}s {reduced_s:>7.2f}s {memory_mb:>6.1f} MB", flush=True)
    return 0


def measure(count: int, settings: dict[str, Any]) -> tuple[int, float, float, float]:
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", "--insecure"]
    coordinator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    context = get_context("fork")
    pipes, processes = [], []
    try:
        assert coordinator.stdout is not None
        address = coordinator.stdout.readline().split()[-1]
        import horovod.worker.runtime.formation
        import horovod.worker.runtime.session  # noqa: F401 - what is imported here need not be by each rank

        began = time.monotonic()
        for rank in range(count):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_rank, args=(address, rank, count, settings, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        answers = []
        for pipe in pipes:
            if not pipe.poll(max(0.0, began + LIMIT_SECONDS - time.monotonic())):
                raise TimeoutError(f"{count} ranks had not started after {LIMIT_SECONDS:g} s.")
            answers.append(pipe.recv())
        for pipe in pipes:
            pipe.send("over")
        for process in processes:
            process.join(20)
        sockets, joined, reduced, memory = zip(*answers, strict=True)
        return max(sockets), max(joined) - began, max(reduced) - began, max(memory)
    finally:
        for process in processes:
            process.kill()
            process.join()
        coordinator.terminate()
        coordinator.wait()


def _rank(address: str, rank: int, size: int, settings: dict[str, Any], pipe: Connection) -> None:
    from horovod._core import DType, OpSpec, OpType
    from horovod.worker.runtime.formation import form
    from horovod.worker.settings import resolve

    before_kb = _resident_kb()
    explicit = {"coordinator": address, "size": size, "rank": rank, "start_timeout_seconds": LIMIT_SECONDS}
    explicit |= {"network_interfaces": "lo", **settings}
    context = form(resolve({}, explicit))
    joined = time.monotonic()
    data = array("f", [float(rank)])
    pointer = data.buffer_info()[0]
    spans = [(pointer, pointer, DType.FLOAT32, (1,))]
    context.engine.submit(OpSpec(OpType.ALLREDUCE), "allreduce.first", spans).result()
    reduced = time.monotonic()
    assert data[0] in (size * (size - 1) / 2, (size - 1) / 2), data
    sockets = sum(_inode(name) in context.socket_inodes for name in os.listdir("/proc/self/fd"))
    pipe.send((sockets, joined, reduced, (_resident_kb() - before_kb) / 1024))
    pipe.recv()
    context.close()


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
