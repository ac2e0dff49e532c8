"""Which GPU a rank uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.base.errors import TrainingCode, coded


def gpu_of_rank() -> int:
    """The GPU that Spark has given to the task, or else the one with the number of the rank on its host."""
    from horovod.common import basics
    from horovod.spark.task import get_available_devices

    given = get_available_devices()
    return int(given[0]) if given else basics.local_rank()


def same_devices(kind: str, allgather: Callable[[str], list[Any]]) -> None:
    """RuntimeError, on all ranks, unless all train on devices of one kind."""
    kinds = allgather(kind)
    if len(set(kinds)) > 1:
        found = ", ".join(f"rank {rank} has {one}" for rank, one in enumerate(kinds))
        sentence = f"ranks would train on unlike devices: {found}. Give all tasks a GPU, or pass use_gpu=False."
        raise RuntimeError(coded(TrainingCode.CONTRADICTORY_ARGUMENTS, sentence))
