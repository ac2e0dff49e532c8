"""Which files the engine loads when the first GPU tensor comes, and what for: the NVIDIA driver's library, NCCL, and
(when there are small ones to pack) NVIDIA's run-time compiler.

Nothing here loads anything, and no framework is imported: PyTorch's files are found by where their packages lie.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from horovod.base.errors import SettingCode, coded
from horovod.base.settings import ROWS, Settings
from horovod.worker.runtime.errors import StartError

_PACKAGED_NCCL = (Path("nvidia", "nccl", "lib", "libnccl.so.2"),)
# The older version comes first: older drivers understand what it makes.
_PACKAGED_NVRTC = (
    Path("nvidia", "cuda_nvrtc", "lib", "libnvrtc.so.12"),
    Path("nvidia", "cu13", "lib", "libnvrtc.so.13"),
)


def nccl_file(settings: Settings | None = None, path: Iterable[str] | None = None) -> str:
    """What HOROVOD_NCCL_LIBRARY names, or the file of an nvidia-nccl package, or "" for the system's.

    settings: those of the world; before there is one the environment decides. path: default sys.path.
    """
    given = ROWS["nccl_library"].text(os.environ) if settings is None else settings.nccl_library
    return given or _packaged(_PACKAGED_NCCL, path)


def nvrtc_file(settings: Settings | None = None, path: Iterable[str] | None = None) -> str:
    """What HOROVOD_NVRTC_LIBRARY names, or the file of an nvidia-cuda-nvrtc package, or "" for the system's."""
    given = ROWS["nvrtc_library"].text(os.environ) if settings is None else settings.nvrtc_library
    return given or _packaged(_PACKAGED_NVRTC, path)


def _packaged(names: Iterable[Path], path: Iterable[str] | None) -> str:
    folders = [Path(folder or ".") for folder in (sys.path if path is None else path)]
    return next((str((f / name).absolute()) for name in names for f in folders if (f / name).is_file()), "")


def cuda_file(settings: Settings | None = None) -> str:
    """What HOROVOD_CUDA_LIBRARY names, or "" for the system's."""
    given = ROWS["cuda_library"].text(os.environ) if settings is None else settings.cuda_library
    return given or ""


# Operations that can be told apart, by number (csrc/collectives/op_spec.h).
GPU_OPERATION_NAMES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


def gpu_operations(settings: Settings) -> dict[str, int]:
    """Which operations demand NCCL and which go through the host's memory, as bits for csrc/base/config.h.

    NCCL's connections are not sealed, so with HOROVOD_WIRE only who demands it gets it.
    """
    by_itself = ("nccl", "auto") if settings.wire == "plain" else ("nccl",)
    wanted = [getattr(settings, f"gpu_{operation}") or settings.gpu_operations for operation in GPU_OPERATION_NAMES]
    demanded = sum(1 << number for number, choice in enumerate(wanted) if choice == "nccl")
    by_host = sum(1 << number for number, choice in enumerate(wanted) if choice not in by_itself)
    return {"nccl_operations": demanded, "host_operations": by_host}


def gpu_obstacle(settings: Settings | None = None) -> str:
    """Why GPU tensors can't be communicated on this host and what to do, or ""; asks for no GPU.

    settings: those of the world; without them NCCL is not demanded, and a driver is enough.
    """
    from horovod import _core

    if obstacle := _core.cuda_obstacle(cuda_file(settings)):
        return obstacle
    if settings is None or not gpu_operations(settings)["nccl_operations"]:
        return ""
    obstacle = _core.nccl_version(nccl_file(settings))[1]
    return f"HOROVOD_GPU_OPERATIONS or one like it demands NCCL. {obstacle}" if obstacle else ""


# HOROVOD_THREAD_AFFINITY: which processor the engine's background thread of each local rank runs on.


def background_cpu(entries: Sequence[str], local_rank: int, local_size: int) -> int:
    """The processor for `local_rank`, or -1 when none is asked for.

    `entries` has one processor number for each local rank, or a single one for all of them. StartError for anything
    else, and for processors that this process may not use.
    """
    if not entries:
        return -1
    if len(entries) not in (1, local_size):
        raise StartError(
            coded(
                SettingCode.INVALID_SETTING,
                f"HOROVOD_THREAD_AFFINITY names {len(entries)} processors for {local_size} ranks on this host; give "
                "one for each local rank, or one for all.",
            )
        )
    entry = entries[local_rank] if len(entries) > 1 else entries[0]
    allowed = os.sched_getaffinity(0)
    if not entry.isdecimal() or int(entry) not in allowed:
        raise StartError(
            coded(
                SettingCode.INVALID_SETTING,
                f"HOROVOD_THREAD_AFFINITY asks for processor '{entry}', which this process may not use; it may use "
                f"{', '.join(map(str, sorted(allowed)))}.",
            )
        )
    return int(entry)
