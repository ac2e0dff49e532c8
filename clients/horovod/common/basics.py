"""The basic calls of every framework's module: init, shutdown, ranks and sizes, what is built in, the timeline.

Plain functions, so that a module re-exports them; the state behind them is horovod.worker.runtime.context.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from horovod import _core
from horovod._core import ReduceOp
from horovod.base.errors import SettingCode, WorldCode, coded, without_code
from horovod.base.settings import Settings, resolve
from horovod.common import unreduced
from horovod.common.departure import departure, end_by_sigterm_as_pid_1
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, begin_with, forget_all, global_process_set
from horovod.worker.runtime import context as _context
from horovod.worker.runtime.context import MemberLostError, current, is_initialized, is_member, parent, place
from horovod.worker.runtime.devices import cuda_file, nccl_file

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

log = logging.getLogger(__name__)

_last_init: dict[str, Any] | None = None  # the arguments of the init() that made the latest world

# How a reduction combines ranks. Opaque; plain numbers, because scripts print and pickle them.
Average = int(ReduceOp.AVERAGE)
Sum = int(ReduceOp.SUM)
Adasum = int(ReduceOp.ADASUM)
Min = int(ReduceOp.MIN)
Max = int(ReduceOp.MAX)
Product = int(ReduceOp.PRODUCT)


def init(
    comm: str | Sequence[int] | None = None,
    process_sets: str | Iterable[ProcessSet] | None = None,
    *,
    coordinator: str | None = None,
    job: str | None = None,
    size: int | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    rank: int | None = None,
    token: str | None = None,
    transport: str | None = None,
    network_interfaces: Sequence[str] | str | None = None,
    start_timeout_seconds: float | None = None,
) -> None:
    """Joins the world of this job and returns when all its processes have. A second call does nothing.

    Under horovodrun no argument is needed. Without a launcher, give the coordinator and the number of processes:
    ``hvd.init("127.0.0.1:29400", size=2)``, or HOROVOD_COORDINATOR and HOROVOD_SIZE. With neither, processes that
    mpirun, mpiexec or srun started on one host find each other, and any other is a world of one.

    >>> hvd.init()

    Args:
        comm: "host:port" of the coordinator; or all ranks of the world as a list, which is the default. Other worlds
            need MPI, which this build does not have.
        process_sets: hvd.ProcessSet objects to register at once, the same in the same order on all ranks; or "dynamic",
            which allows hvd.add_process_set() and hvd.remove_process_set() later (HOROVOD_DYNAMIC_PROCESS_SETS=1). In a
            world of an elastic job that lacks some ranks of a set, the set consists of its remaining ranks: see
            hvd.ProcessSet. Sets that were added later are gone in the next world.
        coordinator: the same as a str in `comm`.
        min_size, max_size: make the job elastic (HOROVOD_MIN_SIZE, HOROVOD_MAX_SIZE). A world then has between min_size
            and max_size processes, goes on without lost processes and admits new ones. The first world waits for `size`
            processes. Without `size` it begins once no new process has come for a while.
        job, size, rank, token, transport, network_interfaces, start_timeout_seconds: override the environment variables
            HOROVOD_JOB, HOROVOD_SIZE, HOROVOD_RANK, HOROVOD_TOKEN, HOROVOD_TRANSPORT, HOROVOD_NETWORK_INTERFACES and
            HOROVOD_START_TIMEOUT.

    Raises:
        ValueError: "Horovod initialization failed. ..." and what to do; or a wrong argument.
    """
    global _last_init
    if isinstance(process_sets, Iterable) and not isinstance(process_sets, str):
        # A copy, because an iterator gives them once, and elastic training needs them again.
        process_sets = list(process_sets)
    arguments = {name: value for name, value in locals().items() if value is not None}
    ranks: list[int] | None = None
    if isinstance(comm, str):
        if coordinator is not None and coordinator != comm:
            sentence = f"Two coordinators are given to hvd.init(): {comm!r} and coordinator={coordinator!r}."
            raise ValueError(coded(SettingCode.CONFLICTING_SETTINGS, sentence))
        coordinator = comm
    elif comm is not None:
        ranks = _ranks(comm)
    sets, dynamic = _process_sets(process_sets)
    if is_member():
        return
    given = {
        "coordinator": coordinator,
        "job": job,
        "size": size,
        "min_size": min_size,
        "max_size": max_size,
        "rank": rank,
        "token": token,
        "transport": transport,
        "network_interfaces": network_interfaces,
        "start_timeout_seconds": start_timeout_seconds,
        "dynamic_process_sets": dynamic or None,
    }
    from horovod.rendezvous.join import joined, size_of_world

    if ranks:
        everyone = list(range(size_of_world(resolve(explicit=given))))
        if sorted(ranks) != everyone:
            raise ValueError(
                coded(
                    SettingCode.UNSUPPORTED,
                    f"hvd.init(comm={ranks}) asks for a world of some ranks only, which needs MPI, and this build has "
                    f"none. Leave comm out to use all ranks (here {everyone}).",
                )
            )
    _core.set_error_types(HorovodInternalError)
    is_child = parent() is not None
    if not is_child:
        forget_all()  # forgets the sets of a world that ended without hvd.shutdown()
    if os.getpid() == 1 and resolve(explicit=given).min_size is not None:
        end_by_sigterm_as_pid_1()
    context = _context.init([one.ranks or [] for one in sets], joined=joined, **given)
    if is_child:
        forget_all()  # forgets the sets of the parent's world, now that this process has its own
    global_process_set.ranks = list(range(context.world.size))
    # If another thread's hvd.init() was first, the world has that call's sets.
    for process_set, initial in zip(sets, context.process_sets.initial, strict=False):
        begin_with(process_set, initial.ranks, initial.set_id)
    _last_init = arguments
    unreduced.world_begins()


def leave_for_good(reason: str) -> None:
    """shutdown() of a process whose work others go on with; for elastic training."""
    _leave(f"it leaves the job: {reason}", failed=True)


def join_again() -> None:
    """shutdown(), then init() with the arguments it had before; for elastic training.

    A world that loses a member while it forms is not the end: each time this process joins again and waits for the next
    one as long as init() does, so that it ends when no process takes the place of the lost member.

    Raises ValueError: init() was never called, or "Horovod initialization failed. ..." as it does.
    """
    if _last_init is None:
        raise ValueError(_context.NOT_INITIALIZED)
    _leave("it joins the next world", returns=True)
    while not is_member():
        try:
            init(**_last_init)
        except MemberLostError as error:
            log.warning("A process was lost while the next world formed; joining again. %s", without_code(error))


def _ranks(comm: object) -> list[int]:
    if (type(comm).__module__ or "").split(".")[0] == "mpi4py":
        raise ValueError(
            coded(
                SettingCode.UNSUPPORTED,
                "hvd.init(comm=...) got an MPI communicator, but this build of Horovod has no MPI. Leave comm out and "
                "start the program with horovodrun or with a coordinator.",
            )
        )
    wrong = coded(
        SettingCode.INVALID_SETTING,
        f"hvd.init(comm={comm!r}) is not usable: expected a list of ranks or the coordinator's address host:port.",
    )
    if not isinstance(comm, Iterable):
        raise ValueError(wrong)
    ranks = list(comm)
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise ValueError(wrong)
    return ranks


def _process_sets(given: object) -> tuple[list[ProcessSet], bool]:
    """The sets to begin with, and whether others may come later."""
    if given is None:
        return [], False
    if isinstance(given, str) and given.lower() == "dynamic":
        return [], True
    if isinstance(given, list) and all(isinstance(one, ProcessSet) for one in given):
        return [one for one in given if one is not global_process_set], False
    raise ValueError(
        coded(
            WorldCode.INVALID_PROCESS_SET,
            f"hvd.init(process_sets={given!r}) is not usable: expected a list of hvd.ProcessSet or 'dynamic'.",
        )
    )


def shutdown() -> None:
    """Shuts Horovod down in this process; pending operations fail. Does nothing before init(), which may follow again.

    Python calls it at exit. Other ranks that wait for this one get HorovodInternalError. In a child process of a rank
    it makes the child forget its parent's rank; the parent stays in its world. It raises nothing. Example:

        >>> hvd.shutdown()
        >>> hvd.is_initialized()
        False
        >>> hvd.init()
    """
    if departure.is_between_worlds:
        # A program with its own run_fn uses this as `reset`: init() follows. Otherwise the job's work would count as
        # done.
        _leave("it joins the next world", returns=True)
    else:
        _leave()


def leave_because(reason: str) -> None:
    """shutdown() for launchers: the function that this process ran as a rank has failed, and the process goes on.

    reason: completes "Rank 1 on host h1 left the world: ", which the other ranks get.
    """
    _leave(reason, failed=True)


def _leave(reason: str = "it called hvd.shutdown()", *, returns: bool = False, failed: bool = False) -> None:
    # In a `finally:` of the script, an exception may be on its way: then the work is not done.
    _context.shutdown(reason, returns=returns, failed=failed or sys.exc_info()[0] is not None)
    if not is_member():
        global_process_set.ranks = None
        forget_all()


def size() -> int:
    """Number of processes in the world. Raises ValueError before init().

    >>> hvd.size()
    2
    """
    return place().size


def rank() -> int:
    """This process's number in the world, from 0. Raises ValueError before init().

    >>> hvd.rank()
    0  # on rank 0; 1 on rank 1
    """
    return place().rank


def local_size() -> int:
    """Number of processes on this host. Raises ValueError before init().

    >>> hvd.local_size()
    2
    """
    return place().local_size


def local_rank() -> int:
    """This process's number on its host, from 0; use it to choose a GPU. Raises ValueError before init().

    >>> hvd.local_rank()
    0  # on rank 0; 1 on rank 1
    """
    return place().local_rank


def cross_size() -> int:
    """Number of hosts that have this local rank. Raises ValueError before init().

    >>> hvd.cross_size()
    1
    """
    return place().cross_size


def cross_rank() -> int:
    """The number of this host among the hosts that have this local rank. Raises ValueError before init().

    >>> hvd.cross_rank()
    0
    """
    return place().cross_rank


def is_homogeneous() -> bool:
    """True when every host has the same number of processes. Raises ValueError before init().

    >>> from horovod.torch import mpi_ops
    >>> mpi_ops.is_homogeneous()
    True
    """
    return place().is_homogeneous


def mpi_threads_supported() -> NoReturn:
    """Raises ValueError: before init(), and because there is no MPI to ask.

    >>> hvd.mpi_threads_supported() if hvd.mpi_enabled() else "no MPI"
    'no MPI'
    """
    place()
    raise ValueError(coded(SettingCode.UNSUPPORTED, "Horovod MPI is not enabled: this build has no MPI."))


def mpi_enabled() -> bool:
    """Whether MPI is in use.

    >>> hvd.mpi_enabled()
    False
    """
    return False


def gloo_enabled() -> bool:
    """Whether Horovod runs without MPI, which is what programs ask by this name: always True.

    It does not say that Gloo's algorithms are used, which HOROVOD_CPU_OPERATIONS=gloo asks for.

    >>> hvd.gloo_enabled()
    True
    """
    return True


def mpi_built() -> bool:
    """Whether MPI is compiled in.

    >>> hvd.mpi_built()
    False
    """
    return False


def gloo_built() -> bool:
    """Whether Horovod can run without MPI, which is what programs ask by this name: always True.

    It does not say that the library of Gloo is there: `horovodrun --check-build` shows that among the operations.

    >>> hvd.gloo_built()
    True
    """
    return True


def nccl_built() -> int:
    """NCCL's version as a number (22703 is 2.27.3), 0 if GPU tensors can use none.

    Horovod looks for NCCL on this host at run time, not when it is built: HOROVOD_NCCL_LIBRARY, PyTorch's own, or the
    system's. Without it GPU tensors go through the host's memory.

    >>> fast = hvd.nccl_built() > 0
    """
    version, _ = _core.nccl_version(nccl_file(_settings()))
    return version


def ddl_built() -> bool:
    """Whether IBM DDL is compiled in.

    >>> hvd.ddl_built()
    False
    """
    return False


def ccl_built() -> bool:
    """Whether oneCCL is compiled in.

    >>> hvd.ccl_built()
    False
    """
    return False


def cuda_built() -> bool:
    """Whether this host has an NVIDIA driver that GPU tensors could use; nothing of CUDA is compiled in.

    >>> device = "cuda" if hvd.cuda_built() else "cpu"
    """
    return not _core.cuda_obstacle(cuda_file(_settings()))


def _settings() -> Settings | None:
    return current().settings if is_member() else None


def rocm_built() -> bool:
    """Whether ROCm support is compiled in.

    >>> hvd.rocm_built()
    False
    """
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begins to record operations in a file that Perfetto (ui.perfetto.dev) and chrome://tracing show.

    Call it on all ranks; rank 0 writes, to its own `file_path`. A file that is written already is completed first. The
    file is a complete JSON array whenever one looks at it, at most some tenths of a second behind. Example, with
    HOROVOD_TIMELINE=DYNAMIC:

        >>> hvd.start_timeline("step-100.json")
        >>> _ = hvd.allreduce(torch.ones(3), name="loss")
        >>> hvd.stop_timeline()

    Args:
        file_path: replaced when it exists.
        mark_cycles: also mark when a batch of operations begins (CYCLE_START).

    Raises:
        ValueError: before init(); HOROVOD_TIMELINE was not set when hvd.init() was called (it must be a path, or
            DYNAMIC for no file from the start); on rank 0, the file can't be written.
    """
    current().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Completes the file of the timeline. Without one it only writes a line to the log (level info).

    Raises ValueError before init().

    >>> hvd.stop_timeline()
    """
    current().timeline.stop_as_asked()


def __getattr__(name: str) -> Any:
    """`HorovodBasics`, a class of earlier releases whose methods call the functions of this module."""
    if name != "HorovodBasics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovod.common.compatibility import HorovodBasics

    return HorovodBasics
