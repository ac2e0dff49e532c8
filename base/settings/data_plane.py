"""How tensors travel: between processes, by which libraries, and those of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.base.setting import COUNT, NO_CCL, NO_MPI, PATIENCE, row

WIRE_MODES = ("plain", "signed", "encrypted")  # in the order of csrc/base/config.h


@dataclass(frozen=True, init=False, repr=False, eq=False)  # a part of Settings, which alone is made
class DataPlaneSettings:
    """Shared memory and TCP: which is used, with what sizes and how much patience."""

    transport: str = row(
        "HOROVOD_TRANSPORT",
        "auto",
        "how tensors travel between ranks: auto (shared memory if all ranks share a host, otherwise TCP), shm (shared"
        " memory) or tcp",
        section="params",
        choices=("auto", "shm", "tcp"),
        agreed=True,
    )
    cpu_operations: str = row(
        "HOROVOD_CPU_OPERATIONS",
        "native",
        "implementation of collectives on CPU tensors: native (over shared memory or TCP) or gloo (over TCP). gloo "
        "means native if Horovod was built without libgloo-dev; mpi and ccl, which earlier versions had, always do",
        section="library_options",
        choices=("native", "gloo", "mpi", "ccl"),
        idle_choices={"mpi": NO_MPI, "ccl": NO_CCL},
        agreed=True,
    )
    network_interfaces: tuple[str, ...] = row(
        "HOROVOD_NETWORK_INTERFACES",
        (),
        "network interfaces for TCP between ranks. Without it: every interface that is up, except loopback and "
        "bridges of containers",
        section="params",
    )
    ports: str | None = row(
        "HOROVOD_PORTS",
        None,
        "first and last port, such as 29500-29599, on which ranks listen for each other and the launcher's own "
        "coordinator listens for them. Open them in firewalls. A rank takes one port for each address of its "
        "interfaces. Without it the system chooses the ports",
        section="params",
        kind="ports",
    )
    connections_per_peer: int | None = row(
        "HOROVOD_CONNECTIONS_PER_PEER",
        None,
        "number of TCP connections between two ranks, for networks that limit the speed of each. Without it: one for "
        "each network interface that both ranks have",
        section="params",
        limits=(1, 64),
        agreed=True,
    )
    full_mesh_members: int = row(
        "HOROVOD_FULL_MESH_MEMBERS",
        64,
        "up to this many ranks in a world or process set, each rank connects to all others over TCP. With more (n "
        "ranks) it connects to about 2 log2 n, and sums are added in another order, which is fixed as well",
        section="params",
        agreed=True,
        engine="full_mesh_members",
        **COUNT,
    )
    wire: str = row(
        "HOROVOD_WIRE",
        "plain",
        "protection of TCP connections between ranks: plain (none), signed (detects changed data) or encrypted "
        "(signed as well), by OpenSSL's libcrypto. It cannot protect NCCL, which is then used only if "
        "HOROVOD_GPU_OPERATIONS demands it",
        section="params",
        choices=WIRE_MODES,
        agreed=True,
    )
    fusion_threshold_bytes: int = row(
        "HOROVOD_FUSION_THRESHOLD",
        128 << 20,
        "operations are fused into batches of up to this size. 0: no fusion",
        section="params",
        flag="--fusion-threshold-mb",
        unit="bytes",
        limits=(0, 1 << 62),
        flag_unit="MB",
        flag_scale=1 << 20,
        agreed=True,
        engine="fusion_threshold_bytes",
    )
    spin_us: int = row(
        "HOROVOD_SPIN_US",
        50,
        "how long a waiting thread polls before it sleeps",
        section="params",
        unit="microseconds",
        limits=(0, 1_000_000),
        engine="spin_us",
    )
    staging_buffer_bytes: int = row(
        "HOROVOD_STAGING_BUFFER_BYTES",
        256 << 10,
        "size of one shared-memory staging buffer",
        section="params",
        unit="bytes",
        limits=(4096, 64 << 20),
        multiple=4096,
        agreed=True,
        engine="staging_buffer_bytes",
    )
    staging_buffer_count: int = row(
        "HOROVOD_STAGING_BUFFER_COUNT",
        4,
        "number of staging buffers of each rank if all ranks share a host",
        section="params",
        limits=(2, 64),
        agreed=True,
        engine="staging_buffer_count",
    )
    progress_timeout_seconds: float = row(
        "HOROVOD_PROGRESS_TIMEOUT",
        300.0,
        "how long a peer may make no progress in an operation that every rank has started. Then the world ends with "
        "an error",
        section="params",
        engine="progress_timeout_ms",
        engine_scale=1000,
        **PATIENCE,
    )
    unreachable_timeout_seconds: float = row(
        "HOROVOD_UNREACHABLE_TIMEOUT_SECONDS",
        20.0,
        "how long the host of a peer may leave TCP data unacknowledged before the peer counts as lost. A stopped "
        "process does not trigger this, as its host still acknowledges. In elastic jobs HOROVOD_ELASTIC_HUNG_SECONDS "
        "applies if it is less. Also how long the ranks of a new world try to connect before an error names the ones "
        "that cannot reach each other",
        section="params",
        engine="unreachable_timeout_ms",
        engine_scale=1000,
        **PATIENCE,
    )


_GPU_OPERATIONS = ("auto", "nccl", "host", "mpi", "gloo")


def _gpu_row(operation: str) -> Any:
    help_ = f"as HOROVOD_GPU_OPERATIONS, for {operation.lower()} only"
    return row(f"HOROVOD_GPU_{operation}", None, help_, section="library_options", choices=_GPU_OPERATIONS, agreed=True)


@dataclass(frozen=True, init=False, repr=False, eq=False)  # a part of Settings, which alone is made
class BackendSettings:
    """GPU tensors, NCCL, CUDA and Gloo."""

    gpu_operations: str = row(
        "HOROVOD_GPU_OPERATIONS",
        "auto",
        "how GPU tensors travel: auto (by NCCL if all ranks have it and it supports the operation, otherwise through "
        "host memory), nccl (as auto, but a rank without NCCL is an error) or host (always through host memory, as "
        "HOROVOD_CPU_OPERATIONS says). mpi and gloo mean host",
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
        "number of batches of GPU tensors that may overlap. Each has its own CUDA stream",
        section="library_options",
        limits=(0, 1024),
        agreed=True,
        engine="nccl_streams",
    )
    gpu_pack_threshold_bytes: int = row(
        "HOROVOD_GPU_PACK_THRESHOLD",
        64 << 10,
        "GPU tensors of a batch up to this size are copied into one buffer, which is reduced or broadcast as a whole."
        " 0: no tensor is",
        section="library_options",
        unit="bytes",
        limits=(0, 1 << 30),
        agreed=True,
        engine="gpu_pack_threshold_bytes",
    )
    gpu_pack_count: int = row(
        "HOROVOD_GPU_PACK_COUNT",
        8,
        "small GPU tensors are copied into one buffer only if a batch has at least this many",
        section="library_options",
        limits=(1, 1 << 20),
        agreed=True,
        engine="gpu_pack_count",
    )
    batch_d2d_memcopies: bool = row(
        "HOROVOD_BATCH_D2D_MEMCOPIES",
        True,
        "one kernel, compiled when the first GPU tensor comes, packs all small GPU tensors. 0: each is copied "
        "separately",
        section="library_options",
        engine="batched_copies",
    )
    async_completion: bool = row(
        "HOROVOD_ENABLE_ASYNC_COMPLETION",
        True,
        "synchronizing an operation on GPU tensors makes the current stream wait for it. 0: the host waits",
        section="library_options",
        engine="async_completion",
    )
    nccl_library: str | None = row(
        "HOROVOD_NCCL_LIBRARY",
        None,
        "file of NCCL (libnccl.so.2) for GPU tensors. Without it: the one in the package nvidia-nccl, which PyTorch "
        "installs, or else the system's",
        section="library_options",
    )
    cuda_library: str | None = row(
        "HOROVOD_CUDA_LIBRARY",
        None,
        "library file of the NVIDIA driver for GPU tensors. Without it: the system's libcuda.so.1",
        section="library_options",
    )
    nvrtc_library: str | None = row(
        "HOROVOD_NVRTC_LIBRARY",
        None,
        "file of NVIDIA's run-time compiler (libnvrtc.so.12), which packing small GPU tensors needs. Without it: the "
        "one in the package nvidia-cuda-nvrtc, which PyTorch installs, or else the system's",
        section="library_options",
    )
    gloo_timeout_seconds: int = row(
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        30,
        "how long a peer may make no progress in a Gloo operation. 0: HOROVOD_PROGRESS_TIMEOUT applies",
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
