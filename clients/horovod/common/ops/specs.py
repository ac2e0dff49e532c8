"""What every call settles before it goes to the engine: its reduction, its process set and its spec."""

from __future__ import annotations

import functools
import warnings
from typing import Final

from horovod._core import DType, OpSpec, ReduceOp
from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common.basics import Adasum, Average, Sum
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.worker.runtime.context import current, place

_REDUCTIONS: Final = frozenset(ReduceOp) - {ReduceOp.ADASUM}
_NAMES: Final = ", ".join(op.name.capitalize() for op in ReduceOp)
_FLOATING: Final = frozenset(dtype for dtype in DType if "FLOAT" in dtype.name)


# Specs that repeat are made once. A small tensor notices each argument that is hashed, so there are three of these.
@functools.lru_cache(256)
def spec(kind: int, number: int, root: int = 0) -> OpSpec:
    """The spec of an operation that does not reduce. number: of the process set, as `set_number` returns it."""
    return OpSpec(kind, root=root, process_set=number)


@functools.lru_cache(256)
def _reduction(kind: int, op: int, number: int) -> OpSpec:
    return OpSpec(kind, op=op, process_set=number)


@functools.lru_cache(256)
def _scaled_reduction(kind: int, op: int, number: int, prescale: float, postscale: float) -> OpSpec:
    return OpSpec(kind, op=op, prescale=prescale, postscale=postscale, process_set=number)


def reduction(kind: int, op: int, prescale: float, postscale: float, number: int) -> OpSpec:
    if prescale == 1.0 and postscale == 1.0:
        return _reduction(kind, op, number)
    return _scaled_reduction(kind, op, number, prescale, postscale)


def reduce_op(op: int | None, average: bool | None = None) -> int:
    """What `op` and the deprecated `average` together ask for. Average is the default."""
    if average is not None:
        if op is not None:
            raise ValueError(
                coded(
                    TrainingCode.CONTRADICTORY_ARGUMENTS,
                    "The op parameter supersedes average. Please provide only one of them.",
                )
            )
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed: use op=hvd.Average or op=hvd.Sum.",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    return Average if op is None else op


def check_reduction(op: int, dtype: int | None, process_set: ProcessSet, operation: str) -> None:
    """Refuses a reduction that does not exist, or not for tensors of this dtype in `process_set`."""
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError(
                coded(
                    OperationCode.UNDEFINED_REDUCTION,
                    f"{operation}: hvd.Adasum works with the global process set only.",
                )
            )
        if dtype not in _FLOATING:
            raise ValueError(
                coded(OperationCode.UNDEFINED_REDUCTION, f"{operation}: hvd.Adasum needs a floating-point tensor.")
            )
    elif op not in _REDUCTIONS:
        raise ValueError(coded(OperationCode.UNKNOWN_REDUCTION, f"{operation}: op={op!r} is not one of hvd.{_NAMES}."))


def set_number(process_set: ProcessSet, operation: str) -> int:
    """The engine's number of a process set; ValueError if it is not registered or this rank is not a member."""
    if process_set is global_process_set:
        return 0
    number = registered_number(process_set, operation)
    if not process_set.included():
        raise ValueError(
            coded(
                OperationCode.NOT_IN_SET,
                f"{operation}: Rank {current().world.rank} is not a member of the provided process set "
                f"(ranks {process_set.ranks}).",
            )
        )
    return number


def registered_number(process_set: ProcessSet, operation: str) -> int:
    """The engine's number of a process set of this world, also on a rank that is not a member; or ValueError."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(
            coded(
                TrainingCode.INVALID_ARGUMENT,
                f"process_set must be an hvd.ProcessSet, not {type(process_set).__name__}.",
            )
        )
    number = current().process_sets.number(process_set.process_set_id, process_set.ranks)
    if number is None:
        raise ValueError(
            coded(
                OperationCode.NO_SUCH_SET,
                f"{operation}: {process_set} is not registered. Pass it to hvd.init(process_sets=[...]) "
                "or to hvd.add_process_set() on every rank first.",
            )
        )
    return number


def set_size(process_set: ProcessSet) -> int:
    """Number of members of a process set that `set_number` accepted."""
    if process_set is global_process_set:
        return place().size
    return len(process_set.ranks or ())


def position(process_set: ProcessSet) -> int:
    """This rank's place among the members of a process set that `set_number` accepted."""
    place = process_set.rank()
    assert place is not None
    return place


def gradient_name(name: str | None) -> str | None:
    """The name of the operation in the backward pass of the one called `name`."""
    return None if name is None else name + ".grad"


def scatter_gradient_factor(op: int, prescale: float, postscale: float, process_set: ProcessSet) -> float:
    """By what a reducescatter's gradient is multiplied before the allgather that is its backward pass.

    Horovod averages losses, so Sum counts once for every rank.
    """
    return prescale * postscale * (set_size(process_set) if op == Sum else 1)
