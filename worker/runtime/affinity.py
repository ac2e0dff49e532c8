"""HOROVOD_THREAD_AFFINITY: which processor the engine's background thread of each local rank runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from horovod.base.errors import SettingCode, coded
from horovod.worker.runtime.errors import StartError


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
