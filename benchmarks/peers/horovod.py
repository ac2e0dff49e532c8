"""horovod.torch, as a training script uses it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch

import horovod
import horovod.torch as hvd
from benchmarks.cases import Case
from benchmarks.peers import Bound


class HorovodPeer:
    def __init__(self, device: torch.device) -> None:
        hvd.init()
        self.rank = hvd.rank()
        how = os.environ.get("HOROVOD_TRANSPORT", "auto")
        if device.type == "cuda":
            how = f"NCCL {hvd.nccl_built()}"
        self.version = f"{getattr(horovod, '__version__', '1.0.0')} ({how})"

    def bind(self, case: Case, inputs: Sequence[torch.Tensor]) -> Bound:
        operation = case.operation
        if case.is_gradient_set:
            names = [f"{operation}.{index}" for index in range(len(inputs))]
            return Bound(partial(_reduce_gradients, list(zip(inputs, names, strict=True))), inputs)
        if operation == "barrier":
            return Bound(hvd.barrier, ())
        if operation == "grouped":
            name = f"grouped.{len(inputs)}.{inputs[0].numel()}"
            return Bound(partial(hvd.grouped_allreduce_, inputs, name=name, op=hvd.Sum), inputs)
        tensor = inputs[0]
        # Named, as tensors of a model are: a call without a name is negotiated anew for each of its first 32 uses.
        name = f"{operation}.{tensor.numel()}"
        if operation == "allreduce":
            return Bound(lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum), inputs)
        if operation == "adasum":
            return Bound(partial(hvd.allreduce_, tensor, name=name, op=hvd.Adasum), inputs)
        if operation == "broadcast":
            return Bound(partial(hvd.broadcast_, tensor, 0, name=name), inputs)
        if operation == "reducescatter":
            return Bound(partial(hvd.reducescatter, tensor, name=name, op=hvd.Sum))
        return Bound(partial(hvd.allgather if operation == "allgather" else hvd.alltoall, tensor, name=name))

    def barrier(self) -> None:
        hvd.barrier()

    def close(self) -> None:
        hvd.shutdown()


def _reduce_gradients(gradients: list[tuple[torch.Tensor, str]]) -> None:
    handles = [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in gradients]
    for handle in handles:
        hvd.synchronize(handle)
