#!/usr/bin/env python3
"""How long survivors take to raise when a rank is killed: SIGKILL in the middle of training steps, by transport.

    python benchmarks/failover.py                  3 ranks, 10 deaths for each row, under a minute on a quiet machine
    python benchmarks/failover.py --np 4 --repeats 20
    python benchmarks/failover.py --transports gpu
                                                   the tensors are on GPUs and travel by NCCL; ranks may share a GPU
    python benchmarks/failover.py --transports gpu --gpu-libraries build/*/native/libstandin_{cuda,nccl}.so
                                                   where no GPU is: the libraries that tests have in place of CUDA's

Every death has a world of its own, formed with hvd.init() and an embedded coordinator. The time goes from just before
kill(2) to HorovodInternalError in the survivor that raises last. "victim gone" is when the kernel had taken the killed
process apart, which can take long on a busy machine and which no survivor can see earlier. On a GPU each step
ends with a wait for the device, as reading a loss does. Exit codes: 0, or 1 when a survivor did not raise, did not name
the right rank, or took longer than --limit seconds, 2 where GPUs are asked for and there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GPU = "gpu"
TRANSPORTS = ("shm", "tcp", GPU)
STEPS_BEFORE = 5
START_SECONDS = 60.0
RAISE_SECONDS = 60.0
# What the ranks do when it happens: bytes of each operation, and whether the victim takes part or never arrives.
SITUATIONS = {
    "small operations": (4 << 10, False),
    "large operations": (32 << 20, False),
    "the others wait for it": (4 << 10, True),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.rank_of is not None:
        return _rank(options.bytes, options.absent, options.gpu)
    transports = options.transports.split(",")
    if GPU in transports and (missing := _without_gpu(options.gpu_libraries)):
        print(f"No tensors can be on a GPU here: {missing}.", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    if load > 0.7:
        print(f"The load is {load:.1f}: other programs disturb these figures.")
    print(
        f"{options.np} ranks, {options.repeats} deaths each; seconds from SIGKILL until the last survivor has raised\n"
    )
    print(f"{'transport':<10} {'situation':<24} {'median':>8} {'max':>8}   {'victim gone: median':>20} {'max':>8}")
    problems: list[str] = []
    rows: list[dict[str, Any]] = []
    for transport in transports:
        for situation, (size, absent) in SITUATIONS.items():
            deaths: list[tuple[float, float]] = []
            for repeat in range(options.repeats):
                try:
                    deaths.append(_death(options, transport, size, absent, random.Random(repeat)))
                except FailoverError as error:
                    problems.append(f"{transport}, {situation}: {error}")
            if not deaths:
                continue
            times, gone = zip(*deaths, strict=True)
            rows.append({"transport": transport, "situation": situation, "seconds": times, "victim_gone": gone})
            line = f"{transport:<10} {situation:<24} {statistics.median(times):>8.3f} {max(times):>8.3f}"
            print(f"{line}   {statistics.median(gone):>20.3f} {max(gone):>8.3f}", flush=True)
            if max(times) > options.limit:
                problems.append(f"{transport}, {situation}: {max(times):.3f} s is over the limit of {options.limit} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"np": options.np, "load_at_start": load, "rows": rows, "problems": problems}, file, indent=1)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


class FailoverError(Exception):
    pass


def _death(
    options: argparse.Namespace, transport: str, size_bytes: int, absent: bool, chance: random.Random
) -> tuple[float, float]:
    """Kills one rank of a new world; seconds until all others have raised, and until the victim was gone."""
    from horovod.coordinator.server import EmbeddedCoordinator

    size: int = options.np
    victim = chance.randrange(size)
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(EmbeddedCoordinator())
        ranks = []
        for rank in range(size):
            environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
            environment |= {
                "HOROVOD_COORDINATOR": coordinator.address,
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": str(size),
                "HOROVOD_TRANSPORT": "auto" if transport == GPU else transport,
                "OMP_NUM_THREADS": "1",
                **(_libraries(options.gpu_libraries) if transport == GPU else {}),
            }
            command = [sys.executable, __file__, "--rank-of", str(size), "--bytes", str(size_bytes)]
            if absent and rank == victim:
                command.append("--absent")
            if transport == GPU:
                command.append("--gpu")
            ranks.append(Rank(command, environment))
            stack.callback(ranks[-1].end)
        for rank in ranks:
            if rank.next(START_SECONDS) != {"steps": STEPS_BEFORE}:
                raise FailoverError("the world did not start")
        if absent:  # the others are to be asleep by now, in a step that the victim never begins
            time.sleep(0.2)
        for _ in range(chance.randrange(300_000)):  # somewhere in a step
            pass
        killed = time.monotonic()
        os.kill(ranks[victim].process.pid, signal.SIGKILL)
        gone = ranks[victim].gone_at()
        raised = 0.0
        for number, rank in enumerate(ranks):
            if number == victim:
                continue
            said = rank.next(RAISE_SECONDS)
            if said is None or "raised" not in said:
                raise FailoverError(f"rank {number} did not raise HorovodInternalError: {said}")
            if f"ank {victim} (pid {ranks[victim].process.pid})" not in said["sentence"]:
                raise FailoverError(f"rank {number} does not name rank {victim}: {said['sentence']}")
            raised = max(raised, said["raised"])
    return raised - killed, gone.result() - killed


class Rank:
    """A process whose lines are read by a thread."""

    def __init__(self, command: list[str], environment: dict[str, str], stdin: int | None = None) -> None:
        self.process = subprocess.Popen(command, env=environment, stdin=stdin, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("null")

    def next(self, seconds: float) -> dict[str, Any] | None:
        try:
            said: dict[str, Any] | None = json.loads(self._lines.get(timeout=seconds))
        except queue.Empty:
            raise FailoverError(f"a rank has said nothing for {seconds:.0f} s") from None
        return said

    def gone_at(self) -> Future[float]:
        """The time at which the process has ended; a thread waits for it."""
        future: Future[float] = Future()

        def wait() -> None:
            self.process.wait()
            future.set_result(time.monotonic())

        threading.Thread(target=wait).start()
        return future

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _without_gpu(files: str) -> str:
    """Why GPU tensors can't be had; empty: they can."""
    from horovod.worker.agent.cores_and_gpus import count_gpus
    from horovod.worker.runtime.devices import gpu_obstacle

    os.environ.update(_libraries(files))  # which is where gpu_obstacle looks
    count, where = count_gpus(os.environ)
    return gpu_obstacle().rstrip(".") if count else where


