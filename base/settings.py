"""The one table of settings: a row (setting.py) says all that is known about one.

The table is the class `Settings` itself, so that code reads `settings.size` with a type. What else depends on a setting
is derived from `SETTINGS`: its flag and its key in `horovodrun`, what the ranks must agree on, the engine's options and
docs/settings.md. An explicit argument beats the environment; flags and files are the launcher's business, which turns
them into environment variables of the processes. Values are checked by their row, before a process contacts anybody:
a bad one is a ValueError whose sentence names the variable, flag or key, the value and what is expected. The engine
checks its options again, as tests give it some that are in no table. Importing this module reads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod.base.setting import Setting, environment_text, row, rows

# Why settings of earlier versions are accepted and change nothing; each completes "HOROVOD_... has no effect: ...".
_NO_TUNING = "there are no cycles to tune: batches form by themselves, and algorithms follow from size and topology"
_BY_TOPOLOGY = "algorithms are chosen by size and topology"
_NO_MPI = "this version of Horovod has no MPI"
_COORDINATOR = "processes meet at a coordinator, which the launcher starts or HOROVOD_COORDINATOR names"

MAX_SIZE = 1 << 16  # what a coordinator accepts (horovod.coordinator.core.world.checks; a test compares the two)
WIRE_MODES = ("plain", "signed", "encrypted")  # in the order of csrc/base/config.h
GPU_OPERATIONS = ("auto", "nccl", "host", "mpi", "gloo")

_PATIENCE: dict[str, Any] = {"unit": "seconds", "limits": (0.001, 10_000_000)}
_PLACE: dict[str, Any] = {"limits": (0, MAX_SIZE - 1), "launcher": True}
_COUNT: dict[str, Any] = {"limits": (1, MAX_SIZE)}
_TUNING: dict[str, Any] = {"section": "autotune", "no_effect": _NO_TUNING}


def _gpu_row(operation: str) -> Any:
    help_ = f"HOROVOD_GPU_OPERATIONS for {operation.lower()} alone"
    return row(f"HOROVOD_GPU_{operation}", None, help_, section="library_options", choices=GPU_OPERATIONS, agreed=True)


def _old_row(env: str, default: Any, why: str, **more: Any) -> Any:
    return row(env, default, "accepted; has no effect", no_effect=why, **more)


@dataclass(frozen=True)
class Settings:
    """All settings of one process, checked. None means not given."""

    # -- which world ---------------------------------------------------------------------------------------------------
    coordinator: str | None = row(
        "HOROVOD_COORDINATOR",
        None,
        "host:port of the coordinator, or of several that share a store, with commas between; without one the process "
        "is a world of one",
        kind="addresses",
    )
    job: str = row("HOROVOD_JOB", "default", "name of the job; processes of one name form one world", section="params")
    token: str | None = row(
        "HOROVOD_TOKEN",
        None,
        "bearer token that the coordinator asks for; without one, on a loopback address, that of a coordinator of the "
        "same user is found",
        kind="token",
        secret=True,
    )
    token_file: str | None = row("HOROVOD_TOKEN_FILE", None, "file that holds the token, as HOROVOD_TOKEN")
    tls_ca: str | None = row(
        "HOROVOD_TLS_CA",
        None,
        "file of the certificate authority (PEM) by which the coordinator is known; with it all calls go over TLS",
    )
    tls_cert: str | None = row(
        "HOROVOD_TLS_CERT",
        None,
        "file of this process's certificate (PEM), for a coordinator that asks for one; taken anew when it changes",
    )
    tls_key: str | None = row(
        "HOROVOD_TLS_KEY",
        None,
        "file of the private key of HOROVOD_TLS_CERT (PEM)",
    )
    tls_server_name: str | None = row(
        "HOROVOD_TLS_SERVER_NAME",
        None,
        "name in the coordinator's certificate, where it is not that of the address",
    )
    size: int | None = row("HOROVOD_SIZE", None, "number of processes in the world", **_COUNT)
    cluster: str = row(
        "HOROVOD_CLUSTER",
        "auto",
        "whose variables tell a process that horovodrun did not start its rank: auto (those of the launcher that "
        "started it, where there are any), one of them, or none",
        section="params",
        choices=(
            *("auto", "none"),
            *("torchrun", "openmpi", "jsrun", "slurm", "pmi", "pbs", "pytorch", "kubernetes"),
        ),
    )
    start_timeout_seconds: float = row(
        "HOROVOD_START_TIMEOUT",
        30.0,
        "how long all processes may take to start and join",
        section="params",
        **_PATIENCE,
    )
    keepalive_timeout_seconds: float = row(
        "HOROVOD_KEEPALIVE_TIMEOUT_SECONDS",
        20.0,
        "a connection between a process and the coordinator that answers no ping for so long counts as broken; the "
        "process then connects again",
        section="params",
        **_PATIENCE,
    )
    relay: bool = row(
        "HOROVOD_RELAY",
        True,
        "processes that an agent has started speak to coordinators over the agent's connection, and over connections "
        "of their own when that is gone",
        section="params",
    )
    relay_socket: str | None = row("HOROVOD_RELAY_SOCKET", None, "where the agent of this host relays", launcher=True)
    reattach_grace_seconds: float = row(
        "HOROVOD_REATTACH_GRACE_SECONDS",
        10.0,
        "how long a process may be without a connection to the coordinator before the others count it as lost, unless "
        "it is seen to live, and how long a first-time agreement waits for the coordinator",
        section="params",
        **_PATIENCE,
    )
    web_listen: str | None = row(
        "HOROVOD_WEB_LISTEN",
        None,
        "where the launcher's coordinator shows its status page, /metrics, /healthz and /readyz, for example "
        "127.0.0.1:9400; where other hosts can connect, HOROVOD_WEB_TOKEN_FILE is needed",
        section="params",
        kind="address",
    )
    web_token_file: str | None = row(
        "HOROVOD_WEB_TOKEN_FILE",
        None,
        "file of the secret that readers of the launcher's status page and /metrics send as a bearer token; it is not "
        "the processes' token",
        section="params",
    )
    report_seconds: float = row(
        "HOROVOD_REPORT_SECONDS",
        10.0,
        "how often a process tells the coordinator its counters, for metrics and the status page (a world of thousands "
        "less often); 0 is never",
        section="params",
        unit="seconds",
        limits=(0, 10_000_000),
    )
    rank: int | None = row("HOROVOD_RANK", None, "rank that the launcher decided", **_PLACE)
    local_rank: int | None = row("HOROVOD_LOCAL_RANK", None, "rank among the processes of this host", **_PLACE)
    local_size: int | None = row(
        "HOROVOD_LOCAL_SIZE", None, "number of processes on this host", launcher=True, **_COUNT
    )
    cross_rank: int | None = row(
        "HOROVOD_CROSS_RANK", None, "index of this host among those with this local rank", **_PLACE
    )
    cross_size: int | None = row(
        "HOROVOD_CROSS_SIZE", None, "number of hosts that have this local rank", launcher=True, **_COUNT
    )
    worker: int | None = row("HOROVOD_WORKER", None, "number of the job file's worker that runs this", **_PLACE)
    workers: int | None = row("HOROVOD_WORKERS", None, "how many workers the job file has", launcher=True, **_COUNT)
    hostname: str | None = row(
        "HOROVOD_HOSTNAME", None, "name of this host; processes of one name are local to each other", launcher=True
    )

    # -- data plane ----------------------------------------------------------------------------------------------------
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
        "there when Horovod was built)",
        section="library_options",
        choices=("native", "gloo", "mpi", "ccl"),
        agreed=True,
    )
    network_interfaces: tuple[str, ...] = row(
        "HOROVOD_NETWORK_INTERFACES",
        (),
        "network interfaces for TCP; without it every one that is up, but loopback and bridges of containers",
        section="params",
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
        **_COUNT,
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
        **_PATIENCE,
    )
    unreachable_timeout_seconds: float = row(
        "HOROVOD_UNREACHABLE_TIMEOUT_SECONDS",
        20.0,
        "how long the host of a peer may owe the acknowledgement of something over TCP before the peer counts as lost; "
        "the host of a process that is stopped still acknowledges",
        section="params",
        engine="unreachable_timeout_ms",
        engine_scale=1000,
        **_PATIENCE,
    )

    # -- negotiation and process sets ----------------------------------------------------------------------------------
    cycle_time_ms: float = row(
        "HOROVOD_CYCLE_TIME",
        1.0,
        "extra time to wait for more tensors to batch; there is no fixed cycle",
        section="params",
        flag="--cycle-time-ms",
        unit="milliseconds",
        limits=(0, None),
        no_effect="there is no cycle: what gets ready while data travels is the next batch",
    )
    cache_capacity: int = row(
        "HOROVOD_CACHE_CAPACITY",
        1024,
        "operations whose agreement is remembered",
        section="params",
        limits=(0, None),
        no_effect="every agreement is remembered",
    )
    dynamic_process_sets: bool = row(
        "HOROVOD_DYNAMIC_PROCESS_SETS",
        False,
        "process sets may be added and removed after init",
        section="params",
        agreed=True,
    )
    disable_group_fusion: bool = row(
        "HOROVOD_DISABLE_GROUP_FUSION",
        False,
        "a grouped operation is not fused with others",
        no_effect="a grouped operation may share a batch with others, whose results stay the same",
    )
    hierarchical_allreduce: bool | None = row(
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        None,
        "0: ranks of one host use TCP between each other where the world spans several",
        section="params",
        agreed=True,
    )
    hierarchical_allgather: bool | None = row(
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        None,
        "gather inside each host first; without it chosen by topology",
        section="params",
        no_effect=_BY_TOPOLOGY,
    )
    torus_allreduce: bool | None = row(
        "HOROVOD_TORUS_ALLREDUCE",
        None,
        "reduce in a torus of hosts and local ranks",
        section="params",
        no_effect=_BY_TOPOLOGY,
    )
    thread_affinity: tuple[str, ...] = row(
        "HOROVOD_THREAD_AFFINITY",
        (),
        "processors of the background threads: one for each local rank, or one for all",
        section="library_options",
    )
    elastic: bool = row(
        "HOROVOD_ELASTIC",
        False,
        "set by elastic launchers",
        launcher=True,
        no_effect="elastic jobs are not available yet",
    )
    elastic_timeout_seconds: float = row(
        "HOROVOD_ELASTIC_TIMEOUT",
        600.0,
        "how long a changed world may take to form again",
        section="params",
        unit="seconds",
        limits=(0, None),
        no_effect="HOROVOD_START_TIMEOUT says how long a changed world may take",
    )

    pin_gpus: bool = row(
        "HOROVOD_PIN_GPUS",
        False,
        "the launcher gives each process one GPU by CUDA_VISIBLE_DEVICES, which the process then knows as device 0: "
        "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count()) is right with and without it",
        section="library_options",
    )

    set_num_threads: bool = row(
        "HOROVOD_SET_NUM_THREADS",
        True,
        "the launcher sets OMP_NUM_THREADS and MKL_NUM_THREADS, where neither is set, to each process's share of this "
        "host's cores; 0 leaves them alone",
        section="library_options",
    )

    adasum_overlap: bool = row(
        "HOROVOD_ADASUM_OVERLAP",
        False,
        "DistributedOptimizer(op=Adasum) takes the step of each parameter in backward(), as soon as its gradient is "
        "made, and combines the changes meanwhile; a gradient or a learning rate that changes before step() is an "
        "error then",
        section="library_options",
    )

    # -- what one sees -------------------------------------------------------------------------------------------------
    log_level: str = row(
        "HOROVOD_LOG_LEVEL",
        "warning",
        "least important message that is logged",
        section="logging",
        key="level",
        choices=("trace", "debug", "info", "warning", "error", "fatal"),
    )
    log_hide_time: bool = row(
        "HOROVOD_LOG_HIDE_TIME",
        False,
        "log lines carry no time",
        section="logging",
        flag="--log-without-timestamp",
        key="with_timestamp",
        yaml_inverted=True,
    )
    log_format: str = row(
        "HOROVOD_LOG_FORMAT",
        "text",
        "how log lines are written: text, or json, one object a line with job, epoch and rank",
        section="logging",
        choices=("text", "json"),
    )
    timeline: str | None = row(
        "HOROVOD_TIMELINE",
        None,
        "file in which rank 0 writes the timeline, or DYNAMIC to start it from the program",
        section="timeline",
        flag="--timeline-filename",
    )
    timeline_mark_cycles: bool = row(
        "HOROVOD_TIMELINE_MARK_CYCLES", False, "mark each batch in the timeline", section="timeline"
    )
    stall_check_disable: bool = row(  # this and the next two are for the coordinator, which watches for stalls
        "HOROVOD_STALL_CHECK_DISABLE",
        False,
        "no warning about tensors that some ranks did not submit",
        section="stall_check",
        flag="--no-stall-check",
        key="enabled",
        yaml_inverted=True,
        agreed=True,
    )
    stall_check_seconds: float = row(
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        60.0,
        "warn about a tensor that waits longer than this; 0 is never",
        section="stall_check",
        flag="--stall-check-warning-time-seconds",
        unit="seconds",
        limits=(0, None),
        agreed=True,
    )
    stall_shutdown_seconds: float = row(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        0.0,
        "shut down when a tensor waits longer than this; 0 is never, and so is less than the time of the warning",
        section="stall_check",
        flag="--stall-check-shutdown-time-seconds",
        unit="seconds",
        limits=(0, None),
        agreed=True,
    )

    deadlock_check_disable: bool = row(  # for the coordinator as well
        "HOROVOD_DEADLOCK_CHECK_DISABLE",
        False,
        "ranks that wait for each other in different operations get no error",
        section="stall_check",
        flag="--no-deadlock-check",
        key="deadlock_enabled",
        yaml_inverted=True,
        agreed=True,
    )

    # -- tuning --------------------------------------------------------------------------------------------------------
    autotune: bool = row("HOROVOD_AUTOTUNE", False, "tune parameters while training", key="enabled", **_TUNING)
    autotune_log: str | None = row(
        "HOROVOD_AUTOTUNE_LOG", None, "CSV file of what autotune tried", flag="--autotune-log-file", **_TUNING
    )
    autotune_warmup_samples: int = row(
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3, "samples that autotune throws away first", limits=(0, None), **_TUNING
    )
    autotune_steps_per_sample: int = row(
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10, "steps in one sample of autotune", limits=(0, None), **_TUNING
    )
    autotune_bayes_opt_max_samples: int = row(
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20, "samples after which autotune stops", limits=(0, None), **_TUNING
    )
    autotune_gaussian_process_noise: float = row(
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        0.8,
        "noise that autotune assumes in its samples",
        limits=(0, 1),
        **_TUNING,
    )

    # -- backends ------------------------------------------------------------------------------------------------------
    gpu_operations: str = row(
        "HOROVOD_GPU_OPERATIONS",
        "auto",
        "how GPU tensors travel: auto (NCCL where all ranks have it and it can do what is asked, otherwise through the "
        "host's memory), nccl (the same, but a rank without NCCL is an error) or host (always through the host's "
        "memory, by what HOROVOD_CPU_OPERATIONS says; mpi and gloo mean the same)",
        section="library_options",
        choices=GPU_OPERATIONS,
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
        no_effect=_NO_MPI,
    )

    # -- of earlier versions -------------------------------------------------------------------------------------------
    controller: str | None = _old_row("HOROVOD_CONTROLLER", None, _COORDINATOR, choices=("mpi", "gloo"))
    gloo_rendezvous_addr: str | None = _old_row("HOROVOD_GLOO_RENDEZVOUS_ADDR", None, _COORDINATOR)
    gloo_rendezvous_port: int | None = _old_row("HOROVOD_GLOO_RENDEZVOUS_PORT", None, _COORDINATOR)
    gloo_iface: str | None = _old_row(
        "HOROVOD_GLOO_IFACE", None, "HOROVOD_NETWORK_INTERFACES (--network-interfaces) names the interfaces"
    )
    adasum_mpi_chunk_size_bytes: int = _old_row("HOROVOD_ADASUM_MPI_CHUNK_SIZE", 1 << 30, _NO_MPI)
    ccl_cache: bool = _old_row("HOROVOD_CCL_CACHE", False, "this version of Horovod has no oneCCL")
    disable_nvtx_ranges: bool = _old_row("HOROVOD_DISABLE_NVTX_RANGES", False, "there are no NVTX ranges")
    enable_xla_ops: bool = _old_row("HOROVOD_ENABLE_XLA_OPS", False, "XLA compiles the operations without it")


SETTINGS: tuple[Setting, ...] = rows(Settings)
ROWS: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


def variables(**values: Any) -> dict[str, str]:
    """Environment variables for settings by name."""
    return {ROWS[name].env: environment_text(value) for name, value in values.items()}


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of `environ` that is no setting but has almost the name of one."""
    known = {setting.env.removeprefix("HOROVOD_") for setting in SETTINGS}
    given = {name.removeprefix("HOROVOD_") for name in environ if name.startswith("HOROVOD_")}
    sentences = []
    for name in sorted(given - known):
        from difflib import get_close_matches  # seldom needed

        if close := get_close_matches(name, known, n=1, cutoff=0.85):
            sentences.append(f"HOROVOD_{name} is not a setting; did you mean HOROVOD_{close[0]}?")
    return sentences


def resolve(environ: Mapping[str, str] | None = None, explicit: Mapping[str, Any] | None = None) -> Settings:
    """Settings from explicit arguments (None means not given), then `environ` (default: the process's), then defaults.

    An empty variable counts as unset. Raises ValueError for a bad value and for an argument that is not in the table.
    """
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in (explicit or {}).items() if value is not None}
    if "token" in given:
        environ = {name: value for name, value in environ.items() if name != ROWS["token_file"].env}
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.name in given:
            values[setting.name] = setting.check(given.pop(setting.name))
        elif text := setting.text(environ):
            values[setting.name] = setting.parse(text)
    if given:
        known = ", ".join(setting.name for setting in SETTINGS)
        raise ValueError(f"There is no setting named {', '.join(sorted(given))}; settings are: {known}.")
    return Settings(**values)
