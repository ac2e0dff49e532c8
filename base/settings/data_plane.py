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
        "data plane: shared memory when all ranks share a host and TCP otherwise, or always the one named",
        section="params",
        choices=("auto", "shm", "tcp"),
        agreed=True,
    )
    cpu_operations: str = row(
        "HOROVOD_CPU_OPERATIONS",
        "native",
        "whose algorithms move CPU tensors: native (shared memory or TCP) or gloo (over TCP, where libgloo-dev was "
        "there when Horovod was built, else native); mpi and ccl, which earlier versions had, mean native",
        section="library_options",
        choices=("native", "gloo", "mpi", "ccl"),
        idle_choices={"mpi": NO_MPI, "ccl": NO_CCL},
        agreed=True,
    )
    network_interfaces: tuple[str, ...] = row(
        "HOROVOD_NETWORK_INTERFACES",
        (),
        "network interfaces for TCP; without it every one that is up, but loopback and bridges of containers",
        section="params",
    )
    ports: str | None = row(
        "HOROVOD_PORTS",
        None,
        "ports on which ranks listen for each other, and the launcher's own coordinator for them, for firewalls: the "
        "first and the last one, such as 29500-29599. A rank takes one for each address of its interfaces; without it "
        "the system chooses",
        section="params",
        kind="ports",
    )
    connections_per_peer: int | None = row(
        "HOROVOD_CONNECTIONS_PER_PEER",
        None,
        "TCP connections between two ranks, for networks that limit each; without it one for each network interface "
        "that both have",
        section="params",
        limits=(1, 64),
        agreed=True,
    )
    full_mesh_members: int = row(
        "HOROVOD_FULL_MESH_MEMBERS",
        64,
        "up to so many ranks of a world, or of a process set, each has TCP connections to all others; of more (n), to "
        "about 2 log2 n. A sum is then formed in another order, which follows from the ranks as well",
        section="params",
        agreed=True,
        engine="full_mesh_members",
        **COUNT,
    )
    wire: str = row(
        "HOROVOD_WIRE",
        "plain",
        "what protects tensors and the order of operations on TCP connections between ranks: nothing (plain), a "
        "signature (signed) or encryption as well (encrypted), by OpenSSL's libcrypto; NCCL, which it can't protect, "
        "is then used where HOROVOD_GPU_OPERATIONS demands it only",
        section="params",
        choices=WIRE_MODES,
        agreed=True,
    )
    fusion_threshold_bytes: int = row(
        "HOROVOD_FUSION_THRESHOLD",
        128 << 20,
        "operations are fused into one batch up to this size; 0 turns fusion off",
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
        "staging buffers of each rank where all ranks share a host",
        section="params",
        limits=(2, 64),
        agreed=True,
        engine="staging_buffer_count",
    )
    progress_timeout_seconds: float = row(
        "HOROVOD_PROGRESS_TIMEOUT",
        300.0,
        "how long a peer may make no progress in an operation that every rank has started, before the world ends",
        section="params",
        engine="progress_timeout_ms",
        engine_scale=1000,
        **PATIENCE,
    )
    unreachable_timeout_seconds: float = row(
        "HOROVOD_UNREACHABLE_TIMEOUT_SECONDS",
        20.0,
        "how long the host of a peer may owe the acknowledgement of something over TCP before the peer counts as lost; "
        "the host of a process that is stopped still acknowledges; in elastic jobs HOROVOD_ELASTIC_HUNG_SECONDS, where "
        "that is less; a new world whose ranks try to connect for so long in vain ends with a sentence that says who "
        "can't reach whom",
        section="params",
        engine="unreachable_timeout_ms",
        engine_scale=1000,
        **PATIENCE,
    )


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