def _libraries(files: str) -> dict[str, str]:
    """--gpu-libraries as settings."""
    names = ("HOROVOD_CUDA_LIBRARY", "HOROVOD_NCCL_LIBRARY")
    given = (
        [str(Path(file).resolve()) for file in files.split(",")]
        if files
        else [os.environ.get(name, "") for name in names]
    )
    return dict(zip(names, given, strict=True))


def _rank(size_bytes: int, absent: bool, on_gpu: bool) -> int:
    """One rank: steps until something happens, without a framework, whose import would take longer than all the rest.

    The clock is the same in all processes of a host.
    """
    import numpy as np

    from benchmarks.device import Device
    from horovod._core import DType, OpSpec, OpType
    from horovod.common import basics as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.worker.runtime.context import current

    hvd.init()
    engine = current().engine
    tensor: tuple[Any, ...]
    if on_gpu:
        device = Device(hvd.rank(), hvd.size())
        address = device.zeros(size_bytes)
        tensor = (address, address, DType.FLOAT32, (size_bytes // 4,), device.ordinal, device.stream)
    else:
        gradient = np.zeros(size_bytes // 4, np.float32)
        tensor = (gradient.ctypes.data, gradient.ctypes.data, DType.FLOAT32, gradient.shape)
    step = 0
    try:
        spec = OpSpec(OpType.ALLREDUCE)
        while True:
            handle = engine.submit(spec, "allreduce.gradient", [tensor], wait_follows=True)
            if on_gpu:
                handle.result(device.stream)
                device.synchronize()
            else:
                handle.result()
            step += 1
            if step == STEPS_BEFORE:
                print(json.dumps({"steps": step}), flush=True)
                if absent:
                    signal.pause()
    except HorovodInternalError as error:
        print(json.dumps({"raised": time.monotonic(), "sentence": str(error)}), flush=True)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How long survivors take to raise when a rank is killed.")
    parser.add_argument("--np", type=int, default=3, help="ranks (default 3)")
    parser.add_argument("--repeats", type=int, default=10, help="deaths for each row (default 10)")
    parser.add_argument("--transports", default="shm,tcp", help="of shm, tcp and gpu (default shm,tcp)")
    parser.add_argument("--gpu-libraries", default="", metavar="CUDA,NCCL", help="files (default: the system's)")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds that a survivor may take (default 1)")
    parser.add_argument("--json", help="also write every time to this file")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=4, help=argparse.SUPPRESS)
    parser.add_argument("--absent", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for transport in options.transports.split(","):
        if transport not in TRANSPORTS:
            parser.error(f"{transport!r} is no transport; there are {', '.join(TRANSPORTS)}.")
    if options.gpu_libraries and options.gpu_libraries.count(",") != 1:
        parser.error(f"--gpu-libraries: {options.gpu_libraries!r} are not two files, the driver's and NCCL's.")
    return options


if __name__ == "__main__":
    sys.exit(main())
