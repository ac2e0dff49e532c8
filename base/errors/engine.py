"""Codes of the native engine: memory, devices, libraries."""

from .code import ErrorCode


class EngineCode(ErrorCode):
    """The engine, the operating system, a GPU or a library refused something."""

    INTERNAL = ("internal", "A fault of Horovod itself, or of the operating system. Please report it.")
    OUT_OF_MEMORY = (
        "out-of-memory",
        "The host or the GPU has no memory left for what an operation needs. Free some, or use smaller tensors.",
    )
    TOO_MANY_OPEN_FILES = (
        "too-many-open-files",
        "This process or its host has too many open files. Raise the limit that the sentence names.",
    )
    SHARED_MEMORY = (
        "shared-memory",
        "Processes of one host can't share memory. Use one release and the same settings; see the container's limits.",
    )
    UNEXPECTED_DATA = (
        "unexpected-data",
        "A rank sent what no other one expects. Use one release and the same settings on all hosts, else report it.",
    )
    TAMPERED_DATA = (
        "tampered-data",
        "What came over a sealed connection (HOROVOD_WIRE) is not what was sent. Look between the hosts.",
    )
    MISSING_LIBRARY = (
        "missing-library",
        "A library that a setting asks for can't be loaded, or lacks something. Install it, or name the right file.",
    )
    NO_GPU = ("no-gpu", "There is no such GPU, no driver, or one that is too old. See what nvidia-smi says.")
    NO_NCCL = ("no-nccl", "NCCL is demanded and can't be used. Install it, name its file, or don't demand it.")
    GPU_FAILED = ("gpu-failed", "A call of the GPU's driver or compiler failed. See the kernel's log and nvidia-smi.")
    GPU_STALLED = (
        "gpu-stalled",
        "This rank's own GPU stands still. See what the framework has queued there, the kernel's log and nvidia-smi.",
    )
    NCCL_FAILED = ("nccl-failed", "A call of NCCL failed. Set NCCL_DEBUG=INFO to see more.")
    GLOO_FAILED = ("gloo-failed", "A collective of Gloo failed. Without HOROVOD_CPU_OPERATIONS=gloo it isn't used.")
    TIMELINE = (
        "timeline",
        "The file of the timeline can't be written, or is not complete. Check its disk and its path.",
    )
    STUCK_THREAD = (
        "stuck-thread",
        "A thread does not come back from an operation. What it may use is kept until the process ends.",
    )
    FORKED_CHILD = ("forked-child", "A forked child can't use its parent's world. Start it anew.")
