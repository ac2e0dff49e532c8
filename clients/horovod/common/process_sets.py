"""Process sets: subsets of the ranks that run collectives among themselves.

The global set, with id 0, stands from init to shutdown. Others are given to hvd.init(process_sets=[...]); or, with
hvd.init(process_sets="dynamic") or HOROVOD_DYNAMIC_PROCESS_SETS=1, come and go with `add_process_set` and
`remove_process_set`, which all ranks call alike, members or not. Sets may overlap. Each progresses on its own: an
operation that waits for a rank in one set holds up no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral

from horovod.base.errors import OperationCode, WorldCode, coded
from horovod.worker.runtime.context import Context, current, is_member, parent, place

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

_registered: dict[int, ProcessSet] = {}  # id -> process set, without the global one
_asked: dict[ProcessSet, list[int]] = {}  # given to hvd.init(), and smaller in this world -> the ranks it was given


def _none(_: int) -> int:
    return 0


_unawaited: Callable[[int], int] = _none  # see count_unawaited


class ProcessSet:
    """Ranks that take part in an operation. `ranks` is sorted; `process_set_id` is None while it is not registered.

    Pass it as `process_set=` to a collective, hvd.barrier, hvd.DistributedOptimizer or hvd.broadcast_object. On a rank
    that is no member these raise ValueError (but hvd.DistributedOptimizer, which communicates nothing there). Example:

        >>> hvd.ProcessSet([2, 0])
        ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)

    A world of an elastic job (hvd.init(min_size=...)) may have fewer ranks than a set that was given to hvd.init(). The
    set then consists of its ranks that the world has; `ranks` lists them. The set is not registered and can't be used
    if no rank is left, if it has all ranks of the world, or if another set has the same ranks. In a world that has all
    its ranks, the set is complete again. Ranks are numbers in a world: a process may be a member in one world and not
    in the next, so make a new DistributedOptimizer over a set in a reset callback of the state.

    Raises ValueError if `ranks` is not a list of whole numbers, NotImplementedError for an MPI communicator.
    """

    process_set_id: int | None
    mpi_comm: None
    _ranks: list[int] | None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if type(ranks_or_comm).__module__.split(".")[0] == "mpi4py":
            raise NotImplementedError("A process set from an MPI communicator needs MPI, which this build has not.")
        wrong = coded(
            WorldCode.INVALID_PROCESS_SET, f"ProcessSet({ranks_or_comm!r}) is not usable: expected ranks as integers."
        )
        if isinstance(ranks_or_comm, str | bytes) or not isinstance(ranks_or_comm, Iterable):
            raise ValueError(wrong)
        ranks = list(ranks_or_comm)
        if not all(isinstance(rank, (int, Integral)) and type(rank) is not bool for rank in ranks):
            raise ValueError(wrong)
        self.process_set_id = None
        self.ranks = sorted(int(rank) for rank in ranks)  # NumPy's numbers too
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int] | None:
        """Of the world, sorted. None for the global set while there is no world."""
        if self._ranks is None and self is global_process_set and (of_parent := parent()) is not None:
            return list(range(of_parent.size))
        return self._ranks

    @ranks.setter
    def ranks(self, ranks: list[int] | None) -> None:
        self._ranks = ranks

    def size(self) -> int | None:
        """Number of ranks in the set; None when it is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's number in the set; None when the set is not registered. ValueError when it is not a member."""
        if self.process_set_id is None or self.ranks is None:
            return None
        mine = place().rank
        if mine not in self.ranks:
            raise ValueError(coded(OperationCode.NOT_IN_SET, "Process is not part of provided process set."))
        return self.ranks.index(mine)

    def included(self) -> bool | None:
        """Whether this process is a member of the set; None when the set has no ranks yet."""
        if self.ranks is None:
            return None
        return place().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessSet:
        return self  # the set may be removed later, and a copy would not know

    def __reduce__(self) -> str | tuple[Callable[..., ProcessSet], tuple[list[int] | None, int | None]]:
        """Pickles the ranks. Unpickled, it is the registered set of these ranks, if there is one."""
        return "global_process_set" if self is global_process_set else (of_ranks, (self.ranks, self.process_set_id))


def of_ranks(ranks: list[int] | None, set_id: int | None = None) -> ProcessSet:
    """The registered set of these ranks; where there is none, one that is not registered.

    set_id: of the process that pickled the set. A child process that a rank has started gets its sets in this way, and
    they have the same ids there.
    """
    if (known := next((one for one in _registered.values() if one.ranks == ranks), None)) is not None:
        return known
    made = ProcessSet(ranks or [])
    if set_id is not None and not is_member() and parent() is not None:
        register(made, set_id)
    return made


