"""Processes started by PMI or PMIx: mpiexec of MPICH, Intel MPI and MVAPICH (PMI_*), prun (PMIX_*).

PMI's variables tell no name of the run, but all processes of a host have its helper (hydra_pmi_proxy) as an ancestor.
Of PMIx alone, without a launcher that sets variables of its own, only the rank is there.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.base.errors import SettingCode, coded
from horovod.rendezvous.task import Task, number

# The variables are named without their values, since every user of the host sees command lines.
_OPTION = "export both, and mpiexec -genvlist HOROVOD_COORDINATOR,HOROVOD_TOKEN"


def find(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by PMI's variables; None where no such launcher has started this process.

    ValueError where one has, and does not say how many processes there are.
    """
    rank, size = number(environ, "PMI_RANK"), number(environ, "PMI_SIZE")
    if rank is not None and size is not None:
        local_size = number(environ, "MPI_LOCALNRANKS")
        return Task("mpiexec", rank, size, local_size == size, ancestor="pmi_proxy", variable_option=_OPTION)
    rank = number(environ, "PMIX_RANK")
    if rank:  # not for rank 0, which may be alone
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"This process was started as rank {rank} by PMIx (PMIX_RANK), which does not tell how many there are. "
                "Start horovod-coordinator and set HOROVOD_COORDINATOR and HOROVOD_SIZE, start the program with "
                "horovodrun, or set HOROVOD_CLUSTER=none for processes that train alone.",
            )
        )
    return None
