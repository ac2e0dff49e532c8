"""How many threads each process of a host computes with, and which GPUs it sees."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.worker.agent.supervisor import Slot


# How many threads each process of a host computes with (HOROVOD_SET_NUM_THREADS).
#
# PyTorch, NumPy and others start as many threads as they see cores, each process for itself. Two processes on two
# cores then have four threads that wait for each other at every step, which takes several times as long as one thread
# each. So a launcher or an agent gives each process its share of the cores that the launcher or agent may use. These
# are the cores in its affinity mask (hyperthreads of one core count once, as in PyTorch's own default for a single
# process), and no more than the processor time that its control group allows.
#
# OMP_NUM_THREADS is for OpenMP, which PyTorch and OpenBLAS follow as well; OPENBLAS_NUM_THREADS, which would only
# repeat it, is left alone. MKL_NUM_THREADS is for MKL builds that do not use OpenMP. Where a user has set one of the
# two, neither is changed.

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def thread_variables(environ: Mapping[str, str], processes: int, cores: float | None = None) -> dict[str, str]:
    """The variables for each of `processes` on this host; none where `environ` has one of them already.

    cores: how many cores the processes share, by default all that this process may use.
    """
    if any(environ.get(name, "").strip() for name in VARIABLES):
        return {}
    share = int((usable_cores() if cores is None else cores) // processes)
    return dict.fromkeys(VARIABLES, str(max(1, share)))


def usable_cores(processors: Iterable[int] | None = None, root: Path = Path("/")) -> float:
    """How many cores this process may use; a fraction where the quota of its control group is a fraction.

    processors: used instead of the affinity mask. root: the folder that holds /proc and /sys.
    """
    allowed = os.sched_getaffinity(0) if processors is None else set(processors)
    cores = len({_core(root, processor) for processor in allowed})
    return min([float(max(cores, 1)), *_quotas(root)])


def _core(root: Path, processor: int) -> tuple[str, str]:
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    try:
        return (topology / "physical_package_id").read_text().strip(), (topology / "core_id").read_text().strip()
    except OSError:  # the kernel does not tell its core, so the processor counts as a core of its own
        return "processor", str(processor)


def _quotas(root: Path) -> list[float]:
    """How many processors' time each control group above this process allows (cgroup v2 and v1)."""
    found = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:
                found += _along(root / "sys/fs/cgroup", path, _quota_v2)
            elif "cpu" in controllers.split(","):
                found += _along(root / "sys/fs/cgroup" / controllers, path, _quota_v1)
                found += _along(root / "sys/fs/cgroup/cpu", path, _quota_v1)
    return found


