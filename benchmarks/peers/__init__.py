"""The libraries, seen alike: how a rank of each joins, and the call that is timed for each case.

`bind` returns a callable without a Python frame of its own where it can (functools.partial), so that nothing of ours is
in the time of a library that needs less than a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.cases import Case

NAMES = ("horovod", "gloo", "mpi")
TITLES = {
    "horovod": "horovod",
    "backend": "torch.distributed horovod",
    "gloo": "torch.distributed Gloo",
    "mpi": "Open MPI",
    "sockets": "plain sockets",
    "nccl": "torch.distributed NCCL",
    "group": "torch.distributed NCCL, gradients in one group call",
}


@dataclass
class Bound:
    """One case on one rank."""

    call: Callable[[], object]
    results: Sequence[torch.Tensor] | None = None  # None: `call` returns the one result as a new tensor
    outputs: Sequence[torch.Tensor] = ()  # those of `results` that are not inputs; made anew before each block


class Peer(Protocol):
    rank: int
    version: str

    def bind(self, case: Case, inputs: Sequence[torch.Tensor]) -> Bound: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...


def join(name: str, size: int, device: torch.device) -> Peer:
    """Imports the library and joins its world; blocks until all ranks have. Tensors will be on `device`."""
    if name == "horovod":
        from benchmarks.peers.horovod import HorovodPeer

        return HorovodPeer(device)
    if name == "sockets":
        from benchmarks.peers.sockets import SocketsPeer

        return SocketsPeer(size)
    if name == "mpi":
        from benchmarks.peers.mpi import MpiPeer

        return MpiPeer(size)
    from benchmarks.peers.distributed import DistributedPeer

    return DistributedPeer(size, device, "horovod" if name == "backend" else "gloo", grouped=name == "group")
