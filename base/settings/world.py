"""How a process finds its world, and its place there."""

from __future__ import annotations

from dataclasses import dataclass

from horovod.base.setting import COUNT, PATIENCE, PLACE, row

# Launchers other than ours, each a module of horovod.rendezvous, in the order in which they are asked: the one that
# started the process itself before those that started its launcher, whose variables the process inherits. torchrun is
# started by all of them, one for each host, and starts none of them. An mpirun inside of a Slurm allocation leaves
# Slurm's variables of the step in which its own helpers run; a srun with PMI sets the variables of both, and Slurm's
# say more. RANK and WORLD_SIZE that were set by hand (pytorch) come last.
CLUSTERS = ("torchrun", "jsrun", "openmpi", "slurm", "pmi", "pbs", "pytorch", "kubernetes")


@dataclass(frozen=True, init=False, repr=False, eq=False)  # a part of Settings, which alone is made
class WorldSettings:
    """How a process finds its coordinator and proves who it is, and the place in the world that a launcher gave it."""

    coordinator: str | None = row(
        "HOROVOD_COORDINATOR",
        None,
        "address of the coordinator, or of several that share a store, separated by commas. Without it the process "
        "trains alone, in a world of one",
        kind="addresses",
    )
    job: str = row(
        "HOROVOD_JOB", "default", "name of the job. Processes with the same name form one world", section="params"
    )
    token: str | None = row(
        "HOROVOD_TOKEN",
        None,
        "bearer token for the coordinator. Without it, on a loopback address, the token of a coordinator of the same "
        "user is found automatically",
        kind="token",
        secret=True,
    )
    token_file: str | None = row("HOROVOD_TOKEN_FILE", None, "file that holds the token (see HOROVOD_TOKEN)")
    tls_ca: str | None = row(
        "HOROVOD_TLS_CA",
        None,
        "certificate file (PEM) of the authority that signed the coordinator's certificate. If it is set, all calls "
        "use TLS",
    )
    tls_cert: str | None = row(
        "HOROVOD_TLS_CERT",
        None,
        "certificate file (PEM) of this process, for a coordinator that requires one. It is read again when it changes",
    )
    tls_key: str | None = row(
        "HOROVOD_TLS_KEY",
        None,
        "private key file (PEM) of HOROVOD_TLS_CERT",
    )
    tls_server_name: str | None = row(
        "HOROVOD_TLS_SERVER_NAME",
        None,
        "name in the coordinator's certificate, if it differs from the host in HOROVOD_COORDINATOR",
    )
    size: int | None = row("HOROVOD_SIZE", None, "number of processes in the world", **COUNT)
    min_size: int | None = row(
        "HOROVOD_MIN_SIZE",
        None,
        "smallest size of a world of this job. It makes the job elastic: the job continues when processes are lost, "
        "and new ones may join. HOROVOD_SIZE is then the size that the first world waits for",
        section="params",
        **COUNT,
    )
    max_size: int | None = row(
        "HOROVOD_MAX_SIZE",
        None,
        "largest size of a world of an elastic job (see HOROVOD_MIN_SIZE). More processes wait for a place",
        section="params",
        **COUNT,
    )
    settle_seconds: float = row(
        "HOROVOD_ELASTIC_SETTLE_SECONDS",
        1.0,
        "how long to wait for another process after the last one came. Then the first world of an elastic job starts "
        "below its largest size, and a running world learns about new processes",
        section="params",
        unit="seconds",
        limits=(0, 3600),
    )
    hung_seconds: float = row(
        "HOROVOD_ELASTIC_HUNG_SECONDS",
        3.0,
        "how long the others in an elastic job wait for a process that is stopped, or whose host neither they nor the"
        " coordinator can reach. Then they continue without it. 0: wait without limit",
        section="params",
        unit="seconds",
        limits=(0, 10_000_000),
        agreed=True,
    )
    cluster: str = row(
        "HOROVOD_CLUSTER",
        "auto",
        "launcher whose variables give the rank if horovodrun did not start the process: auto (detect it), a "
        "launcher's name, or none (use no launcher's variables)",
        section="params",
        choices=("auto", "none", *CLUSTERS),
    )
    start_timeout_seconds: float = row(
        "HOROVOD_START_TIMEOUT",
        30.0,
        "time limit for all processes to start and join",
        section="params",
        **PATIENCE,
    )
    keepalive_timeout_seconds: float = row(
        "HOROVOD_KEEPALIVE_TIMEOUT_SECONDS",
        20.0,
        "how long a connection between a process and the coordinator may leave a ping unanswered. Then it counts as "
        "broken, and the process reconnects",
        section="params",
        **PATIENCE,
    )
    relay: bool = row(
        "HOROVOD_RELAY",
        True,
        "processes that an agent started reach the coordinator through the agent's connection. They use connections "
        "of their own if it fails, or with 0",
        section="params",
    )
    relay_socket: str | None = row(
        "HOROVOD_RELAY_SOCKET", None, "socket on which the agent of this host relays", launcher=True
    )
    reattach_grace_seconds: float = row(
        "HOROVOD_REATTACH_GRACE_SECONDS",
        10.0,
        "how long a process may be without a connection to the coordinator before it counts as lost, unless others "
        "see that it is alive. Also how long an operation that is new to the ranks waits for the coordinator",
        section="params",
        **PATIENCE,
    )
    web_listen: str | None = row(
        "HOROVOD_WEB_LISTEN",
        None,
        "address on which the launcher's coordinator serves its status page, /metrics, /healthz and /readyz, for "
        "example :9400 (on 127.0.0.1). The launcher prints a link to it. An address that other hosts can reach also "
        "needs HOROVOD_WEB_TOKEN_FILE",
        section="params",
        kind="address",
    )
    web_token_file: str | None = row(
        "HOROVOD_WEB_TOKEN_FILE",
        None,
        "file with the bearer token for the launcher's status page and /metrics. It is not the token of the processes"
        " (HOROVOD_TOKEN)",
        section="params",
    )
    report_seconds: float = row(
        "HOROVOD_REPORT_SECONDS",
        10.0,
        "how often a process sends its counters to the coordinator, for metrics and the status page. Worlds of "
        "thousands send them less often. 0: never",
        section="params",
        unit="seconds",
        limits=(0, 10_000_000),
    )
    rank: int | None = row("HOROVOD_RANK", None, "rank of this process", **PLACE)
    local_rank: int | None = row("HOROVOD_LOCAL_RANK", None, "rank of this process among those on its host", **PLACE)
    local_size: int | None = row("HOROVOD_LOCAL_SIZE", None, "number of processes on this host", launcher=True, **COUNT)
    cross_rank: int | None = row(
        "HOROVOD_CROSS_RANK", None, "number of this host among the hosts that have this local rank", **PLACE
    )
    cross_size: int | None = row(
        "HOROVOD_CROSS_SIZE", None, "number of hosts that have this local rank", launcher=True, **COUNT
    )
    incarnation: int = row(
        "HOROVOD_INCARNATION",
        0,
        "1 in the first process that was started for this rank, 2 in the one that replaced it, and so on. 0: not "
        "counted",
        launcher=True,
        limits=(0, (1 << 32) - 1),
    )
    spark_start_timeout_seconds: float = row(
        "HOROVOD_SPARK_START_TIMEOUT",
        600.0,
        "how long horovod.spark.run waits for Spark to start all tasks, unless it is called with start_timeout",
        **PATIENCE,
    )
    spark_use_local_rank_gpu_index: bool = row(
        "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",
        False,
        "a process in a Spark task uses the GPU whose number is its local rank, instead of the GPUs that Spark "
        "assigned to the task",
    )
    spark_gpus: tuple[str, ...] | None = row(
        "HOROVOD_SPARK_GPUS", None, "addresses of the GPUs that Spark assigned to this task", launcher=True
    )
    worker: int | None = row(
        "HOROVOD_WORKER", None, "number of the job file's worker to which this process belongs", **PLACE
    )
    workers: int | None = row("HOROVOD_WORKERS", None, "number of workers in the job file", launcher=True, **COUNT)
    hostname: str | None = row(
        "HOROVOD_HOSTNAME",
        None,
        "name of this host. Processes with the same name are local to each other",
        launcher=True,
    )
