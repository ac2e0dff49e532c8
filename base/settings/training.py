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
        no_effect="there is no cycle: what gets ready while data travels is the next batch",
    )
    cache_capacity: int = row(
        "HOROVOD_CACHE_CAPACITY",
        1024,
        "operations whose agreement is remembered",
        section="params",
        limits=(0, None),
        no_effect="the latest 4096 agreements are remembered, and all on operations that repeat",
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
        "1 in processes of a job whose size may change, for programs that ask",
        launcher=True,
    )
    elastic_timeout_seconds: float = row(
        "HOROVOD_ELASTIC_TIMEOUT",
        600.0,
        "how long the members of an elastic job wait for others when too few are left",
        section="params",
        unit="seconds",
        limits=(0, None),
    )
    begin_anew: bool = row(
        "HOROVOD_ELASTIC_BEGIN_ANEW",
        False,
        "an elastic job of which all processes that held the committed state are gone begins anew, for scripts that "
        "read a checkpoint of their own; otherwise it ends with an error",
        section="params",
    )
    elastic_keeps_slots: bool = row(
        "HOROVOD_ELASTIC_KEEP_SLOTS",
        False,
        "on registered agents, an elastic job keeps slots beyond -np, or the `min` of a job file, also while another "
        "job waits for room",
        section="params",
    )
    elastic_leave_seconds: float = row(
        "HOROVOD_ELASTIC_LEAVE_SECONDS",
        60.0,
        "how long a process of an elastic job may go on, to its next commit, after SIGTERM has told it that its slot "
        "is taken back; SIGKILL follows",
        section="params",
        unit="seconds",
        limits=(1, None),
    )

    different_weights: str = row(
        "HOROVOD_DIFFERENT_WEIGHTS",
        "warn",
        "what follows when the first steps find that ranks train different weights: a warning that names them, an "
        "error on all ranks before they take the step, or nothing (ignore), also for an optimizer that is not "
        "distributed",
        section="library_options",
        choices=("warn", "error", "ignore"),
        agreed=True,
    )
    compare_weights_steps: int = row(
        "HOROVOD_COMPARE_WEIGHTS_STEPS",
        0,
        "weights are compared again every so many steps, which reads them once; 0: only in the first steps of a world "
        "and, with PyTorch, after load_state_dict",
        section="library_options",
        unit="steps",
        limits=(0, None),
        agreed=True,
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
