"""The one table of settings: environment variable, `horovodrun` flag, YAML key, unit, default and meaning of each.

The table is the class `Settings` itself, so that code reads `settings.size` with a type, and everything else
(launcher flags, the YAML reader, the docs page) is generated from `SETTINGS`. An explicit argument beats the
environment; flags and files are the launcher's business, which turns them into environment variables of the processes.
Values are checked by their row (setting.py) and nowhere else: a bad one is a ValueError whose sentence names the
variable, the value and what is expected. Importing this module reads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod.worker.setting import Kind, Setting, row, rows

# Why settings of earlier versions are accepted and change nothing; each completes "HOROVOD_... has no effect: ...".
_NO_TUNING = "there are no cycles to tune: batches form by themselves, and algorithms follow from size and topology"
_BY_TOPOLOGY = "algorithms are chosen by size and topology"
_NO_MPI = "this version of Horovod has no MPI"
_COORDINATOR = "processes meet at a coordinator, which the launcher starts or HOROVOD_COORDINATOR names"

MAX_SIZE = 1 << 16  # what a coordinator accepts (horovod.coordinator.core.checks; a test compares the two)
GPU_OPERATIONS = ("auto", "nccl", "host", "mpi", "gloo")


def _gpu_row(operation: str) -> Any:
    help_ = f"HOROVOD_GPU_OPERATIONS for {operation.lower()} alone; must agree on all ranks"
    return row(f"HOROVOD_GPU_{operation}", "choice", None, help_, choices=GPU_OPERATIONS)


def _old_row(env: str, kind: Kind, default: Any, why: str, **more: Any) -> Any:
    return row(env, kind, default, "accepted; has no effect", no_effect=why, **more)


@dataclass(frozen=True)
class Settings:
    """All settings of one process, checked. None means not given."""

    # -- which world ---------------------------------------------------------------------------------------------------
    coordinator: str | None = row(
        "HOROVOD_COORDINATOR",
        "address",
        None,
        "host:port of the coordinator; without one the process is a world of one",
    )
    job: str = row("HOROVOD_JOB", "text", "default", "name of the job; processes of one name form one world")
    token: str | None = row(
        "HOROVOD_TOKEN",
        "token",
        None,
        "bearer token that the coordinator asks for; without one, on a loopback address, that of a coordinator of the "
        "same user is found",
        secret=True,
    )
    token_file: str | None = row("HOROVOD_TOKEN_FILE", "text", None, "file that holds the token, as HOROVOD_TOKEN")
    size: int | None = row("HOROVOD_SIZE", "int", None, "number of processes in the world", minimum=1, maximum=MAX_SIZE)
    cluster: str = row(
        "HOROVOD_CLUSTER",
        "choice",
        "auto",
        "whose variables tell a process that horovodrun did not start its rank: auto (mpirun's, mpiexec's or srun's, "
        "where there are any), one of them, or none",
        choices=("auto", "none", "openmpi", "slurm", "pmi"),
    )
    start_timeout_seconds: float = row(
        "HOROVOD_START_TIMEOUT",
        "float",
        30.0,
        "how long all processes may take to start and join",
        flag="--start-timeout",
        unit="seconds",
        minimum=0.001,
        maximum=10_000_000,
    )
    keepalive_timeout_seconds: float = row(
        "HOROVOD_KEEPALIVE_TIMEOUT_SECONDS",
        "float",
        20.0,
        "a connection between a process and the coordinator that answers no ping for so long counts as broken; the "
        "process then connects again",
        flag="--keepalive-timeout-seconds",
        unit="seconds",
        minimum=0.001,
        maximum=10_000_000,
    )
    reattach_grace_seconds: float = row(
        "HOROVOD_REATTACH_GRACE_SECONDS",
        "float",
        10.0,
        "how long a process may be without a connection to the coordinator before the others count it as lost, unless "
        "it is seen to live, and how long a first-time agreement waits for the coordinator",
        flag="--reattach-grace-seconds",
        unit="seconds",
        minimum=0.001,
        maximum=10_000_000,
    )
    rank: int | None = row(
        "HOROVOD_RANK", "int", None, "rank that the launcher decided", minimum=0, maximum=MAX_SIZE - 1, launcher=True
    )
    local_rank: int | None = row(
        "HOROVOD_LOCAL_RANK",
        "int",
        None,
        "rank among the processes of this host",
        minimum=0,
        maximum=MAX_SIZE - 1,
        launcher=True,
    )
    local_size: int | None = row(
        "HOROVOD_LOCAL_SIZE",
        "int",
        None,
        "number of processes on this host",
        minimum=1,
        maximum=MAX_SIZE,
        launcher=True,
    )
    cross_rank: int | None = row(
        "HOROVOD_CROSS_RANK",
        "int",
        None,
        "index of this host among those with this local rank",
        minimum=0,
        maximum=MAX_SIZE - 1,
        launcher=True,
    )
    cross_size: int | None = row(
        "HOROVOD_CROSS_SIZE",
        "int",
        None,
        "number of hosts that have this local rank",
        minimum=1,
        maximum=MAX_SIZE,
        launcher=True,
    )
    hostname: str | None = row(
        "HOROVOD_HOSTNAME",
        "text",
        None,
        "name of this host; processes of one name are local to each other",
        launcher=True,
    )

    # -- data plane ----------------------------------------------------------------------------------------------------
    transport: str = row(
        "HOROVOD_TRANSPORT",
        "choice",
        "auto",
        "data plane: shared memory when all ranks share a host and TCP otherwise, or always the one named",
        choices=("auto", "shm", "tcp"),
    )
    cpu_operations: str = row(
        "HOROVOD_CPU_OPERATIONS",
        "choice",
        "native",
        "whose algorithms move CPU tensors: native (shared memory or TCP) or gloo (over TCP, where libgloo-dev was "
        "there when Horovod was built); must agree on all ranks",
        choices=("native", "gloo", "mpi", "ccl"),
    )
    network_interfaces: tuple[str, ...] = row(
        "HOROVOD_NETWORK_INTERFACES",
        "list",
        (),
        "network interfaces for TCP; without it every one that is up, but loopback and bridges of containers",
        flag="--network-interfaces",
    )
    connections_per_peer: int | None = row(
        "HOROVOD_CONNECTIONS_PER_PEER",
        "int",
        None,
        "TCP connections between two ranks, for networks that limit each; without it one for each network interface "
        "that both have; must agree on all ranks",
        minimum=1,
        maximum=64,
    )
    fusion_threshold_bytes: int = row(
        "HOROVOD_FUSION_THRESHOLD",
        "int",
        128 << 20,
        "operations are fused into one batch up to this size; 0 turns fusion off; must agree on all ranks",
        flag="--fusion-threshold-mb",
        yaml="params.fusion_threshold_mb",
        unit="bytes",
        minimum=0,
        maximum=1 << 62,
        flag_scale=1 << 20,
    )
    spin_us: int = row(
        "HOROVOD_SPIN_US",
        "int",
        50,
        "how long a waiting thread polls before it sleeps",
        unit="microseconds",
        minimum=0,
        maximum=1_000_000,
    )
    slot_bytes: int = row(
        "HOROVOD_SLOT_BYTES",
        "int",
        256 << 10,
        "size of one shared-memory staging slot, a multiple of 4096; must agree on all ranks",
        unit="bytes",
        minimum=4096,
        maximum=64 << 20,
    )
    slot_count: int = row(
        "HOROVOD_SLOT_COUNT",
        "int",
        4,
        "staging slots of each rank where all ranks share a host; must agree on all ranks",
        minimum=2,
        maximum=64,
    )
    progress_timeout_seconds: float = row(
        "HOROVOD_PROGRESS_TIMEOUT",
        "float",
        300.0,
        "how long a peer may make no progress in an operation that every rank has started, before the world ends",
        unit="seconds",
        minimum=0.001,
        maximum=10_000_000,
    )

    # -- negotiation and process sets ----------------------------------------------------------------------------------
    cycle_time_ms: float = row(
        "HOROVOD_CYCLE_TIME",
        "float",
        1.0,
        "extra time to wait for more tensors to batch; there is no fixed cycle",
        flag="--cycle-time-ms",
        yaml="params.cycle_time_ms",
        unit="milliseconds",
        minimum=0,
        no_effect="there is no cycle: what gets ready while data travels is the next batch",
    )
    cache_capacity: int = row(
        "HOROVOD_CACHE_CAPACITY",
        "int",
        1024,
        "operations whose agreement is remembered",
        flag="--cache-capacity",
        yaml="params.cache_capacity",
        minimum=0,
        no_effect="every agreement is remembered",
    )
    dynamic_process_sets: bool = row(
        "HOROVOD_DYNAMIC_PROCESS_SETS", "bool", False, "process sets may be added and removed after init"
    )
    disable_group_fusion: bool = row(
        "HOROVOD_DISABLE_GROUP_FUSION",
        "bool",
        False,
        "a grouped operation is not fused with others",
        no_effect="a grouped operation may share a batch with others, whose results stay the same",
    )
    hierarchical_allreduce: bool | None = row(
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "bool",
        None,
        "0: ranks of one host use TCP between each other where the world spans several",
        flag="--hierarchical-allreduce",
        yaml="params.hierarchical_allreduce",
    )
    hierarchical_allgather: bool | None = row(
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        "bool",
        None,
        "gather inside each host first; without it chosen by topology",
        flag="--hierarchical-allgather",
        yaml="params.hierarchical_allgather",
        no_effect=_BY_TOPOLOGY,
    )
    torus_allreduce: bool | None = row(
        "HOROVOD_TORUS_ALLREDUCE",
        "bool",
        None,
        "reduce in a torus of hosts and local ranks",
        flag="--torus-allreduce",
        yaml="params.torus_allreduce",
        no_effect=_BY_TOPOLOGY,
    )
    thread_affinity: tuple[str, ...] = row(
        "HOROVOD_THREAD_AFFINITY",
        "list",
        (),
        "processors of the background threads: one for each local rank, or one for all",
        flag="--thread-affinity",
        yaml="library_options.thread_affinity",
    )
    elastic: bool = row(
        "HOROVOD_ELASTIC",
        "bool",
        False,
        "set by elastic launchers",
        launcher=True,
        no_effect="elastic jobs are not available yet",
    )
    elastic_timeout_seconds: float = row(
        "HOROVOD_ELASTIC_TIMEOUT",
        "float",
        600.0,
        "how long a changed world may take to form again",
        flag="--elastic-timeout",
        unit="seconds",
        minimum=0,
        no_effect="HOROVOD_START_TIMEOUT says how long a changed world may take",
    )

    pin_gpus: bool = row(
        "HOROVOD_PIN_GPUS",
        "bool",
        False,
        "the launcher gives each process one GPU by CUDA_VISIBLE_DEVICES, which the process then knows as device 0: "
        "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count()) is right with and without it",
        flag="--pin-gpus",
        yaml="library_options.pin_gpus",
    )

    set_num_threads: bool = row(
        "HOROVOD_SET_NUM_THREADS",
        "bool",
        True,
        "the launcher sets OMP_NUM_THREADS and MKL_NUM_THREADS, where neither is set, to each process's share of this "
        "host's cores; --no-set-num-threads leaves them alone",
        flag="--set-num-threads",
        yaml="library_options.set_num_threads",
    )

    # -- what one sees -------------------------------------------------------------------------------------------------
    log_level: str = row(
        "HOROVOD_LOG_LEVEL",
        "choice",
        "warning",
        "least important message that is logged",
        flag="--log-level",
        yaml="logging.level",
        choices=("trace", "debug", "info", "warning", "error", "fatal"),
    )
    log_hide_time: bool = row(
        "HOROVOD_LOG_HIDE_TIME",
        "bool",
        False,
        "log lines carry no time",
        flag="--log-without-timestamp",
        yaml="logging.with_timestamp",
        yaml_inverted=True,
    )
    timeline: str | None = row(
        "HOROVOD_TIMELINE",
        "text",
        None,
        "file in which rank 0 writes the timeline, or DYNAMIC to start it from the program",
        flag="--timeline-filename",
        yaml="timeline.filename",
    )
    timeline_mark_cycles: bool = row(
        "HOROVOD_TIMELINE_MARK_CYCLES",
        "bool",
        False,
        "mark each batch in the timeline",
        flag="--timeline-mark-cycles",
        yaml="timeline.mark_cycles",
    )
    stall_check_disable: bool = row(
        "HOROVOD_STALL_CHECK_DISABLE",
        "bool",
        False,
        "no warning about tensors that some ranks did not submit",
        flag="--no-stall-check",
        yaml="stall_check.enabled",
        yaml_inverted=True,
    )
    stall_check_seconds: float = row(
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "float",
        60.0,
        "warn about a tensor that waits longer than this; 0 is never",
        flag="--stall-check-warning-time-seconds",
        yaml="stall_check.warning_time_seconds",
        unit="seconds",
        minimum=0,
    )
    stall_shutdown_seconds: float = row(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "float",
        0.0,
        "shut down when a tensor waits longer than this; 0 is never, and so is less than the time of the warning",
        flag="--stall-check-shutdown-time-seconds",
        yaml="stall_check.shutdown_time_seconds",
        unit="seconds",
        minimum=0,
    )

    # -- tuning --------------------------------------------------------------------------------------------------------
    autotune: bool = row(
        "HOROVOD_AUTOTUNE",
        "bool",
        False,
        "tune parameters while training",
        flag="--autotune",
        yaml="autotune.enabled",
        no_effect=_NO_TUNING,
    )
    autotune_log: str | None = row(
        "HOROVOD_AUTOTUNE_LOG",
        "text",
        None,
        "CSV file of what autotune tried",
        flag="--autotune-log-file",
        yaml="autotune.log_file",
        no_effect=_NO_TUNING,
    )
    autotune_warmup_samples: int = row(
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        "int",
        3,
        "samples that autotune throws away first",
        flag="--autotune-warmup-samples",
        yaml="autotune.warmup_samples",
        minimum=0,
        no_effect=_NO_TUNING,
    )
    autotune_steps_per_sample: int = row(
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        "int",
        10,
        "steps in one sample of autotune",
        flag="--autotune-steps-per-sample",
        yaml="autotune.steps_per_sample",
        minimum=0,
        no_effect=_NO_TUNING,
    )
    autotune_bayes_opt_max_samples: int = row(
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "int",
        20,
        "samples after which autotune stops",
        flag="--autotune-bayes-opt-max-samples",
        yaml="autotune.bayes_opt_max_samples",
        minimum=0,
        no_effect=_NO_TUNING,
    )
    autotune_gaussian_process_noise: float = row(
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "float",
        0.8,
        "noise that autotune assumes in its samples",
        flag="--autotune-gaussian-process-noise",
        yaml="autotune.gaussian_process_noise",
        minimum=0,
        maximum=1,
        no_effect=_NO_TUNING,
    )

    # -- backends ------------------------------------------------------------------------------------------------------
    gpu_operations: str = row(
        "HOROVOD_GPU_OPERATIONS",
        "choice",
        "auto",
        "how GPU tensors travel: auto (NCCL where all ranks have it and it can do what is asked, otherwise through the "
        "host's memory), nccl (the same, but a rank without NCCL is an error) or host (always through the host's "
        "memory, by what HOROVOD_CPU_OPERATIONS says; mpi and gloo mean the same); must agree on all ranks",
        choices=GPU_OPERATIONS,
    )
    gpu_allreduce: str | None = _gpu_row("ALLREDUCE")
    gpu_allgather: str | None = _gpu_row("ALLGATHER")
    gpu_broadcast: str | None = _gpu_row("BROADCAST")
    gpu_alltoall: str | None = _gpu_row("ALLTOALL")
    gpu_reducescatter: str | None = _gpu_row("REDUCESCATTER")
    num_nccl_streams: int = row(
        "HOROVOD_NUM_NCCL_STREAMS",
        "int",
        1,
        "batches of GPU tensors that may overlap, each on a CUDA stream of its own; must agree on all ranks",
        flag="--num-nccl-streams",
        yaml="library_options.num_nccl_streams",
        minimum=0,
    )
    gpu_pack_threshold_bytes: int = row(
        "HOROVOD_GPU_PACK_THRESHOLD",
        "int",
        64 << 10,
        "GPU tensors of a batch up to this size are copied into one buffer, which is reduced or broadcast as one; 0: "
        "none are; must agree on all ranks",
        unit="bytes",
        minimum=0,
        maximum=1 << 30,
    )
    gpu_pack_count: int = row(
        "HOROVOD_GPU_PACK_COUNT",
        "int",
        8,
        "fewer small GPU tensors than this stay where they are; must agree on all ranks",
        minimum=1,
        maximum=1 << 20,
    )
    batch_d2d_memcopies: bool = row(
        "HOROVOD_BATCH_D2D_MEMCOPIES",
        "bool",
        True,
        "small GPU tensors are packed by one kernel, compiled when the first GPU tensor comes; 0: one by one",
    )
    async_completion: bool = row(
        "HOROVOD_ENABLE_ASYNC_COMPLETION",
        "bool",
        True,
        "synchronizing an operation on GPU tensors makes the current stream wait for it; 0: the host waits",
    )
    nccl_library: str | None = row(
        "HOROVOD_NCCL_LIBRARY",
        "text",
        None,
        "file of NCCL (libnccl.so.2) for GPU tensors; without it that of the package nvidia-nccl (PyTorch brings it), "
        "or the system's",
    )
    cuda_library: str | None = row(
        "HOROVOD_CUDA_LIBRARY",
        "text",
        None,
        "file of the NVIDIA driver's library for GPU tensors; without it the system's libcuda.so.1",
    )
    nvrtc_library: str | None = row(
        "HOROVOD_NVRTC_LIBRARY",
        "text",
        None,
        "file of NVIDIA's run-time compiler (libnvrtc.so.12) for packing small GPU tensors; without it that of the "
        "package nvidia-cuda-nvrtc (PyTorch brings it), or the system's",
    )
    gloo_timeout_seconds: int = row(
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "int",
        30,
        "how long a peer may make no progress in an operation of Gloo; 0 leaves it to HOROVOD_PROGRESS_TIMEOUT",
        flag="--gloo-timeout-seconds",
        yaml="library_options.gloo_timeout_seconds",
        unit="seconds",
        minimum=0,
    )
    mpi_threads_disable: bool = row(
        "HOROVOD_MPI_THREADS_DISABLE",
        "bool",
        False,
        "whether MPI may use threads",
        flag="--mpi-threads-disable",
        yaml="library_options.mpi_threads_disable",
        no_effect=_NO_MPI,
    )

    # -- of earlier versions -------------------------------------------------------------------------------------------
    controller: str | None = _old_row("HOROVOD_CONTROLLER", "choice", None, _COORDINATOR, choices=("mpi", "gloo"))
    gloo_rendezvous_addr: str | None = _old_row("HOROVOD_GLOO_RENDEZVOUS_ADDR", "text", None, _COORDINATOR)
    gloo_rendezvous_port: int | None = _old_row("HOROVOD_GLOO_RENDEZVOUS_PORT", "int", None, _COORDINATOR)
    gloo_iface: str | None = _old_row(
        "HOROVOD_GLOO_IFACE", "text", None, "HOROVOD_NETWORK_INTERFACES (--network-interfaces) names the interfaces"
    )
    adasum_mpi_chunk_size_bytes: int = _old_row("HOROVOD_ADASUM_MPI_CHUNK_SIZE", "int", 1 << 30, _NO_MPI)
    ccl_cache: bool = _old_row("HOROVOD_CCL_CACHE", "bool", False, "this version of Horovod has no oneCCL")
    disable_nvtx_ranges: bool = _old_row("HOROVOD_DISABLE_NVTX_RANGES", "bool", False, "there are no NVTX ranges")
    enable_xla_ops: bool = _old_row("HOROVOD_ENABLE_XLA_OPS", "bool", False, "TensorFlow is not supported yet")


SETTINGS: tuple[Setting, ...] = rows(Settings)


def resolve(environ: Mapping[str, str] | None = None, explicit: Mapping[str, Any] | None = None) -> Settings:
    """Settings from explicit arguments (None means not given), then `environ` (default: the process's), then defaults.

    An empty variable counts as unset. Raises ValueError for a bad value and for an argument that is not in the table.
    """
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in (explicit or {}).items() if value is not None}
    if "token" in given:
        environ = {name: value for name, value in environ.items() if name != "HOROVOD_TOKEN_FILE"}
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.name in given:
            values[setting.name] = setting.check(given.pop(setting.name))
        elif environ.get(setting.env, "").strip():
            values[setting.name] = setting.parse(environ[setting.env])
    if given:
        known = ", ".join(setting.name for setting in SETTINGS)
        raise ValueError(f"There is no setting named {', '.join(sorted(given))}; settings are: {known}.")
    return Settings(**values)
