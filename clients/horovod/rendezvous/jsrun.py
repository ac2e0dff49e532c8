"""Processes that IBM's jsrun started: JSM_NAMESPACE_*. Its jobs are LSF's, which tells their hosts.

Jsrun's processes have Open MPI's variables as well where it was told to start programs of Spectrum MPI; both say the
same of rank and size.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.rendezvous import lsf
from horovod.rendezvous.task import Task, number


def find(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by jsrun's variables; None where it has not started this process."""
    rank, size = number(environ, "JSM_NAMESPACE_RANK"), number(environ, "JSM_NAMESPACE_SIZE")
    if rank is None or size is None:
        return None
    return Task(
        launcher="jsrun",
        rank=rank,
        size=size,
        one_host=number(environ, "JSM_NAMESPACE_LOCAL_SIZE") == size,
        run=tuple(environ[name] for name in ("LSB_JOBID", "JSM_NAMESPACE_ID") if name in environ),
        # jsrun fills the hosts of the job in their order, unless a file says otherwise (--erf_input).
        first_host=lsf.allocated(environ)[0].name if lsf.present(environ) else None,
        variable_option="jsrun -E HOROVOD_COORDINATOR=HOST:29400",
    )