def _along(mount: Path, path: str, quota: Callable[[Path], float | None]) -> list[float]:
    """The quotas of a group and of all groups above it. A container often sees the outermost group only."""
    group = mount / path.lstrip("/")
    groups = [group, *(parent for parent in group.parents if parent == mount or mount in parent.parents)]
    return [found for one in groups if (found := quota(one)) is not None]


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # "max", which is no number, means that there is no limit
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        quota = float((group / "cpu.cfs_quota_us").read_text())
        return quota / float((group / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError):
        return None


# One GPU for each training process of a host (HOROVOD_PIN_GPUS): the agent sets CUDA_VISIBLE_DEVICES for each slot.
#
# A process sees the devices that CUDA_VISIBLE_DEVICES names, in that order, and numbers them from 0. So one that is
# pinned has one device, number 0, whatever its local rank: a script that says torch.cuda.set_device(hvd.local_rank())
# needs to see all GPUs and is to be started without pinning, which is the default. One that says hvd.local_rank() %
# torch.cuda.device_count() takes the same GPU with and without pinning. No order of the list serves the first script:
# its device would have to be both number 0 and the number of the local rank, and CUDA refuses a list that names a
# device twice. Pinning is for programs that choose no device, and keeps a process from taking memory on the GPUs of
# others.
#
# The agent gives its processes the GPUs that it may see itself: the entries of its own CUDA_VISIBLE_DEVICES (numbers,
# UUIDs or MIG ids, passed on as they are), or as many as the driver counts. Another process asks the driver, which runs
# this file as a script (`python -I -S cores_and_gpus.py LIBRARY`, standard library only): a launcher must not
# hold a GPU, nor fork when it does.

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_COUNT_SECONDS = 60.0  # a driver without persistence mode starts each GPU first


def pinned(slots: Sequence[Slot]) -> list[Slot]:
    """The slots of this host, each with a GPU of its own, in order.

    GPUs are given out by slot, not by local rank: two host names may stand for this one machine, and share its GPUs.
    ValueError, with what to do, when there are fewer GPUs than slots.
    """
    if not slots:
        return []
    devices, where = visible_gpus(slots[0].environ)
    if len(devices) < len(slots):
        from horovod.base.errors import LaunchCode, coded  # not at the top: the script has the standard library only

        found = f"{len(devices)} ({', '.join(devices)})" if devices else "none"
        sentence = (
            f"Each of {len(slots)} processes is to have a GPU of its own (HOROVOD_PIN_GPUS), but there are {found}: "
            f"{where}. Start fewer processes, or leave --pin-gpus out and let the program choose. A GPU that is "
            f"divided (MIG) counts as one: name its parts in {_VISIBLE}."
        )
        raise ValueError(coded(LaunchCode.TOO_FEW_GPUS, sentence))
    return [
        dataclasses.replace(slot, environ={**slot.environ, _VISIBLE: device})
        for slot, device in zip(slots, devices, strict=False)
    ]


def visible_gpus(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """The devices that a process with this environment may be pinned to, and where that number comes from, in words."""
    if _VISIBLE in environ:
        return _entries(environ[_VISIBLE]), f"{_VISIBLE} is {environ[_VISIBLE]!r}"
    count, where = count_gpus(environ)
    return [str(ordinal) for ordinal in range(count)], where


def _entries(text: str) -> list[str]:
    """The entries of the list before the first one that names no device: CUDA ignores the rest, too."""
    found: list[str] = []
    for entry in text.split(","):
        name = entry.strip()
        if not name or name.startswith("-") or name == "NoDevFiles":
            break
        found.append(name)
    return found


def count_gpus(environ: Mapping[str, str]) -> tuple[int, str]:
    """How many GPUs a process with this environment would find, and where that number comes from, in words."""
    from horovod.base.settings import ROWS  # not at the top: the script has the standard library only

    file = ROWS["cuda_library"].text(environ) or _LIBRARY
    command = [sys.executable, "-I", "-S", __file__, file]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COUNT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0, f"the NVIDIA driver ({file}) has not answered within {_COUNT_SECONDS:.0f} s"
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
        return int(answer["count"]), str(answer["where"])
    except (ValueError, KeyError):
        return (
            0,
            f"the process that asked the NVIDIA driver ({file}) ended with {done.returncode}: {done.stderr.strip()}",
        )


def _count(file: str) -> dict[str, Any]:
    """How many GPUs the driver's library finds."""
    try:
        driver = ctypes.CDLL(file)
        init, count_devices = driver.cuInit, driver.cuDeviceGetCount
    except (OSError, AttributeError) as error:
        return {"count": 0, "where": f"there is no NVIDIA driver on this host: {error}"}
    count = ctypes.c_int(0)
    for function, result in (("cuInit", init(0)), ("cuDeviceGetCount", count_devices(ctypes.byref(count)))):
        if result == _NO_DEVICE:
            return {"count": 0, "where": f"the NVIDIA driver ({file}) finds no GPU"}
        if result != 0:
            return {"count": 0, "where": f"the NVIDIA driver's {function} failed with {result}"}
    return {"count": count.value, "where": f"the NVIDIA driver counts {count.value}"}


if __name__ == "__main__":
    print(json.dumps(_count(sys.argv[1])))
