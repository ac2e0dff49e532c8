"""What processes agree on before tensors travel, and what each process gets of its host."""

from __future__ import annotations

from dataclasses import dataclass

from horovod.base.setting import row

_BY_TOPOLOGY = "algorithms are chosen by size and topology"


@dataclass(frozen=True, init=False, repr=False, eq=False)  # a part of Settings, which alone is made
class TrainingSettings:
    """Negotiation, process sets, elastic training, processors and GPUs of a process."""

    cycle_time_ms: float = row(
        "HOROVOD_CYCLE_TIME",
        1.0,
        "extra time to wait for more tensors to batch; there is no fixed cycle",
        section="params",
        flag="--cycle-time-ms",
        unit="milliseconds",
        limits=(0, None),
        no_effect="there is no cycle, and tensors that become ready while data travels form the next batch",
    )
    cache_capacity: int = row(
        "HOROVOD_CACHE_CAPACITY",
        1024,
        "operations whose agreement is remembered",
        section="params",
        limits=(0, None),
        no_effect="this version always remembers the latest 4096 operations, and all that repeat",
    )
    dynamic_process_sets: bool = row(
        "HOROVOD_DYNAMIC_PROCESS_SETS",
        False,
        "process sets may be added and removed after hvd.init()",
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
        "0: ranks on one host use TCP with each other if the world spans several hosts",
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
        "processors for the background threads: one for each local rank, or a single one for all",
        section="library_options",
    )
    elastic: bool = row(
        "HOROVOD_ELASTIC",
        False,
        "1 if the size of the job may change. Scripts may read it",
        launcher=True,
    )
    elastic_timeout_seconds: float = row(
        "HOROVOD_ELASTIC_TIMEOUT",
        600.0,
        "how long the processes of an elastic job wait for others when too few are left. Then the job ends with an "
        "error",
        section="params",
        unit="seconds",
        limits=(0, None),
    )
    begin_anew: bool = row(
        "HOROVOD_ELASTIC_BEGIN_ANEW",
        False,
        "when an elastic job has lost all processes that held the committed state, it starts again from the beginning"
        " instead of ending with an error. For scripts that load a checkpoint of their own",
        section="params",
    )
    elastic_keeps_slots: bool = row(
        "HOROVOD_ELASTIC_KEEP_SLOTS",
        False,
        "on registered agents, an elastic job keeps its slots beyond -np (in a job file: beyond `min`) even if "
        "another job waits for slots",
        section="params",
    )
    elastic_leave_seconds: float = row(
        "HOROVOD_ELASTIC_LEAVE_SECONDS",
        60.0,
        "how long a process of an elastic job may run on, to its next commit, after SIGTERM has told it that its slot"
        " is taken back. Then SIGKILL follows",
        section="params",
        unit="seconds",
        limits=(1, None),
    )

    different_weights: str = row(
        "HOROVOD_DIFFERENT_WEIGHTS",
        "warn",
        "reaction if the first steps find that ranks train different weights, also with an optimizer that is not "
        "distributed: warn (and name the ranks), error (on all ranks, before the step) or ignore",
        section="library_options",
        choices=("warn", "error", "ignore"),
        agreed=True,
    )
    compare_weights_steps: int = row(
        "HOROVOD_COMPARE_WEIGHTS_STEPS",
        0,
        "compare the ranks' weights again after every so many steps; each comparison reads all weights once. 0: only "
        "in the first steps of a world and, with PyTorch, after load_state_dict",
        section="library_options",
        unit="steps",
        limits=(0, None),
        agreed=True,
    )

    pin_gpus: bool = row(
        "HOROVOD_PIN_GPUS",
        False,
        "the launcher gives each process one GPU by CUDA_VISIBLE_DEVICES. The process sees it as device 0. "
        "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count()) is right with and without it",
        section="library_options",
    )

    set_num_threads: bool = row(
        "HOROVOD_SET_NUM_THREADS",
        True,
        "the launcher sets OMP_NUM_THREADS and MKL_NUM_THREADS to each process's share of its host's cores, unless "
        "either is set already. 0: it sets neither",
        section="library_options",
    )

    adasum_overlap: bool = row(
        "HOROVOD_ADASUM_OVERLAP",
        False,
        "DistributedOptimizer(op=Adasum) takes the step of each parameter in backward(), as soon as its gradient is "
        "ready, and combines the changes meanwhile. Changing a gradient or a learning rate before step() is then an "
        "error",
        section="library_options",
    )
