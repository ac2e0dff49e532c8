"""Open MPI through mpi4py's buffer interface; gradients as one flattened buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mpi4py
import torch

from benchmarks.cases import Case
from benchmarks.peers import Bound

mpi4py.rc.thread_level = "single"  # its fastest mode


class MpiPeer:
    def __init__(self, size: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        if self._world.Get_size() != size:
            raise RuntimeError(f"mpirun started a world of {self._world.Get_size()} ranks, not {size}.")
        self.rank = self._world.Get_rank()
        library = MPI.Get_library_version().split(",")[0].removeprefix("Open MPI v")
        self.version = f"{library}, mpi4py {mpi4py.__version__}"

    def bind(self, case: Case, inputs: Sequence[torch.Tensor]) -> Bound:
        world, in_place, operation = self._world, self._mpi.IN_PLACE, case.operation
        if operation == "barrier":
            return Bound(world.Barrier, ())
        if case.is_gradient_set:
            flat = torch.empty(sum(case.elements))
            reduce = partial(world.Allreduce, in_place, self._buffer(flat))
            return Bound(partial(_reduce_gradients, list(inputs), flat, reduce), inputs)
        tensor = self._buffer(inputs[0])
        if operation == "allreduce":
            return Bound(partial(world.Allreduce, in_place, tensor), inputs)
        if operation == "broadcast":
            return Bound(partial(world.Bcast, tensor), inputs)
        output = torch.empty(case.result_elements)
        function: Any = {
            "allgather": world.Allgather,
            "alltoall": world.Alltoall,
            "reducescatter": world.Reduce_scatter_block,
        }[operation]
        return Bound(partial(function, tensor, self._buffer(output)), [output], [output])

    def _buffer(self, tensor: torch.Tensor) -> Any:
        return [tensor.numpy(), self._mpi.FLOAT]

    def barrier(self) -> None:
        self._world.Barrier()

    def close(self) -> None:
        pass  # mpi4py finalizes at exit


def _reduce_gradients(tensors: list[torch.Tensor], flat: torch.Tensor, reduce: Any) -> None:
    torch.cat(tensors, out=flat)
    reduce()
    torch._foreach_copy_(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]))
