"""Which libraries move tensors, and how GPU tensors travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.base.setting import row

from .shared import NO_MPI

_GPU_OPERATIONS = ("auto", "nccl", "host", "mpi", "gloo")


def _gpu_row(operation: str) -> Any:
    help_ = f"HOROVOD_GPU_OPERATIONS for {operation.lower()} alone"
    return row(f"HOROVOD_GPU_{operation}", None, help_, section="library_options", choices=_GPU_OPERATIONS, agreed=True)


@dataclass(frozen=True, init=False, repr=False, eq=False)  # a part of Settings, which alone is made
class BackendSettings:
    """GPU tensors, NCCL, CUDA and Gloo."""

    gpu_operations: str = row(
        "HOROVOD_GPU_OPERATIONS",
        "auto",
        "how GPU tensors travel: auto (NCCL where all ranks have it and it can do what is asked, otherwise through the "
        "host's memory), nccl (the same, but a rank without NCCL is an error) or host (always through the host's "
        "memory, by what HOROVOD_CPU_OPERATIONS says; mpi and gloo mean the same)",
        section="library_options",
        choices=_GPU_OPERATIONS,
        agreed=True,
    )
    gpu_allreduce: str | None = _gpu_row("ALLREDUCE")
    gpu_allgather: str | None = _gpu_row("ALLGATHER")
    gpu_broadcast: str | None = _gpu_row("BROADCAST")
    gpu_alltoall: str | None = _gpu_row("ALLTOALL")
    gpu_reducescatter: str | None = _gpu_row("REDUCESCATTER")
    num_nccl_streams: int = row(
        "HOROVOD_NUM_NCCL_STREAMS",
        1,
        "batches of GPU tensors that may overlap, each on a CUDA stream of its own",
        section="library_options",
        limits=(0, 1024),
        agreed=True,
        engine="nccl_streams",
    )
    gpu_pack_threshold_bytes: int = row(
        "HOROVOD_GPU_PACK_THRESHOLD",
        64 << 10,
        "GPU tensors of a batch up to this size are copied into one buffer, which is reduced or broadcast as one; 0: "
        "none are",
        section="library_options",
        unit="bytes",
        limits=(0, 1 << 30),
        agreed=True,
        engine="gpu_pack_threshold_bytes",
    )
    gpu_pack_count: int = row(
        "HOROVOD_GPU_PACK_COUNT",
        8,
        "fewer small GPU tensors than this stay where they are",
        section="library_options",
        limits=(1, 1 << 20),
        agreed=True,
        engine="gpu_pack_count",
    )
    batch_d2d_memcopies: bool = row(
        "HOROVOD_BATCH_D2D_MEMCOPIES",
        True,
        "small GPU tensors are packed by one kernel, compiled when the first GPU tensor comes; 0: one by one",
        section="library_options",
        engine="batched_copies",
    )
    async_completion: bool = row(
        "HOROVOD_ENABLE_ASYNC_COMPLETION",
        True,
        "synchronizing an operation on GPU tensors makes the current stream wait for it; 0: the host waits",
        section="library_options",
        engine="async_completion",
    )
    nccl_library: str | None = row(
        "HOROVOD_NCCL_LIBRARY",
        None,
        "file of NCCL (libnccl.so.2) for GPU tensors; without it that of the package nvidia-nccl (PyTorch brings it), "
        "or the system's",
        section="library_options",
    )
    cuda_library: str | None = row(
        "HOROVOD_CUDA_LIBRARY",
        None,
        "file of the NVIDIA driver's library for GPU tensors; without it the system's libcuda.so.1",
        section="library_options",
    )
    nvrtc_library: str | None = row(
        "HOROVOD_NVRTC_LIBRARY",
        None,
        "file of NVIDIA's run-time compiler (libnvrtc.so.12) for packing small GPU tensors; without it that of the "
        "package nvidia-cuda-nvrtc (PyTorch brings it), or the system's",
        section="library_options",
    )
    gloo_timeout_seconds: int = row(
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        30,
        "how long a peer may make no progress in an operation of Gloo; 0 leaves it to HOROVOD_PROGRESS_TIMEOUT",
        section="library_options",
        unit="seconds",
        limits=(0, 10_000_000),
    )
    mpi_threads_disable: bool = row(
        "HOROVOD_MPI_THREADS_DISABLE",
        False,
        "whether MPI may use threads",
        section="library_options",
        no_effect=NO_MPI,
    )
