"""HOROVOD_THREAD_AFFINITY, checked and applied."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from error_codes import ends_with

from horovod.base.errors import SettingCode
from horovod.worker.runtime.devices import background_cpu
from horovod.worker.runtime.errors import StartError

ALLOWED = sorted(os.sched_getaffinity(0))


def test_one_entry_for_all_or_one_for_each() -> None:
    first, last = str(ALLOWED[0]), str(ALLOWED[-1])
    assert background_cpu((), 0, 2) == -1
    assert background_cpu((first,), 1, 2) == ALLOWED[0]
    assert [background_cpu((first, last), rank, 2) for rank in (0, 1)] == [ALLOWED[0], ALLOWED[-1]]


@pytest.mark.parametrize(
    ("entries", "facts"),
    [(("0", "0", "0"), (3, 2)), (("x",), ("'x'",)), ((str(max(ALLOWED) + 1),), (f"'{max(ALLOWED) + 1}'", *ALLOWED))],
)
def test_what_can_not_be_is_refused(entries: tuple[str, ...], facts: tuple[object, ...]) -> None:
    with pytest.raises(StartError, match=ends_with(SettingCode.INVALID_SETTING, "HOROVOD_THREAD_AFFINITY", *facts)):
        background_cpu(entries, 0, 2)


@pytest.mark.parametrize("entries", ["one", "each"])
def test_the_background_thread_runs_there(entries: str) -> None:
    """One processor for all ranks, or the first one for rank 0 and the last one for rank 1."""
    if entries == "each" and len(ALLOWED) == 1:
        pytest.skip("there is one processor, so ranks can't have different ones")
    expected = [ALLOWED[-1], ALLOWED[-1]] if entries == "one" else [ALLOWED[0], ALLOWED[-1]]
    code = """
import contextlib, os
import horovod.common.basics as hvd

hvd.init()
for task in os.listdir("/proc/self/task"):
    with contextlib.suppress(OSError):  # gRPC's threads come and go
        if open(f"/proc/self/task/{task}/comm").read().strip() == "hvd-progress":
            print(sorted(os.sched_getaffinity(int(task))))
"""
    setting = str(ALLOWED[-1]) if entries == "one" else f"{ALLOWED[0]},{ALLOWED[-1]}"
    ended = subprocess.run(
        [sys.executable, "-m", "horovod.launch", "-np", "2", sys.executable, "-c", code],
        env={**os.environ, "HOROVOD_THREAD_AFFINITY": setting},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}]<stdout>:[{expected[rank]}]" for rank in (0, 1)]
