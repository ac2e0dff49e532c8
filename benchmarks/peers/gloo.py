"""torch.distributed with its Gloo backend; gradients in flattened buckets, as DistributedDataParallel sends them."""

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


class GlooPeer:
    def __init__(self, size: int) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning)  # names of functions that change between versions
        self.rank = int(os.environ["BENCHMARK_RANK"])
        store = os.environ["BENCHMARK_RENDEZVOUS"]
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=self.rank, world_size=size)
        self.version = f"torch {torch.__version__}"

    def bind(self, case: Case, inputs: Sequence[torch.Tensor]) -> Bound:
        operation = case.operation
        if case.is_gradient_set:
            return Bound(partial(_reduce_gradients, _buckets(inputs)), inputs)
        if operation == "barrier":
            return Bound(dist.barrier, ())
        tensor = inputs[0]
        if operation == "allreduce":
            return Bound(partial(dist.all_reduce, tensor), inputs)
        if operation == "broadcast":
            return Bound(partial(dist.broadcast, tensor, 0), inputs)
        output = torch.empty(case.result_elements)
        function: Any = {
            "allgather": dist.all_gather_into_tensor,
            "alltoall": dist.all_to_all_single,
            "reducescatter": dist.reduce_scatter_tensor,
        }[operation]
        return Bound(partial(function, output, tensor), [output], [output])

    def barrier(self) -> None:
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
