"""The one way from a torch call to the engine: `run` for calls that wait, `start` for those that return a handle.

What ranks must agree on goes into the arguments of Engine.submit; everything about names, process sets and reduction
operations that holds for every collective is here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from horovod._core import Handle
from horovod.common.basics import Adasum, Average, Max, Min, Product, Sum
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.handles import AnyHandle, PartedHandle
from horovod.torch.tensors import READER, Given, check_tensor
from horovod.torch.undecided import UNDECIDED, before_waiting
from horovod.worker.runtime.context import current

# Numbers of horovod.protos.v1.types_pb2.OperationType; a world of one needs no protobuf, so they are written out.
ALLREDUCE: Final = 0
ALLGATHER: Final = 1
BROADCAST: Final = 2
ALLTOALL: Final = 3
REDUCESCATTER: Final = 4
BARRIER: Final = 5

_REDUCTIONS: Final = frozenset((Average, Sum, Min, Max, Product))


def run(
    keep: Any,
    kind: int,
    name: str,
    tensors: Sequence[Given],
    op: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Sequence[int] | None = None,
    set_id: int = 0,
) -> Any:
    """Submits and waits. `keep` is what must stay alive until the engine is done, also when the wait is interrupted."""
    if UNDECIDED:
        before_waiting()
    return current().engine.run(kind, name, tensors, op, prescale, postscale, root, splits, set_id, keep, READER)


def start(
    keep: Any,
    kind: int,
    name: str,
    tensors: Sequence[Given],
    op: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Sequence[int] | None = None,
    set_id: int = 0,
    finish: Callable[[Any], Any] | None = None,
    wait_follows: bool = False,
) -> Handle:
    """Submits and returns a handle. Without `finish`, `keep` is also what `synchronize` returns."""
    return current().engine.submit(
        kind, name, tensors, op, prescale, postscale, root, splits, set_id, wait_follows, keep, finish, READER
    )


def start_parts(
    parts: Sequence[Sequence[int]], name: str, start_part: Callable[[str, Sequence[int]], Handle]
) -> AnyHandle:
    """One operation for each dtype of a grouped call, behind one handle that gives the results in the caller's order.

    The first part has the name itself, so that ranks which differ in dtype still meet and are told of it.
    """
    if len(parts) == 1:
        return start_part(name, parts[0])
    if not parts:
        current()  # an empty group has nothing to wait for, but is an error before init like any other
    handles = [start_part(_part_name(name, part, len(parts)), indices) for part, indices in enumerate(parts)]

    def in_order(results: list[Any]) -> tuple[Any, ...]:
        found = {
            index: value
            for indices, values in zip(parts, results, strict=True)
            for index, value in zip(indices, values, strict=True)
        }
        return tuple(found[index] for index in range(len(found)))

    return PartedHandle(handles, in_order)


def _part_name(name: str, part: int, count: int) -> str:
    if part == 0:
        return name
    # The engine knows what has no name, and may overlap with its like, by its ending.
    ending = ".noname" if name.endswith(".noname") else ""
    return f"{name.removesuffix(ending)}.{part + 1}of{count}{ending}"


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd must see this call."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # not any(): its generator takes longer than all the rest
            if getattr(tensor, "requires_grad", False):
                return True
    return False


def set_id(process_set: ProcessSet, operation: str) -> int:
    """The engine's number of a process set; ValueError if it is not registered or this rank is not a member."""
    if process_set is global_process_set:
        return 0
    number = registered_number(process_set, operation)
    if not process_set.included():
        raise ValueError(
            f"{operation}: Rank {current().world.rank} is not a member of the provided process set "
            f"(ranks {process_set.ranks})."
        )
    return number


def registered_number(process_set: ProcessSet, operation: str) -> int:
    """The engine's number of a process set of this world, also on a rank that is not a member; or ValueError."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set must be an hvd.ProcessSet, not {type(process_set).__name__}.")
    number = current().process_sets.number(process_set.process_set_id, process_set.ranks)
    if number is None:
        raise ValueError(
            f"{operation}: {process_set} is not registered. Pass it to hvd.init(process_sets=[...]) "
            "or to hvd.add_process_set() on every rank first."
        )
    return number


def set_size(process_set: ProcessSet) -> int:
    """Number of members of a process set that `set_id` accepted."""
    if process_set is global_process_set:
        return current().world.size
    return len(process_set.ranks or ())


def reduce_op(op: int | None, average: bool | None = None) -> int:
    """What `op` and the deprecated `average` together ask for. Average is the default."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed: use op=hvd.Average or op=hvd.Sum.",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    return Average if op is None else op


def check_reduction(op: int, tensor: torch.Tensor, process_set: ProcessSet, operation: str) -> int:
    """Refuses a reduction that does not exist, or not in `process_set`; returns the operation to submit."""
    if op == Adasum:
        check_tensor(tensor)
        if process_set is not global_process_set:
            raise NotImplementedError(f"{operation}: hvd.Adasum works with the global process set only.")
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{operation}: hvd.Adasum needs a floating-point tensor.")
        return op
    if op not in _REDUCTIONS:
        raise ValueError(f"{operation}: op={op!r} is not one of hvd.Average, Sum, Adasum, Min, Max, Product.")
    return op
