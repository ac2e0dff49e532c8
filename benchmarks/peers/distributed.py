"""torch.distributed with Gloo or with the backend horovod, or with NCCL where tensors are on GPUs.

Gradients travel in flattened buckets, as DistributedDataParallel sends them, or each as it is, all in one call of the
backend: on a GPU that is one group call of NCCL, what Horovod makes of them too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import FLOAT_BYTES, MIB, Case
from benchmarks.peers import Bound

_BUCKET_BYTES = 25 * MIB


class DistributedPeer:
    def __init__(self, size: int, device: torch.device, backend: str = "gloo", grouped: bool = False) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning)  # names of functions that change between versions
        self.rank = int(os.environ["BENCHMARK_RANK"])
        self._grouped = grouped
        self._device = device
        store = f"file://{os.environ['BENCHMARK_RENDEZVOUS']}"
        self.version = f"torch {torch.__version__}"
        if device.type == "cuda":
            dist.init_process_group("nccl", init_method=store, rank=self.rank, world_size=size, device_id=device)
            self.version += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        else:
            if backend == "horovod":
                import horovod.torch.distributed  # noqa: F401  (registers it)
            dist.init_process_group(backend, init_method=store, rank=self.rank, world_size=size)

    def bind(self, case: Case, inputs: Sequence[torch.Tensor]) -> Bound:
        operation = case.operation
        if case.is_gradient_set:
            call = partial(_reduce_grouped, inputs) if self._grouped else partial(_reduce_gradients, _buckets(inputs))
            return Bound(call, inputs)
        if operation == "barrier":
            return Bound(self.barrier, ())
        tensor = inputs[0]
        if operation == "allreduce":
            return Bound(partial(dist.all_reduce, tensor), inputs)
        if operation == "broadcast":
            return Bound(partial(dist.broadcast, tensor, 0), inputs)
        output = torch.empty(case.result_elements, device=self._device)
        function: Any = {
            "allgather": dist.all_gather_into_tensor,
            "alltoall": dist.all_to_all_single,
            "reducescatter": dist.reduce_scatter_tensor,
        }[operation]
        return Bound(partial(function, output, tensor), [output], [output])

    def barrier(self) -> None:
        if self._device.type == "cuda":
            dist.barrier(device_ids=[self._device.index])
        else:
            dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        if used and used + tensor.numel() * FLOAT_BYTES > _BUCKET_BYTES:
            buckets.append([])
            used = 0
        buckets[-1].append(tensor)
        used += tensor.numel() * FLOAT_BYTES
    return buckets


def _reduce_gradients(buckets: list[list[torch.Tensor]]) -> None:
    flats = [torch.cat(bucket) for bucket in buckets]
    works: list[Any] = [dist.all_reduce(flat, async_op=True) for flat in flats]
    for work, flat, bucket in zip(works, flats, buckets, strict=True):
        work.wait()
        torch._foreach_copy_(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]))


def _reduce_grouped(tensors: Sequence[torch.Tensor]) -> None:
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
