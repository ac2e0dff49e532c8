"""The collectives on the tensors of any framework: names on the wire, checks, and the way to the engine and back.

Methods take what users' functions take, with `op` decided (specs.reduce_op), and raise what those promise. Each exists
as a call that waits and as one that returns a handle; none records a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Final, Generic, TypeVar

from horovod._core import Handle, OpType
from horovod.common.basics import Adasum, Average, Max, Min, Product, Sum
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops.framework import Framework
from horovod.common.ops.specs import allreduce_spec, check_reduction, set_number, set_size, spec
from horovod.common.ops.undecided import UNDECIDED, before_waiting
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.worker.runtime.context import current

T = TypeVar("T")

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER = map(int, OpType)

# Of operations without a name of their own, which match by their order.
_ALLREDUCE: Final = "allreduce.noname"
_ALLGATHER: Final = "allgather.noname"
_BROADCAST: Final = "broadcast.noname"
_ALLTOALL: Final = "alltoall.noname"
_REDUCESCATTER: Final = "reducescatter.noname"
_BARRIER: Final = "barrier.noname"


class Collectives(Generic[T]):
    """Operations of one tensor each; grouped.py has those of several."""

    def __init__(self, framework: Framework[T]) -> None:
        self.framework = framework
        self._reader = framework.reader

    # -- allreduce -----------------------------------------------------------------------------------------------------
    def allreduce(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> T:
        if op != Average and op != Sum:
            self.check_reduction(op, tensor, process_set, "Allreduce")
        output = self.framework.allocate(tensor)
        number = 0 if process_set is global_process_set else set_number(process_set, "Allreduce")
        if UNDECIDED:
            before_waiting()
        current().engine.run(
            allreduce_spec(op, prescale, postscale, number),
            _ALLREDUCE if name is None else "allreduce." + name,
            ((tensor, output),),
            (tensor, output),
            self._reader,
        )
        return output

    def allreduce_async(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> Handle:
        if op != Average and op != Sum:
            self.check_reduction(op, tensor, process_set, "Allreduce")
        output = self.framework.allocate(tensor)
        number = set_number(process_set, "Allreduce")
        return current().engine.submit(
            allreduce_spec(op, prescale, postscale, number),
            _ALLREDUCE if name is None else "allreduce." + name,
            ((tensor, output),),
            (output, tensor),
            self._reader,
            None,
            lambda _: output,
        )

    def allreduce_(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> T:
        if op != Average and op != Sum:
            self.check_reduction(op, tensor, process_set, "Allreduce")
        number = 0 if process_set is global_process_set else set_number(process_set, "Allreduce")
        if UNDECIDED:
            before_waiting()
        current().engine.run(
            allreduce_spec(op, prescale, postscale, number),
            _ALLREDUCE if name is None else "allreduce." + name,
            (tensor,),
            tensor,
            self._reader,
        )
        return tensor

    def allreduce_async_(
        self,
        tensor: T,
        op: int,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        wait_follows: bool = False,
    ) -> Handle:
        """wait_follows: as Engine.submit."""
        if op != Average and op != Sum:
            self.check_reduction(op, tensor, process_set, "Allreduce")
        number = 0 if process_set is global_process_set else set_number(process_set, "Allreduce")
        return current().engine.submit(
            allreduce_spec(op, prescale, postscale, number),
            _ALLREDUCE if name is None else "allreduce." + name,
            (tensor,),
            tensor,
            self._reader,
            None,
            None,
            wait_follows,
        )

    def check_reduction(self, op: int, tensor: T, process_set: ProcessSet, operation: str) -> None:
        dtype = self.framework.describe(tensor)[0] if op == Adasum else None
        check_reduction(op, dtype, process_set, operation)

    # -- allgather -----------------------------------------------------------------------------------------------------
    def allgather(self, tensor: T, name: str | None, process_set: ProcessSet) -> T:
        made = spec(ALLGATHER, number=set_number(process_set, "Allgather"))
        return self._run_to_adopt(made, _ALLGATHER if name is None else "allgather." + name, tensor)

    def allgather_async(self, tensor: T, name: str | None, process_set: ProcessSet) -> Handle:
        made = spec(ALLGATHER, number=set_number(process_set, "Allgather"))
        return self._start_to_adopt(made, _ALLGATHER if name is None else "allgather." + name, tensor)

    # -- broadcast -----------------------------------------------------------------------------------------------------
    def broadcast(self, tensor: T, root_rank: int, name: str | None, process_set: ProcessSet) -> T:
        number = check_root(root_rank, process_set)
        return self._broadcast_(self._copy_for(tensor, root_rank, name), root_rank, name, number)

    def broadcast_async(self, tensor: T, root_rank: int, name: str | None, process_set: ProcessSet) -> Handle:
        number = check_root(root_rank, process_set)
        return self._broadcast_async_(self._copy_for(tensor, root_rank, name), root_rank, name, number)

    def broadcast_(self, tensor: T, root_rank: int, name: str | None, process_set: ProcessSet) -> T:
        return self._broadcast_(tensor, root_rank, name, check_root(root_rank, process_set))

    def broadcast_async_(self, tensor: T, root_rank: int, name: str | None, process_set: ProcessSet) -> Handle:
        return self._broadcast_async_(tensor, root_rank, name, check_root(root_rank, process_set))

    def _broadcast_(self, tensor: T, root_rank: int, name: str | None, number: int) -> T:
        if UNDECIDED:
            before_waiting()
        wire = _BROADCAST if name is None else "broadcast." + name
        made = spec(BROADCAST, root=root_rank, number=number)
        current().engine.run(made, wire, (tensor,), tensor, self._reader)
        return tensor

    def _broadcast_async_(self, tensor: T, root_rank: int, name: str | None, number: int) -> Handle:
        wire = _BROADCAST if name is None else "broadcast." + name
        made = spec(BROADCAST, root=root_rank, number=number)
        return current().engine.submit(made, wire, (tensor,), tensor, self._reader)

    def _copy_for(self, tensor: T, root_rank: int, name: str | None) -> T:
        """What a broadcast that leaves `tensor` alone writes to: the engine broadcasts in place."""
        try:
            self.framework.view(tensor)  # refuses what can't travel before anything is copied
        except ValueError as refusal:
            raise named(refusal, "broadcast", name) from None
        return self.framework.allocate(tensor, filled=current().world.rank == root_rank)

    # -- alltoall ------------------------------------------------------------------------------------------------------
    def alltoall(
        self, tensor: T, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> tuple[T, list[int]]:
        """splits: whole numbers; None is equal parts. The rows, and how many of them came from each member."""
        number = set_number(process_set, "Alltoall")
        rows = self._splits(tensor, splits, process_set)
        wire = _ALLTOALL if name is None else "alltoall." + name
        if UNDECIDED:
            before_waiting()
        answer: Any = current().engine.run(
            spec(ALLTOALL, number=number), wire, ((tensor, None),), tensor, self._reader, rows
        )
        outputs, received = answer
        return self.framework.adopt(outputs[0]), received

    def alltoall_async(
        self,
        tensor: T,
        splits: Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
        received: Any,
    ) -> Handle:
        """received: makes what the caller wants of the list of rows that came from each member."""
        number = set_number(process_set, "Alltoall")
        rows = self._splits(tensor, splits, process_set)
        wire = _ALLTOALL if name is None else "alltoall." + name
        adopt = self.framework.adopt
        return current().engine.submit(
            spec(ALLTOALL, number=number),
            wire,
            ((tensor, None),),
            tensor,
            self._reader,
            rows,
            lambda answer: (adopt(answer[0][0]), received(answer[1])),
        )

    def _splits(self, tensor: T, splits: Sequence[int] | None, process_set: ProcessSet) -> list[int] | None:
        _, shape, _ = self.framework.describe(tensor)
        size = set_size(process_set)
        if not shape:
            return None  # the ranks are told together that a scalar has no rows
        if splits is None:
            if shape[0] % size:
                raise ValueError(
                    f"Alltoall: the first dimension of the tensor ({shape[0]}) is not divisible by the number of ranks "
                    f"({size}). Pass splits to send unequal parts."
                )
            return None
        try:
            rows = [operator.index(count) for count in splits]
        except TypeError:
            raise ValueError(f"Alltoall: splits must be whole numbers, not {splits!r}.") from None
        if len(rows) != size:
            raise ValueError(f"Alltoall: splits has {len(rows)} entries, but {size} ranks take part.")
        if min(rows) < 0:
            raise ValueError(f"Alltoall: splits must not be negative, but they are {rows}.")
        if sum(rows) > shape[0]:
            raise ValueError(
                f"Alltoall: splits sum to {sum(rows)}, which is more than the first dimension of the tensor "
                f"({shape[0]})."
            )
        return rows

    # -- reducescatter -------------------------------------------------------------------------------------------------
    def reducescatter(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> T:
        self.check_scatter(tensor, op, process_set)
        number = set_number(process_set, "Reducescatter")
        made = spec(REDUCESCATTER, op, prescale, postscale, 0, number)
        return self._run_to_adopt(made, _REDUCESCATTER if name is None else "reducescatter." + name, tensor)

    def reducescatter_async(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> Handle:
        self.check_scatter(tensor, op, process_set)
        number = set_number(process_set, "Reducescatter")
        made = spec(REDUCESCATTER, op, prescale, postscale, 0, number)
        return self._start_to_adopt(made, _REDUCESCATTER if name is None else "reducescatter." + name, tensor)

    def check_scatter(self, tensor: T, op: int, process_set: ProcessSet) -> None:
        dtype, shape, _ = self.framework.describe(tensor)
        if not shape:
            raise ValueError(
                "Reducescatter: the tensor is a scalar, which has no rows to scatter. Use hvd.allreduce, or give it a "
                "dimension with tensor.reshape(1)."
            )
        if op == Adasum:
            raise NotImplementedError("Reducescatter does not support op=hvd.Adasum. Use hvd.Average or hvd.Sum.")
        if op in (Min, Max, Product):
            raise HorovodInternalError("Reducescatter supports op=hvd.Average and op=hvd.Sum only.")
        check_reduction(op, dtype, process_set, "Reducescatter")

    # -- results whose size only the engine knows ----------------------------------------------------------------------
    def _run_to_adopt(self, made: Any, wire: str, tensor: T) -> T:
        if UNDECIDED:
            before_waiting()
        outputs: Any = current().engine.run(made, wire, ((tensor, None),), tensor, self._reader)
        return self.framework.adopt(outputs[0])

    def _start_to_adopt(self, made: Any, wire: str, tensor: T) -> Handle:
        adopt = self.framework.adopt
        return current().engine.submit(
            made, wire, ((tensor, None),), tensor, self._reader, None, lambda outputs: adopt(outputs[0])
        )


def barrier(process_set: ProcessSet) -> None:
    number = 0 if process_set is global_process_set else set_number(process_set, "Barrier")
    if UNDECIDED:
        before_waiting()
    current().engine.run(spec(BARRIER, number=number), _BARRIER, ())


def join(device: int) -> int:
    if not isinstance(device, int):
        raise TypeError(f"device must be the index of a GPU or -1, not {device!r}.")
    if UNDECIDED:
        before_waiting()
    return current().engine.join(device)


def check_root(root_rank: int, process_set: ProcessSet) -> int:
    """The number of the process set; ValueError unless `root_rank` is one of its ranks."""
    number = set_number(process_set, "Broadcast")
    size = current().world.size
    if not (isinstance(root_rank, (int, Integral)) and 0 <= root_rank < size):
        raise ValueError(
            f"Broadcast: root_rank {root_rank!r} is not a rank of this world: ranks go from 0 to {size - 1}."
        )
    if number and root_rank not in (process_set.ranks or ()):
        raise ValueError(
            f"Broadcast: root_rank {root_rank} is not a member of the provided process set "
            f"(ranks {process_set.ranks}); root_rank is a global rank."
        )
    return number


def named(refusal: ValueError, operation: str, name: str | None) -> ValueError:
    """The same with the name under which the tensor was given, as the engine adds it where it reads tensors itself."""
    return refusal if name is None else ValueError(f"{refusal} It was given as '{operation}.{name}'.")
