"""The collectives on the tensors of any framework: names on the wire, checks, and the way to the engine and back.

Methods take what users' functions take, with `op` decided (specs.reduce_op), and raise what those promise. Each exists
as a call that waits and as one that returns a handle; none records a gradient.

A tensor whose memory the engine can't read as it is (Indirect) is the exception: such an operation is done with the
tensor's stand-in.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Final, Generic, TypeVar

from horovod._core import OP_TRAITS, OpSpec, OpType, ReduceOp
from horovod.base.errors import OperationCode, TrainingCode, coded, coded_like, without_code
from horovod.common.basics import Adasum, Average, Sum
from horovod.common.exceptions import HorovodInternalError
from horovod.common.ops.framework import Framework, Indirect
from horovod.common.ops.handles import AnyHandle, PartedHandle
from horovod.common.ops.questions import joined
from horovod.common.ops.specs import check_reduction, reduction, set_number, set_size, spec
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.worker.runtime.context import current

T = TypeVar("T")

ALLREDUCE, ALLGATHER, BROADCAST = int(OpType.ALLREDUCE), int(OpType.ALLGATHER), int(OpType.BROADCAST)
ALLTOALL, REDUCESCATTER, BARRIER = int(OpType.ALLTOALL), int(OpType.REDUCESCATTER), int(OpType.BARRIER)

# The usual specs, made once: for a small tensor even a look into a cache takes noticeable time.
SUM_OF_ALL: Final = OpSpec(ALLREDUCE, op=Sum)
AVERAGE_OF_ALL: Final = OpSpec(ALLREDUCE, op=Average)

# The prefix of operations that the script gave no name; they match by their order.
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
        self._allocate = framework.allocate
        self._view = framework.view
        self._adopt = framework.adopt

    # -- allreduce -----------------------------------------------------------------------------------------------------
    def allreduce(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> T:
        made = self.reduction(tensor, op, prescale, postscale, process_set)
        output = self._allocate(tensor)
        wire = _ALLREDUCE if name is None else "allreduce." + name
        try:
            current().engine.run(made, wire, ((tensor, output),), (tensor, output), self._reader)
        except Indirect as indirect:
            return with_stand_in(indirect, self.allreduce, op, name, prescale, postscale, process_set)
        return output

    def allreduce_async(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> AnyHandle:
        made = self.reduction(tensor, op, prescale, postscale, process_set)
        output = self._allocate(tensor)
        wire = _ALLREDUCE if name is None else "allreduce." + name
        try:
            return current().engine.submit(
                made, wire, ((tensor, output),), (output, tensor), self._reader, None, lambda _: output
            )
        except Indirect as indirect:
            return start_stand_in(indirect, self.allreduce_async, op, name, prescale, postscale, process_set)

    def allreduce_(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> T:
        made = self.reduction(tensor, op, prescale, postscale, process_set)
        wire = _ALLREDUCE if name is None else "allreduce." + name
        try:
            current().engine.run(made, wire, (tensor,), tensor, self._reader)
        except Indirect as indirect:
            arguments = (op, name, prescale, postscale, process_set)
            return with_stand_in(indirect, self.allreduce_, *arguments, in_place=wire)
        return tensor

    def allreduce_async_(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> AnyHandle:
        made = self.reduction(tensor, op, prescale, postscale, process_set)
        wire = _ALLREDUCE if name is None else "allreduce." + name
        try:
            return current().engine.submit(made, wire, (tensor,), tensor, self._reader)
        except Indirect as indirect:
            arguments = (op, name, prescale, postscale, process_set)
            return start_stand_in(indirect, self.allreduce_async_, *arguments, in_place=wire)

    def reduction(self, tensor: T, op: int, prescale: float, postscale: float, process_set: ProcessSet) -> OpSpec:
        """The spec of an allreduce of `tensor`, after its checks."""
        if process_set is global_process_set and prescale == 1.0 and postscale == 1.0:  # the usual case
            if op == Average:
                return AVERAGE_OF_ALL
            if op == Sum:
                return SUM_OF_ALL
        if op != Average and op != Sum:
            dtype = self.framework.dtype(tensor)
            check_reduction(op, dtype, process_set, "Allreduce")
            if dtype is None:
                self._refuse_order(tensor, op)
        number = 0 if process_set is global_process_set else set_number(process_set, "Allreduce")
        return reduction(ALLREDUCE, op, prescale, postscale, number)

    def _refuse_order(self, tensor: T, op: int) -> None:
        try:
            self._view(tensor)
        except Indirect:
            raise ValueError(
                coded(
                    OperationCode.UNDEFINED_REDUCTION,
                    f"Allreduce: op=hvd.{ReduceOp(op).name.capitalize()} is not defined for complex numbers. Use "
                    "hvd.Average or hvd.Sum, or send the real and the imaginary parts.",
                )
            ) from None

    # -- allgather -----------------------------------------------------------------------------------------------------
    def allgather(self, tensor: T, name: str | None, process_set: ProcessSet) -> T:
        made = spec(ALLGATHER, set_number(process_set, "Allgather"))
        try:
            return self._run_to_adopt(made, _ALLGATHER if name is None else "allgather." + name, tensor)
        except Indirect as indirect:
            return with_stand_in(indirect, self.allgather, name, process_set, by_rows=True)

    def allgather_async(self, tensor: T, name: str | None, process_set: ProcessSet) -> AnyHandle:
        made = spec(ALLGATHER, set_number(process_set, "Allgather"))
        try:
            return self._start_to_adopt(made, _ALLGATHER if name is None else "allgather." + name, tensor)
        except Indirect as indirect:
            return start_stand_in(indirect, self.allgather_async, name, process_set, by_rows=True)

    # -- broadcast -----------------------------------------------------------------------------------------------------
    def broadcast(self, tensor: T, root_rank: int, name: str | None, process_set: ProcessSet) -> T:
        check_root(root_rank, process_set)
        try:
            return self.broadcast_(self._copy_for(tensor, root_rank, name), root_rank, name, process_set)
        except Indirect as indirect:
            return with_stand_in(indirect, self.broadcast, root_rank, name, process_set)

    def broadcast_async(self, tensor: T, root_rank: int, name: str | None, process_set: ProcessSet) -> AnyHandle:
        check_root(root_rank, process_set)
        try:
            return self.broadcast_async_(self._copy_for(tensor, root_rank, name), root_rank, name, process_set)
        except Indirect as indirect:
            return start_stand_in(indirect, self.broadcast_async, root_rank, name, process_set)

    def broadcast_(self, tensor: T, root_rank: int, name: str | None, process_set: ProcessSet) -> T:
        made = spec(BROADCAST, check_root(root_rank, process_set), root_rank)
        wire = _BROADCAST if name is None else "broadcast." + name
        try:
            current().engine.run(made, wire, (tensor,), tensor, self._reader)
        except Indirect as indirect:
            return with_stand_in(indirect, self.broadcast_, root_rank, name, process_set, in_place=wire)
        return tensor

    def broadcast_async_(self, tensor: T, root_rank: int, name: str | None, process_set: ProcessSet) -> AnyHandle:
        made = spec(BROADCAST, check_root(root_rank, process_set), root_rank)
        wire = _BROADCAST if name is None else "broadcast." + name
        try:
            return current().engine.submit(made, wire, (tensor,), tensor, self._reader)
        except Indirect as indirect:
            return start_stand_in(indirect, self.broadcast_async_, root_rank, name, process_set, in_place=wire)

    def _copy_for(self, tensor: T, root_rank: int, name: str | None) -> T:
        """What a broadcast that leaves `tensor` alone writes to: the engine broadcasts in place."""
        try:
            self._view(tensor)  # refuses a tensor that can't be sent, before anything is copied
        except ValueError as refusal:
            raise named(refusal, "broadcast", name) from None
        return self._allocate(tensor, filled=current().world.rank == root_rank)

    # -- alltoall ------------------------------------------------------------------------------------------------------
    def alltoall(
        self, tensor: T, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> tuple[T, list[int]]:
        """splits: whole numbers; None is equal parts. The rows, and how many of them came from each member."""
        number = set_number(process_set, "Alltoall")
        rows = self._splits(tensor, splits, process_set)
        wire = _ALLTOALL if name is None else "alltoall." + name
        made = spec(ALLTOALL, number)
        try:
            answer: Any = current().engine.run(made, wire, ((tensor, None),), tensor, self._reader, rows)
        except Indirect as indirect:
            travelling, finish = indirect.stand_in(by_rows=True)
            output, received = self.alltoall(travelling, splits, name, process_set)
            return finish(output), received
        outputs, received = answer
        return self._adopt(outputs[0]), received

    def alltoall_async(
        self,
        tensor: T,
        splits: Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
        received: Any,
    ) -> AnyHandle:
        """received: makes what the caller wants of the list of rows that came from each member."""
        number = set_number(process_set, "Alltoall")
        rows = self._splits(tensor, splits, process_set)
        wire = _ALLTOALL if name is None else "alltoall." + name
        adopt = self._adopt
        try:
            return current().engine.submit(
                spec(ALLTOALL, number),
                wire,
                ((tensor, None),),
                tensor,
                self._reader,
                rows,
                lambda answer: (adopt(answer[0][0]), received(answer[1])),
            )
        except Indirect as indirect:
            travelling, finish = indirect.stand_in(by_rows=True)
            handle = self.alltoall_async(travelling, splits, name, process_set, received)
            return PartedHandle((handle,), lambda results: (finish(results[0][0]), results[0][1]))

    def _splits(self, tensor: T, splits: Sequence[int] | None, process_set: ProcessSet) -> list[int] | None:
        shape = self.framework.shape(tensor)
        size = set_size(process_set)
        if not shape:
            return None  # the ranks are told together that a scalar has no rows
        if splits is None:
            if shape[0] % size:
                raise ValueError(
                    coded(
                        OperationCode.WRONG_SPLITS,
                        f"Alltoall: the first dimension of the tensor ({shape[0]}) is not divisible by the number of "
                        f"ranks ({size}). Pass splits to send unequal parts.",
                    )
                )
            return None
        try:
            rows = [operator.index(count) for count in splits]
        except TypeError:
            raise ValueError(
                coded(OperationCode.WRONG_SPLITS, f"Alltoall: splits must be whole numbers, not {splits!r}.")
            ) from None
        if len(rows) != size:
            raise ValueError(
                coded(
                    OperationCode.WRONG_SPLITS,
                    f"Alltoall: splits has {len(rows)} entries, but {size} ranks take part.",
                )
            )
        if min(rows) < 0:
            raise ValueError(
                coded(OperationCode.WRONG_SPLITS, f"Alltoall: splits must not be negative, but they are {rows}.")
            )
        if sum(rows) > shape[0]:
            raise ValueError(
                coded(
                    OperationCode.WRONG_SPLITS,
                    f"Alltoall: splits sum to {sum(rows)}, which is more than the first dimension of the tensor "
                    f"({shape[0]}).",
                )
            )
        return rows

    # -- reducescatter -------------------------------------------------------------------------------------------------
    def reducescatter(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> T:
        made = self.scattered_reduction(tensor, op, prescale, postscale, process_set)
        try:
            return self._run_to_adopt(made, _REDUCESCATTER if name is None else "reducescatter." + name, tensor)
        except Indirect as indirect:
            return with_stand_in(indirect, self.reducescatter, op, name, prescale, postscale, process_set)

    def reducescatter_async(
        self, tensor: T, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> AnyHandle:
        made = self.scattered_reduction(tensor, op, prescale, postscale, process_set)
        try:
            return self._start_to_adopt(made, _REDUCESCATTER if name is None else "reducescatter." + name, tensor)
        except Indirect as indirect:
            return start_stand_in(indirect, self.reducescatter_async, op, name, prescale, postscale, process_set)

    def scattered_reduction(
        self, tensor: T, op: int, prescale: float, postscale: float, process_set: ProcessSet
    ) -> OpSpec:
        """The spec of a reducescatter of `tensor`, after its checks."""
        if not self.framework.shape(tensor):
            raise ValueError(
                coded(
                    OperationCode.NO_ROWS,
                    "Reducescatter: the tensor is a scalar, which has no rows to scatter. Use hvd.allreduce, or give "
                    "it a dimension with tensor.reshape(1).",
                )
            )
        if op != Average and op != Sum:
            self._refuse_scatter(op)
        number = 0 if process_set is global_process_set else set_number(process_set, "Reducescatter")
        return reduction(REDUCESCATTER, op, prescale, postscale, number)

    @staticmethod
    def _refuse_scatter(op: int) -> None:
        if op == Adasum:
            raise NotImplementedError(
                coded(
                    OperationCode.UNDEFINED_REDUCTION,
                    "Reducescatter does not support op=hvd.Adasum. Use hvd.Average or hvd.Sum.",
                )
            )
        check_reduction(op, None, global_process_set, "Reducescatter")
        raise HorovodInternalError(
            coded(OperationCode.UNDEFINED_REDUCTION, "Reducescatter supports op=hvd.Average and op=hvd.Sum only.")
        )

    # -- types without calls of their own ------------------------------------------------------------------------------
    def run(
        self, kind: OpType, tensor: T, name: str | None, process_set: ProcessSet, root: int = 0, op: int = Sum
    ) -> T:
        """Any type of operation of one tensor, by its traits (csrc/collectives/op_types.h); a new tensor."""
        made, wire = self._any(kind, name, process_set, root, op)
        try:
            if OP_TRAITS[kind.name]["allocates"]:
                return self._run_to_adopt(made, wire, tensor)
            output = self._allocate(tensor)
            current().engine.run(made, wire, ((tensor, output),), (tensor, output), self._reader)
        except Indirect as indirect:
            return with_stand_in(indirect, functools.partial(self.run, kind), name, process_set, root, op)
        return output

    def start(
        self, kind: OpType, tensor: T, name: str | None, process_set: ProcessSet, root: int = 0, op: int = Sum
    ) -> AnyHandle:
        made, wire = self._any(kind, name, process_set, root, op)
        try:
            if OP_TRAITS[kind.name]["allocates"]:
                return self._start_to_adopt(made, wire, tensor)
            output = self._allocate(tensor)
            return current().engine.submit(
                made, wire, ((tensor, output),), (output, tensor), self._reader, None, lambda _: output
            )
        except Indirect as indirect:
            return start_stand_in(indirect, functools.partial(self.start, kind), name, process_set, root, op)

    @staticmethod
    def _any(kind: OpType, name: str | None, process_set: ProcessSet, root: int, op: int) -> tuple[OpSpec, str]:
        operation = kind.name.capitalize()
        traits = OP_TRAITS[kind.name]
        wire = f"{kind.name.lower()}.{'noname' if name is None else name}"
        if traits["rooted"]:
            return spec(kind, check_root(root, process_set, operation), root), wire
        number = set_number(process_set, operation)
        if traits["reduces"]:
            check_reduction(op, None, process_set, operation)
            return reduction(kind, op, 1.0, 1.0, number), wire
        return spec(kind, number), wire

    # -- results whose size only the engine knows ----------------------------------------------------------------------
    def _run_to_adopt(self, made: Any, wire: str, tensor: T) -> T:
        outputs: Any = current().engine.run(made, wire, ((tensor, None),), tensor, self._reader)
        return self._adopt(outputs[0])

    def _start_to_adopt(self, made: Any, wire: str, tensor: T) -> AnyHandle:
        adopt = self._adopt
        return current().engine.submit(
            made, wire, ((tensor, None),), tensor, self._reader, None, lambda outputs: adopt(outputs[0])
        )


def barrier(process_set: ProcessSet) -> None:
    number = 0 if process_set is global_process_set else set_number(process_set, "Barrier")
    current().engine.run(spec(BARRIER, number), _BARRIER, ())


def join(device: int) -> int:
    if not isinstance(device, int):
        raise TypeError(
            coded(TrainingCode.INVALID_ARGUMENT, f"device must be the index of a GPU or -1, not {device!r}.")
        )
    last = current().engine.join(device)
    joined()
    return last


def check_root(root_rank: int, process_set: ProcessSet, operation: str = "Broadcast") -> int:
    """The number of the process set; ValueError unless `root_rank` is one of its ranks."""
    number = set_number(process_set, operation)
    size = current().world.size
    if not (isinstance(root_rank, (int, Integral)) and 0 <= root_rank < size):
        raise ValueError(
            coded(
                OperationCode.INVALID_ROOT,
                f"{operation}: root_rank {root_rank!r} is not a rank of this world: ranks go from 0 to {size - 1}.",
            )
        )
    if number and root_rank not in (process_set.ranks or ()):
        raise ValueError(
            coded(
                OperationCode.INVALID_ROOT,
                f"{operation}: root_rank {root_rank} is not a member of the provided process set "
                f"(ranks {process_set.ranks}); root_rank is a global rank.",
            )
        )
    return number


def named(refusal: ValueError, operation: str, name: str | None) -> ValueError:
    """The same with the name under which the tensor was given, as the engine adds it where it reads tensors itself."""
    if name is None:
        return refusal
    return ValueError(coded_like(refusal, f"{without_code(refusal)} It was given as '{operation}.{name}'."))


def with_stand_in(
    indirect: Indirect, run: Callable[..., T], *arguments: Any, in_place: str = "", by_rows: bool = False
) -> T:
    """The result of `run(tensor, *arguments)` for a tensor that can't travel itself. in_place: the operation's name."""
    travelling, finish = stand_in(indirect, in_place, by_rows)
    result: T = finish(run(travelling, *arguments))
    return result


def start_stand_in(
    indirect: Indirect, start: Callable[..., AnyHandle], *arguments: Any, in_place: str = "", by_rows: bool = False
) -> AnyHandle:
    """The same where `start` returns a handle."""
    travelling, finish = stand_in(indirect, in_place, by_rows)
    return PartedHandle((start(travelling, *arguments),), lambda results: finish(results[0]))


def stand_in(indirect: Indirect, in_place: str, by_rows: bool) -> tuple[Any, Callable[[Any], Any]]:
    """`indirect.stand_in` for the operation `in_place`, whose name a refusal ends with; "": it is not in place."""
    try:
        return indirect.stand_in(in_place=bool(in_place), by_rows=by_rows)
    except ValueError as refusal:
        operation, _, name = in_place.partition(".")
        raise named(refusal, operation, None if name == "noname" else name) from None
