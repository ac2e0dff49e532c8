"""Plain sockets and nothing else (sockets.cc): what is left to a library's own doing, beside the kernel's.

Allreduce only; ranks of one host share memory. It is no library: it has no other operation, and hangs when a rank is
lost.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from benchmarks.cases import Case
from benchmarks.peers import Bound

_SOURCE = Path(__file__).resolve().parent.parent / "sockets.cc"
_START_SECONDS = 60.0


def compile_sockets(folder: Path) -> Path:
    """The library, made in `folder`. subprocess.CalledProcessError or FileNotFoundError without a compiler."""
    made = folder / "sockets.so"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(made), str(_SOURCE)], check=True, capture_output=True, text=True)
    return made


class SocketsPeer:
    version = "of this kernel"

    def __init__(self, size: int) -> None:
        self.rank = int(os.environ["BENCHMARK_RANK"])
        per_host = int(os.environ["BENCHMARK_RANKS_PER_HOST"])
        self._hosts = size // per_host
        library = ctypes.CDLL(os.environ["BENCHMARK_SOCKETS"])
        library.plain_shared_bytes.restype = ctypes.c_size_t
        shared_bytes = library.plain_shared_bytes(per_host)
        with open(f"{os.environ['BENCHMARK_RENDEZVOUS']}.host-{self.rank // per_host}", "ab+") as file:
            file.truncate(shared_bytes)  # zeros, whichever rank of the host is first
            self._shared = mmap.mmap(file.fileno(), shared_bytes)
        self._connections = _connect(self.rank, size)
        counterparts = self._connections[self.rank % per_host :: per_host]
        numbers = (ctypes.c_int * self._hosts)(*(-1 if one is None else one.fileno() for one in counterparts))
        self._crowded = int(size > len(os.sched_getaffinity(0)))
        shared = (ctypes.c_char * shared_bytes).from_buffer(self._shared)
        self._function = partial(library.plain_allreduce, self._hosts, per_host, self.rank, numbers, shared)
        self._kept: WeakKeyDictionary[Callable[[], int], object] = WeakKeyDictionary()
        self._barrier = self._of(torch.zeros(1))

    def bind(self, case: Case, inputs: Sequence[torch.Tensor]) -> Bound:
        if case.operation != "allreduce":
            raise ValueError(f"Plain sockets are measured with allreduce only, not with {case.operation}.")
        return Bound(self._of(inputs[0]), inputs)

    def _of(self, tensor: torch.Tensor) -> Callable[[], int]:
        scratch = torch.empty(tensor.numel() * self._hosts)
        pointers = (ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(scratch.data_ptr()))
        count = ctypes.c_size_t(tensor.numel())
        call = partial(self._function, *pointers, count, self._crowded)
        self._kept[call] = (tensor, scratch)  # as long as the call
        return call

    def barrier(self) -> None:
        if self._barrier() != 0:
            raise ConnectionError("A connection has ended.")

    def close(self) -> None:
        for one in self._connections:
            if one is not None:
                one.close()


def _connect(rank: int, size: int) -> list[socket.socket | None]:
    """One to each other rank. Ranks find each other by files beside the rendezvous of the other libraries."""
    base = os.environ["BENCHMARK_RENDEZVOUS"]
    connections: list[socket.socket | None] = [None] * size
    with socket.create_server((os.environ["BENCHMARK_ADDRESS"], 0), backlog=size) as server:
        address = Path(f"{base}.{rank}")
        written = Path(f"{base}.{rank}.new")
        written.write_text(f"{server.getsockname()[0]} {server.getsockname()[1]}")
        written.rename(address)
        deadline = time.monotonic() + _START_SECONDS
        for peer in range(rank):
            file = Path(f"{base}.{peer}")
            while not file.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"Rank {peer} did not come.")
                time.sleep(0.01)
            host, port = file.read_text().split()
            made = socket.create_connection((host, int(port)), timeout=_START_SECONDS)
            made.sendall(bytes([rank]))
            connections[peer] = made
        server.settimeout(_START_SECONDS)
        for _ in range(rank + 1, size):
            made, _ = server.accept()
            connections[made.recv(1)[0]] = made
    for one in connections:
        if one is not None:
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections
