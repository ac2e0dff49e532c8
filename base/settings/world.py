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
    size: int | None = row("HOROVOD_SIZE", None, "number of processes in the world", **COUNT)
    min_size: int | None = row(
        "HOROVOD_MIN_SIZE",
        None,
        "fewest processes that a world of this job may have, which makes the job elastic: it goes on without those "
        "that are lost, and takes in those that come; HOROVOD_SIZE is then how many its first world waits for",
        section="params",
        **COUNT,
    )
    max_size: int | None = row(
        "HOROVOD_MAX_SIZE",
        None,
        "most processes that a world of an elastic job may have (HOROVOD_MIN_SIZE); further ones wait for a place",
        section="params",
        **COUNT,
    )
    settle_seconds: float = row(
        "HOROVOD_ELASTIC_SETTLE_SECONDS",
        1.0,
        "how long no other process may have come before the first world of an elastic job begins with fewer than the "
        "most, and before a running one is told of newcomers",
        section="params",
        unit="seconds",
        limits=(0, 3600),
    )
    hung_seconds: float = row(
        "HOROVOD_ELASTIC_HUNG_SECONDS",
        3.0,
        "how long a process of an elastic job may be stopped, or its host out of reach of its peers and the "
        "coordinator, before the others go on without it; 0 is for ever",
        section="params",
        unit="seconds",
        limits=(0, 10_000_000),
        agreed=True,
    )
    cluster: str = row(
        "HOROVOD_CLUSTER",
        "auto",
        "whose variables tell a process that horovodrun did not start its rank: auto (those of the launcher that "
        "started it, where there are any), one of them, or none",
        section="params",
        choices=("auto", "none", *CLUSTERS),
    )
    start_timeout_seconds: float = row(
        "HOROVOD_START_TIMEOUT",
        30.0,
        "how long all processes may take to start and join",
        section="params",
        **PATIENCE,
    )
    keepalive_timeout_seconds: float = row(
        "HOROVOD_KEEPALIVE_TIMEOUT_SECONDS",
        20.0,
        "a connection between a process and the coordinator that answers no ping for so long counts as broken; the "
        "process then connects again",
        section="params",
        **PATIENCE,
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
        **PATIENCE,
    )
    web_listen: str | None = row(
        "HOROVOD_WEB_LISTEN",
        None,
        "where the launcher's coordinator shows its status page, /metrics, /healthz and /readyz, for example "
        ":9400 (on 127.0.0.1); the launcher prints the link that opens them, and where other hosts can connect, "
        "HOROVOD_WEB_TOKEN_FILE is needed",
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
    rank: int | None = row("HOROVOD_RANK", None, "rank that the launcher decided", **PLACE)
    local_rank: int | None = row("HOROVOD_LOCAL_RANK", None, "rank among the processes of this host", **PLACE)
    local_size: int | None = row("HOROVOD_LOCAL_SIZE", None, "number of processes on this host", launcher=True, **COUNT)
    cross_rank: int | None = row(
        "HOROVOD_CROSS_RANK", None, "index of this host among those with this local rank", **PLACE
    )
    cross_size: int | None = row(
        "HOROVOD_CROSS_SIZE", None, "number of hosts that have this local rank", launcher=True, **COUNT
    )
    incarnation: int = row(
        "HOROVOD_INCARNATION",
        0,
        "which of the processes that were started for this rank one after the other, from 1 on; 0: nobody counts them",
        launcher=True,
        limits=(0, (1 << 32) - 1),
    )
    spark_start_timeout_seconds: float = row(
        "HOROVOD_SPARK_START_TIMEOUT",
        600.0,
        "how long horovod.spark.run waits until Spark has started all tasks, where it gets no start_timeout",
        **PATIENCE,
    )
    spark_use_local_rank_gpu_index: bool = row(
        "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",
        False,
        "a process in a task of Spark uses the GPU whose number is its local rank, and not those that Spark gave to "
        "the task",
    )
    spark_gpus: tuple[str, ...] | None = row(
        "HOROVOD_SPARK_GPUS", None, "the addresses of the GPUs of this task of Spark", launcher=True
    )
    worker: int | None = row("HOROVOD_WORKER", None, "number of the job file's worker that runs this", **PLACE)
    workers: int | None = row("HOROVOD_WORKERS", None, "how many workers the job file has", launcher=True, **COUNT)
    hostname: str | None = row(
        "HOROVOD_HOSTNAME", None, "name of this host; processes of one name are local to each other", launcher=True
    )
