"""A rank: joins its library's world, says so to the harness, and then does as told until the harness hangs up.

While it waits for the next request it blocks in a read, so a library that is not being measured takes no CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

import torch

from benchmarks import values
from benchmarks.cases import Case
from benchmarks.peers import Bound, Peer, join
from benchmarks.placement import finish, place


class Rank:
    def __init__(self, peer: Peer, device: torch.device) -> None:
        self._peer = peer
        self._device = device
        self._case: Case | None = None
        self._inputs: list[torch.Tensor] = []
        self._bound: Bound | None = None

    def prepare(self, **case: Any) -> dict[str, Any]:
        self._case = Case(**case)
        self._inputs = [torch.empty(count, device=self._device) for count in self._case.elements]
        values.fill(self._case, self._peer.rank, self._inputs)
        self._bound = self._peer.bind(self._case, self._inputs)
        return {}

    def drop(self) -> dict[str, Any]:
        self._case = self._bound = None
        self._inputs = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the next library measures with tensors of the same size
        return {}

    def run(self, blocks: int, calls: int) -> dict[str, Any]:
        """Blocks of back-to-back calls. Inputs are made anew before each and all values checked after it.

        A block ends when the device has done it all; what the calls themselves took is its host time.
        """
        assert self._case is not None
        assert self._bound is not None
        case, call, barrier = self._case, self._bound.call, self._peer.barrier
        seconds, host_seconds, barriers, checked = [], [], [], 0
        rest = range(calls - 1)
        for block in range(blocks):
            values.fill(case, self._peer.rank, self._inputs)
            for output in self._bound.outputs:
                output.fill_(values.UNSET)
            finish(self._device)
            barrier()
            start = time.perf_counter_ns()
            for _ in rest:
                call()
            last = call()
            host_seconds.append((time.perf_counter_ns() - start) * 1e-9)
            finish(self._device)
            seconds.append((time.perf_counter_ns() - start) * 1e-9)
            # Who has its result would go on and check it, on a processor that a rank may still need for its last call.
            barrier()
            results = self._bound.results
            if results is None:
                assert isinstance(last, torch.Tensor)
                results = [last]
            checked += values.check(case, self._peer.rank, calls, results)
            del last, results
            if case.operation == "barrier":
                barriers.append(self._late_barrier(late=block % case.ranks))
        return {"seconds": seconds, "host_seconds": host_seconds, "checked": checked, "barriers": barriers}

    def copy(self, bytes: int, times: int) -> dict[str, Any]:  # noqa: A002
        """Bytes a second of copies on the device, to the host and back, between tensors of `bytes`."""
        here = torch.arange(bytes // 4, dtype=torch.int32, device=self._device)
        there = torch.zeros_like(here)
        on_host = torch.zeros(here.shape, dtype=here.dtype, pin_memory=self._device.type == "cuda")
        found: dict[str, Any] = {}
        for what, target, source in (("on the device", there, here), ("to the host", on_host, here)):
            found[what] = self._rate_of_copy(target, source, times)
            if not torch.equal(target.cpu(), here.cpu()):
                raise values.WrongValuesError(f"a copy {what} differs from what was copied")
        there.zero_()
        found["from the host"] = self._rate_of_copy(there, on_host, times)
        if not torch.equal(there, here):
            raise values.WrongValuesError("a copy from the host differs from what was copied")
        return found

    def pack(self, sizes: list[int]) -> dict[str, Any]:
        """What rank 0's device does with tensors of so many bytes, while the others rest (benchmarks/packing.py)."""
        if self._peer.rank != 0:
            return {}
        from benchmarks import packing
        from horovod.worker.runtime.devices import cuda_file, nvrtc_file

        return packing.figures(self._device, {"cuda_file": cuda_file(), "nvrtc_file": nvrtc_file()}, sizes)

    def _rate_of_copy(self, target: torch.Tensor, source: torch.Tensor, times: int) -> float:
        target.copy_(source, non_blocking=True)
        finish(self._device)
        start = time.perf_counter_ns()
        for _ in range(times):
            target.copy_(source, non_blocking=True)
        finish(self._device)
        return source.nbytes * times / ((time.perf_counter_ns() - start) * 1e-9)

    def _late_barrier(self, late: int) -> tuple[int, int]:
        """When this rank entered and left a barrier that `late` came late to, by a clock that all ranks share."""
        if self._peer.rank == late:
            time.sleep(0.001)
        entered = time.monotonic_ns()
        self._peer.barrier()
        return entered, time.monotonic_ns()

    def straggle(self, seconds: float) -> dict[str, Any]:
        """One barrier to which the last rank is late by `seconds`: what does waiting for it cost?"""
        self._peer.barrier()
        if self._peer.rank == self._size() - 1:
            time.sleep(seconds)
        started = time.process_time()
        self._peer.barrier()
        return {"cpu_seconds": time.process_time() - started}

    def _size(self) -> int:
        return int(os.environ["BENCHMARK_SIZE"])


def serve(connection: Connection, rank: Rank) -> None:
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply = getattr(rank, request.pop("do"))(**request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        connection.send_bytes(json.dumps(reply).encode())


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    connection = Client(os.environ["BENCHMARK_SOCKET"], "AF_UNIX")
    size = int(os.environ["BENCHMARK_SIZE"])
    device = place(size)
    peer = join(sys.argv[1], size, device)
    connection.send_bytes(json.dumps({"rank": peer.rank, "pid": os.getpid(), "version": peer.version}).encode())
    serve(connection, Rank(peer, device))
    connection.close()
    peer.close()


if __name__ == "__main__":
    main()
