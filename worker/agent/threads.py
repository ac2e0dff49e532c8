"""How many threads each process of a host computes with (HOROVOD_SET_NUM_THREADS).

PyTorch, NumPy and others start as many threads as they see cores, each process for itself. Two processes on two cores
then have four threads that wait for each other at every step, which takes several times as long as one thread each. So
a launcher or an agent gives each process its share of the cores that the launcher or agent may use. These are the cores
in its affinity mask (hyperthreads of one core count once, as in PyTorch's own default for a single process), and no
more than the processor time that its control group allows.

OMP_NUM_THREADS is for OpenMP, which PyTorch and OpenBLAS follow as well; OPENBLAS_NUM_THREADS, which would only repeat
it, is left alone. MKL_NUM_THREADS is for MKL builds that do not use OpenMP. Where a user has set one of the two,
neither is changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

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
