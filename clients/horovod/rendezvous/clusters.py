"""What launchers other than ours say of the process that they started, in its environment's variables: a Task.

Each launcher has a function, which makes a Task of the variables, or None where that launcher has not started this
process. A new one is such a function, its line in FINDERS, and its name in CLUSTERS (base/settings/world.py), which has
them in the order in which they are asked.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from horovod.base.errors import SettingCode, coded
from horovod.rendezvous.hosts import in_lsf_job, lsf_hosts, parse_hostfile


@dataclass(frozen=True)
class Task:
    """One of `size` processes that a launcher other than ours started together."""

    launcher: str  # the name that its users type: "mpirun"
    rank: int
    size: int
    one_host: bool  # all processes of the run are on this host
    # What names this run on this host, and no other: equal in all its processes. Empty where the variables do not tell.
    run: tuple[str, ...] = ()
    # Where `run` is empty: part of the name of the launcher's process that is an ancestor of all processes of a host.
    ancestor: str = ""
    first_host: str | None = None  # the host of rank 0, by a name that the others can connect to; None: not told
    variable_option: str = ""  # how a user gives all processes a variable
    meeting_advice: str = ""  # how a user gives all processes one secret; "": by export before the launcher
    no_host: str = ""  # where the launcher could tell the host of rank 0 and does not: what to do so that it does
    name_may_come: bool = False  # the name `first_host` may be unknown until the process there runs
    ports: range | None = None  # for the coordinator of rank 0 between hosts; None: those of join.py

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                coded(
                    SettingCode.LAUNCHER_VARIABLES,
                    f"{self.launcher} says that this process is rank {self.rank} of {self.size}, which cannot be. Set "
                    "HOROVOD_CLUSTER=none, or HOROVOD_COORDINATOR, HOROVOD_RANK and HOROVOD_SIZE yourself.",
                )
            )


def number(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as a number, None when it is not set; ValueError with a sentence when it is none."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"{name}={text!r} is not usable: a launcher sets it to a number. If no launcher did, unset it or set "
                "HOROVOD_CLUSTER=none.",
            )
        )
    return int(text)


# -- torchrun ----------------------------------------------------------------------------------------------------------
# Processes that torchrun (python -m torch.distributed.run) started.
#
# torchrun sets RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and TORCHELASTIC_*, by which it is
# known. When a process fails, or hosts come or go, it ends all processes and starts them again, with new ranks and
# perhaps another number of them: each start is a run of its own, that forms a world of its own.
#
# Between hosts rank 0 is on MASTER_ADDR. MASTER_PORT is torch's own; the coordinator takes one of TORCHRUN_PORTS above
# it, so that a firewall that lets the one through can let the others through too.

TORCHRUN_PORTS = range(16, 64)  # added to MASTER_PORT; below them are the ports that people give their next jobs


def find_torchrun(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by torchrun's variables; None where it has not started this process."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    run = tuple(f"{name}={environ.get(name, '')}" for name in names)
    return _torch_task(environ, "torchrun", run, number(environ, "LOCAL_WORLD_SIZE"))


def _torch_task(
    environ: Mapping[str, str],
    launcher: str,
    run: tuple[str, ...],
    local_size: int | None,
    name_may_come: bool = False,
) -> Task | None:
    """What the variables of torch.distributed say; None where rank or size is missing."""
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if rank is None or size is None:
        return None
    master = number(environ, "MASTER_PORT") or 0
    above = master + TORCHRUN_PORTS.stop <= 1 << 16
    return Task(
        launcher=launcher,
        rank=rank,
        size=size,
        one_host=local_size == size,
        run=run,
        first_host=environ.get("MASTER_ADDR", "").strip() or None,
        variable_option="export them on each host",
        meeting_advice="set HOROVOD_TOKEN on each host to the same text, such as the output of `openssl rand -hex 32`",
        name_may_come=name_may_come,
        ports=range(master + TORCHRUN_PORTS.start, master + TORCHRUN_PORTS.stop)
        if above
        else range(master - 64, master - 16),
    )


# -- PyTorch -----------------------------------------------------------------------------------------------------------
# Processes with the four variables that torch.distributed's env:// asks for, whoever has set them.
#
# The Training Operator of Kubeflow (PyTorchJob) and many a script set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT and
# no more; these tell nothing of who shares a host.


def find_pytorch(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by these variables; None where one is missing."""
    if any(not environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT")):
        return None
    local = environ["MASTER_ADDR"] in ("localhost", "::1") or environ["MASTER_ADDR"].startswith("127.")
    run = tuple(f"{name}={environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    size = number(environ, "WORLD_SIZE") if local else None
    return _torch_task(environ, "a launcher that sets RANK and WORLD_SIZE", run, size, name_may_come=True)


# -- jsrun -------------------------------------------------------------------------------------------------------------
# Processes that IBM's jsrun started: JSM_NAMESPACE_*. Its jobs are LSF's, which tells their hosts.
#
# Jsrun's processes have Open MPI's variables as well where it was told to start programs of Spectrum MPI; both say the
# same of rank and size.


def find_jsrun(environ: Mapping[str, str]) -> Task | None:
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
        first_host=lsf_hosts(environ)[0].name if in_lsf_job(environ) else None,
        variable_option="jsrun -E HOROVOD_COORDINATOR=HOST:29400",
    )


# -- Open MPI ----------------------------------------------------------------------------------------------------------
# Processes that Open MPI's mpirun (mpiexec, prterun) started: OMPI_COMM_WORLD_*.
#
# All of them see how many there are and how many on their host, and nothing of where rank 0 is when there are several
# hosts: OMPI_MCA_orte_hnp_uri leads to mpirun, which may run elsewhere.

# Which run this is: the name of the job, and the address of the server that mpirun has on this host for this run.
_OPEN_MPI_RUN = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_URI2", "PMIX_SERVER_URI41")


def find_openmpi(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by Open MPI's variables; None where it has not started this process."""
    rank, size = number(environ, "OMPI_COMM_WORLD_RANK"), number(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    return Task(
        launcher="mpirun",
        rank=rank,
        size=size,
        one_host=number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == size,
        run=tuple(f"{name}={environ[name]}" for name in _OPEN_MPI_RUN if name in environ),
        # Without the value of the token: every user of the host sees command lines.
        variable_option="mpirun -x HOROVOD_COORDINATOR=HOST:29400 -x HOROVOD_TOKEN",
    )


# -- Slurm -------------------------------------------------------------------------------------------------------------
# Processes that Slurm's srun started: the tasks of a step.
#
# A batch script and the shell of salloc have SLURM_* variables, too, with the number of tasks that may be started and
# SLURM_PROCID=0. They are not tasks of a step with several: only those have SLURM_STEP_NUM_TASKS above 1.


def find_slurm(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by Slurm's variables; None where srun has not started this process, or has started it alone."""
    rank, size = number(environ, "SLURM_PROCID"), number(environ, "SLURM_STEP_NUM_TASKS")
    if rank is None or size is None or not environ.get("SLURM_STEP_ID", "").isdigit():
        return None
    if "PMI_SIZE" in environ and (number(environ, "PMI_RANK"), number(environ, "PMI_SIZE")) != (rank, size):
        return None  # an mpiexec that starts one helper for each host by srun: the helper's processes inherit all this
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    return Task(
        launcher="srun",
        rank=rank,
        size=size,
        one_host=number(environ, "SLURM_STEP_NUM_NODES") == 1,
        run=tuple(
            f"{name}={environ[name]}"
            for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
            if name in environ
        ),
        first_host=first_node(nodes) if nodes else None,
        variable_option="export them before srun",
    )


# The text up to the first comma outside of brackets.
_FIRST_NODE = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+(?=,|\Z)")
_NODE_BRACKETS = re.compile(r"\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")


def first_node(nodes: str) -> str:
    """The first host of a list as Slurm writes it: "gpu003" of "gpu[003-005,9],login1". ValueError for another text."""
    entry = _FIRST_NODE.match(nodes.strip())
    # Names may have several pairs of brackets: rack[1-2]node[01-16] begins with rack1node01.
    name = _NODE_BRACKETS.sub(r"\1", entry[0]) if entry else ""
    if not name or not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ValueError(
            coded(
                SettingCode.LAUNCHER_VARIABLES,
                f"SLURM_STEP_NODELIST={nodes!r} is not usable: expected names of hosts as Slurm writes them, for "
                "example node[01-04]. Set HOROVOD_COORDINATOR and HOROVOD_TOKEN, or HOROVOD_CLUSTER=none.",
            )
        )
    return name


# -- PMI, PMIx ---------------------------------------------------------------------------------------------------------
# Processes started by PMI or PMIx: mpiexec of MPICH, Intel MPI and MVAPICH (PMI_*), prun (PMIX_*).
#
# PMI's variables tell no name of the run, but all processes of a host have its helper (hydra_pmi_proxy) as an ancestor.
# Of PMIx alone, without a launcher that sets variables of its own, only the rank is there.

# The variables are named without their values, since every user of the host sees command lines.
_PMI_OPTION = "export both, and mpiexec -genvlist HOROVOD_COORDINATOR,HOROVOD_TOKEN"


def find_pmi(environ: Mapping[str, str]) -> Task | None:
    """Rank and size by PMI's variables; None where no such launcher has started this process.

    ValueError where one has, and does not say how many processes there are.
    """
    rank, size = number(environ, "PMI_RANK"), number(environ, "PMI_SIZE")
    if rank is not None and size is not None:
        local_size = number(environ, "MPI_LOCALNRANKS")
        return Task("mpiexec", rank, size, local_size == size, ancestor="pmi_proxy", variable_option=_PMI_OPTION)
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


# -- PBS ---------------------------------------------------------------------------------------------------------------
# Processes that pbsdsh of OpenPBS or TORQUE started, one for each host of the job.
#
# TORQUE tells each process its number (PBS_VNODENUM) and how many there are (PBS_NP). OpenPBS tells only the number of
# the host (PBS_NODENUM), and the hosts in a file (PBS_NODEFILE) that lies on the first one of them alone, unless the
# job copies it to where all see it. Programs that mpiexec starts in a PBS job have the variables of mpiexec, which are
# asked first; and horovodrun takes the file as it is: horovodrun -hostfile $PBS_NODEFILE.

_PBS_INSTEAD = "or start the program by `horovodrun -hostfile $PBS_NODEFILE -np N` in the job's script"
_PBS_COPY = (
    "Copy it in the job's script to a folder that all hosts share and hand it on: `cp $PBS_NODEFILE nodes; pbsdsh -- "
    f"env PBS_NODEFILE=$PWD/nodes python train.py`, {_PBS_INSTEAD}."
)


def find_pbs(environ: Mapping[str, str]) -> Task | None:
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
                f"This process was started by pbsdsh on host number {node} of a PBS job, but "
                f"{file or 'PBS_NODEFILE'}, the list of hosts, can't be read there. {_PBS_COPY} "
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
                    f"for one (`qsub -l select=HOSTS:mpiprocs=1`), {_PBS_INSTEAD}. HOROVOD_CLUSTER=none lets processes "
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


# -- Kubernetes --------------------------------------------------------------------------------------------------------
# Pods of a Kubernetes Job with `completionMode: Indexed`: one process each, JOB_COMPLETION_INDEX is its rank.
#
# A pod is not told how many there are, so the manifest sets HOROVOD_SIZE to `spec.completions`. The pod of index i has
# the host name JOB-i; where a headless service gives the pods a domain (`subdomain` in the pod's template), the others
# reach rank 0 by the name JOB-0 in it. A pod that fails is started again with its index.

_POD_OPTION = "`env:` in the pod's template"


def find_kubernetes(environ: Mapping[str, str], full_name: Callable[[str], str] = socket.getfqdn) -> Task | None:
    """Rank by the Job's variable; None where this is no pod of an indexed Job. full_name: a host's name with domain."""
    rank = number(environ, "JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    size = number(environ, "HOROVOD_SIZE")
    if size is None:
        raise ValueError(
            coded(
                SettingCode.MISSING_SETTING,
                f"This is the pod of index {rank} in an indexed Job of Kubernetes (JOB_COMPLETION_INDEX), which is not "
                f"told how many pods there are: set HOROVOD_SIZE to the Job's spec.completions ({_POD_OPTION}), or "
                "HOROVOD_CLUSTER=none for pods that train alone.",
            )
        )
    job, own = _job_and_name(environ.get("HOSTNAME", ""), rank)
    domain = full_name(own).partition(".")[2] if own else ""
    return Task(
        launcher="Kubernetes",
        rank=rank,
        size=size,
        one_host=False,
        run=(job, domain),
        first_host=f"{job}-0.{domain}" if job and domain else None,
        variable_option=_POD_OPTION,
        meeting_advice="put the output of `openssl rand -hex 32` into a Secret and take HOROVOD_TOKEN from it "
        "(`valueFrom: secretKeyRef:` in the pod's template)",
        name_may_come=True,
        no_host="the pods have no names by which they can reach each other: give the Job a headless service (a Service "
        "with `clusterIP: None` that selects its pods, and `subdomain:` with the name of that service in the pod's "
        "template).",
    )


def _job_and_name(host: str, rank: int) -> tuple[str, str]:
    """("train", "train-3") of the pod's host name "train-3"; nothing where the pod was given another one."""
    name = host.partition(".")[0]
    job, dash, index = name.rpartition("-")
    return (job, name) if dash and index == str(rank) else ("", "")


Finder = Callable[[Mapping[str, str]], Task | None]

FINDERS: Final[Mapping[str, Finder]] = {
    "torchrun": find_torchrun,
    "jsrun": find_jsrun,
    "openmpi": find_openmpi,
    "slurm": find_slurm,
    "pmi": find_pmi,
    "pbs": find_pbs,
    "pytorch": find_pytorch,
    "kubernetes": find_kubernetes,
}
SIZE_IS_GIVEN: Final = frozenset({"kubernetes"})  # they do not tell how many processes there are; HOROVOD_SIZE does
