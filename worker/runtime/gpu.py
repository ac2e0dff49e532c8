"""Which files the engine loads when the first GPU tensor comes: the NVIDIA driver's library and NCCL.

Nothing here loads anything, and no framework is imported: PyTorch's NCCL is found by where its package lies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from horovod.worker.settings import Settings

_PACKAGED_NCCL = Path("nvidia", "nccl", "lib", "libnccl.so.2")


def nccl_file(settings: Settings | None = None, path: Iterable[str] | None = None) -> str:
    """What HOROVOD_NCCL_LIBRARY names, or the file of an nvidia-nccl package, or "" for the system's.

    settings: those of the world; before there is one the environment decides. path: default sys.path.
    """
    given = os.environ.get("HOROVOD_NCCL_LIBRARY", "").strip() if settings is None else settings.nccl_library
    if given:
        return given
    for folder in sys.path if path is None else path:
        if (packaged := Path(folder or ".") / _PACKAGED_NCCL).is_file():
            return str(packaged.absolute())
    return ""


def cuda_file(settings: Settings | None = None) -> str:
    """What HOROVOD_CUDA_LIBRARY names, or "" for the system's."""
    given = os.environ.get("HOROVOD_CUDA_LIBRARY", "").strip() if settings is None else settings.cuda_library
    return given or ""


def gpu_obstacle(settings: Settings | None = None) -> str:
    """Why GPU tensors can't be communicated on this host and what to do, or ""; asks for no GPU."""
    from horovod import _core

    return _core.cuda_obstacle(cuda_file(settings)) or _core.nccl_version(nccl_file(settings))[1]
