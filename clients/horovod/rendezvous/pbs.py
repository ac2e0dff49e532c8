"""Processes that pbsdsh of OpenPBS or TORQUE started, one for each host of the job.

TORQUE tells each process its number (PBS_VNODENUM) and how many there are (PBS_NP). OpenPBS tells only the number of
the host (PBS_NODENUM), and the hosts in a file (PBS_NODEFILE) that lies on the first one of them alone, unless the job
copies it to where all see it. Programs that mpiexec starts in a PBS job have the variables of mpiexec, which are asked
first; and horovodrun takes the file as it is: horovodrun -hostfile $PBS_NODEFILE.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod.base.errors import SettingCode, coded
from horovod.rendezvous.hosts import parse_hostfile
from horovod.rendezvous.task import Task, number

_INSTEAD = "or start the program by `horovodrun -hostfile $PBS_NODEFILE -np N` in the job's script"
_COPY = (
    "Copy it in the job's script to a folder that all hosts share and hand it on: `cp $PBS_NODEFILE nodes; pbsdsh -- "
    f"env PBS_NODEFILE=$PWD/nodes python train.py`, {_INSTEAD}."
)


def find(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by the variables of PBS; None where pbsdsh has not started this process.

    ValueError where it has, and does not say how many processes there are or which one this is.
    """
    node, task = number(environ, "PBS_NODENUM"), number(environ, "PBS_TASKNUM")
    if "PBS_JOBID" not in environ or node is None or (node == 0 and task in (None, 1)):
        return None  # the first task of the first host is the job's script
    file = environ.get("PBS_NODEFILE", "")
    try:
        hosts = parse_hostfile(file)
    except ValueError as error:
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"This process was started by pbsdsh on host number {node} of a PBS job, where "
                f"{file or 'PBS_NODEFILE'}, which tells how many there are, can't be read. {_COPY} "
                "HOROVOD_CLUSTER=none lets processes train alone.",
            )
        ) from error
    rank, size = number(environ, "PBS_VNODENUM"), number(environ, "PBS_NP")
    if rank is None or size is None:
        rank, size = node, len(hosts)
        if any(host.slots > 1 for host in hosts):
            raise ValueError(
                coded(
                    SettingCode.LAUNCHER_VARIABLES,
                    "pbsdsh does not tell the processes of one host apart, and this job has several for a host: ask "
                    f"for one (`qsub -l select=HOSTS:mpiprocs=1`), {_INSTEAD}. HOROVOD_CLUSTER=none lets processes "
                    "train alone.",
                )
            )
    return Task(
        launcher="pbsdsh",
        rank=rank,
        size=size,
        one_host=len(hosts) == 1,
        run=(environ["PBS_JOBID"],),
        first_host=hosts[0].name,
        variable_option="pbsdsh -- env HOROVOD_COORDINATOR=HOST:29400 HOROVOD_TOKEN_FILE=$PWD/token python train.py",
        meeting_advice="write it in the job's script to a file that only you can read, `(umask 077; openssl rand -hex "
        "32 > token)`, and hand its name on, `pbsdsh -- env HOROVOD_TOKEN_FILE=$PWD/token ...`",
    )