def _make_global() -> ProcessSet:
    everyone = ProcessSet([])
    everyone.process_set_id = 0
    everyone.ranks = None  # filled at init
    return everyone


global_process_set = _make_global()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a process set and returns it, with its `process_set_id`: the smallest that is free.

    A collective: every rank of the world calls it, members or not, with the same ranks and in the same order. Returns
    when the set can be used.

    Example:

        >>> hvd.init(process_sets="dynamic")
        >>> even = hvd.add_process_set(range(0, hvd.size(), 2))
        >>> if even.included():
        ...     total = hvd.allreduce(tensor, op=hvd.Sum, process_set=even)

    Args:
        process_set: a hvd.ProcessSet, or the numbers of its ranks.

    Raises:
        ValueError: before hvd.init(); process sets are not dynamic; the ranks are not ranks of this world or a set of
            them exists; the ranks of the world do not agree. All ranks get the same error.
        NotImplementedError: an MPI communicator.
        HorovodInternalError: a rank was lost meanwhile.
    """
    context = current()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _check_dynamic(context, "add_process_set")
    (set_id,) = context.process_sets.add([process_set.ranks or []])
    register(process_set, set_id)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Takes a process set away; its `process_set_id` becomes None. False for one that is not registered or is global.

    A collective like `add_process_set`. All operations of the set must have been synchronized. Example:

        >>> last = hvd.add_process_set([hvd.size() - 1])
        >>> hvd.remove_process_set(last)
        True
        >>> hvd.remove_process_set(last)
        False

    Args:
        process_set: a hvd.ProcessSet that `add_process_set` returned.

    Raises:
        ValueError: process sets are not dynamic; operations run in the set; the ranks of the world do not agree.
        HorovodInternalError: a rank was lost meanwhile.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            coded(
                WorldCode.INVALID_PROCESS_SET,
                f"hvd.remove_process_set({process_set!r}) is not usable: expected an hvd.ProcessSet.",
            )
        )
    set_id = process_set.process_set_id
    if set_id is None or set_id == 0:
        return False
    context = current()
    _check_dynamic(context, "remove_process_set")
    if context.process_sets.number(set_id, process_set.ranks) is None:
        return False  # the set belongs to an earlier world
    context.process_sets.remove(set_id, _unawaited)
    process_set.process_set_id = None
    if (registered := _registered.pop(set_id, None)) is not None:
        registered.process_set_id = None
    return True


def count_unawaited(count: Callable[[int], int]) -> None:
    """`remove_process_set` asks `count` how many running operations nobody waits for: these do not delay it.

    count: is given the engine's number of the set.
    """
    global _unawaited
    _unawaited = count


def begin_with(process_set: ProcessSet, ranks: list[int], set_id: int | None) -> None:
    """Notes which ranks a set that was given to hvd.init() has in the new world; set_id None: it is not registered."""
    if process_set.ranks is not None and process_set.ranks != ranks:
        _asked[process_set], process_set.ranks = process_set.ranks, ranks
    if set_id is not None:
        register(process_set, set_id)


def register(process_set: ProcessSet, set_id: int) -> None:
    """Notes that the runtime has formed this set."""
    process_set.process_set_id = set_id
    _registered[set_id] = process_set


def registered(set_id: int) -> ProcessSet | None:
    """The process set with this id, but for the global one; None: there is none."""
    return _registered.get(set_id)


def registered_sets() -> dict[int, ProcessSet]:
    """All registered sets by id, without the global one."""
    return dict(_registered)


def forget_all() -> None:
    """After shutdown no set is registered any more, and each has the ranks that it was given."""
    for process_set in _registered.values():
        process_set.process_set_id = None
    _registered.clear()
    for process_set, ranks in _asked.items():
        process_set.ranks = ranks
    _asked.clear()


def _check_dynamic(context: Context, function: str) -> None:
    if not context.settings.dynamic_process_sets:
        raise ValueError(
            coded(
                WorldCode.STATIC_PROCESS_SETS,
                f"hvd.{function}() needs dynamic process sets, which are off. Set HOROVOD_DYNAMIC_PROCESS_SETS=1 or "
                'call hvd.init(process_sets="dynamic"), on all ranks.',
            )
        )
