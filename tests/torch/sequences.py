"""Sequences of mixed operations: what one is, how several threads of a rank play it, and what must come out.

An example is a list of `Operation`s, each done by one thread on each member of its process set. No sequence can block,
because each thread does what it waits for in the same order on all ranks, and asks for what it started at the end:

    ordered     calls that wait, and those without a name (which match by their order, so that one thread does them all)
    started     named asynchronous calls, put between the others in an order of each rank's own

The names are those of the place in the list, so that a name means something else in the next example.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import op_cases
import pytest
from error_codes import ends_with

from horovod.base.errors import OperationCode

WITHOUT_A_NAME = 0  # the thread that does what has no name
FACTORS = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (2.0, 0.25))
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "allreduce": ("op", "prescale_factor", "postscale_factor"),
    "reducescatter": ("op", "prescale_factor", "postscale_factor"),
    "allgather": (),
    "broadcast": ("root_rank",),
    "alltoall": ("splits",),
}
GROUPED = ("allreduce", "allgather", "reducescatter")
IN_PLACE = ("allreduce", "broadcast")


@dataclass(frozen=True)
class Operation:
    """One operation of a sequence, as all ranks know it."""

    kind: str  # a key of OPTIONS_OF, or "sparse", "object", "barrier", "mismatch"
    members: tuple[int, ...]  # a process set
    thread: int
    form: str = ""  # what follows the name of the function: "", "_async", "_", "_async_"
    named: bool = True
    shape: tuple[int, ...] = (2,)
    dtypes: tuple[str, ...] = ("float32",)  # more than one: a group
    reduce_op: str = "Sum"
    factors: tuple[float, float] = (1.0, 1.0)
    root: int = 0  # the place of the root among the members
    uneven: bool = False  # alltoall with splits
    seed: int = 0

    @property
    def ordered(self) -> bool:
        return not (self.named and "async" in self.form)

    def inputs(self, place: int, tensor: int) -> np.ndarray:
        """Of the member at `place`; any rank can tell."""
        rows, *columns = self.shape or (1,)
        if self.kind == "allgather":
            rows = rows * (place + self.seed) % 7 if rows < 100 else rows + place
        elif self.kind == "alltoall":
            rows = sum(self.splits(place)) + 1 if self.uneven else rows * len(self.members)
        shape = (rows, *columns) if self.shape else ()
        return op_cases.values(place, shape, self.dtypes[tensor], self.seed + 10 * tensor)

    def splits(self, place: int) -> list[int]:
        return op_cases.split_sizes(place + self.seed, len(self.members))

    def expected(self, place: int, tensor: int) -> np.ndarray:
        """What NumPy says the member at `place` must get."""
        size, dtype = len(self.members), self.dtypes[tensor]
        everybody = [self.inputs(other, tensor) for other in range(size)]
        match self.kind:
            case "allreduce":
                return op_cases.reduced(everybody, self.reduce_op, dtype, *self.factors)
            case "reducescatter":
                full = op_cases.reduced(everybody, self.reduce_op, dtype, *self.factors)
                return op_cases.own_rows(full, place, size)
            case "allgather":
                return np.concatenate(everybody)
            case "broadcast":
                return everybody[self.root]
            case "alltoall" if self.uneven:
                cuts = [np.cumsum(self.splits(other)) for other in range(size)]
                parts = [np.split(x, cut)[place] for x, cut in zip(everybody, cuts, strict=True)]
                return np.concatenate(parts)
            case "alltoall":
                return np.concatenate([np.split(x, size)[place] for x in everybody])
        raise AssertionError(self.kind)


# -- one rank ----------------------------------------------------------------------------------------------------------
_sets: dict[tuple[int, ...], Any] = {}  # those of this rank's world, by their members


def prepare(sets: Sequence[tuple[int, ...]]) -> None:
    """Forms the process sets of all sequences to come."""
    import horovod.torch as hvd

    _sets.clear()
    _sets[tuple(range(hvd.size()))] = hvd.global_process_set
    for members in sets:
        _sets[members] = hvd.add_process_set(members)


def play(operations: Sequence[Operation], threads: int, seed: int) -> None:
    """This rank's part of the sequence, in `threads` threads at the same time."""
    import horovod.torch as hvd

    errors: list[BaseException] = []

    def guarded(thread: int) -> None:
        try:
            _play_in(thread, operations, random.Random(f"{seed} {hvd.rank()} {thread}"))
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=guarded, args=(thread,), daemon=True) for thread in range(1, threads)]
    for other in others:
        other.start()
    guarded(0)
    for other in others:
        other.join()  # what is stuck is ended by the deadline of the world
    if errors:
        raise errors[0]


def _play_in(thread: int, operations: Sequence[Operation], order: random.Random) -> None:
    import horovod.torch as hvd

    own = [
        (index, operation)
        for index, operation in enumerate(operations)
        if operation.thread == thread and hvd.rank() in operation.members
    ]
    ordered = [one for one in own if one[1].ordered]
    started = [one for one in own if not one[1].ordered]
    order.shuffle(started)
    checks = []
    while ordered or started:
        from_ordered = order.random() * (len(ordered) + len(started)) < len(ordered)
        index, operation = (ordered if from_ordered else started).pop(0)
        checks.append(_begin(operation, operation.members.index(hvd.rank()), f"sequence.{index}"))
    order.shuffle(checks)
    for check in checks:
        check()


def _begin(operation: Operation, place: int, name: str) -> Callable[[], None]:
    """Runs or starts the operation; what is returned waits for it where it must, and compares."""
    import horovod.torch as hvd

    what = f"{name} {operation}"
    options: dict[str, Any] = {"process_set": _sets[operation.members]}
    if operation.named:
        options["name"] = name
    special = {"sparse": _sparse, "object": _object, "barrier": _barrier, "mismatch": _mismatch}.get(operation.kind)
    if special is not None:
        return special(operation, place, options)
    given = {
        "op": getattr(hvd, operation.reduce_op),
        "prescale_factor": operation.factors[0],
        "postscale_factor": operation.factors[1],
        "root_rank": operation.members[operation.root],
        "splits": operation.splits(place) if operation.uneven else None,
    }
    options |= {option: given[option] for option in OPTIONS_OF[operation.kind]}
    tensors = [op_cases.tensor(operation.inputs(place, number), dtype) for number, dtype in enumerate(operation.dtypes)]
    grouped = len(tensors) > 1
    function = getattr(hvd, f"{'grouped_' if grouped else ''}{operation.kind}{operation.form}")
    result = function(tensors if grouped else tensors[0], **options)

    def check() -> None:
        found = result
        if "async" in operation.form:
            hvd.poll(result)
            found = hvd.synchronize(result)
            assert hvd.synchronize(result) is None
        if operation.kind == "alltoall" and isinstance(found, tuple):
            found, received = found
            size = len(operation.members)
            sent = [operation.splits(other)[place] for other in range(size)] if operation.uneven else None
            assert received.tolist() == (sent or [operation.shape[0]] * size), what
        for number, tensor in enumerate(found if grouped else [found]):
            if operation.form.endswith("_"):
                assert tensor is tensors[number], what
            rounding = operation.reduce_op == "Average" or operation.factors != (1.0, 1.0)
            dtype = operation.dtypes[number]
            op_cases.check(op_cases.array(tensor), operation.expected(place, number), dtype, what, rounding)

    return check


def _sparse(operation: Operation, place: int, options: dict[str, Any]) -> Callable[[], None]:
    import torch

    import horovod.torch as hvd

    def rows(other: int) -> list[int]:
        return [(other + operation.seed + step) % 5 for step in range((other + operation.seed) % 3)]

    values = torch.full((len(rows(place)), 2), place + 1.0)
    mine = torch.sparse_coo_tensor([rows(place)], values, (5, 2), check_invariants=True)
    wait = hvd.sparse_allreduce_async(mine, op=hvd.Sum, **options)

    def check() -> None:
        expected = torch.zeros(5, 2)
        for other in range(len(operation.members)):
            for row in rows(other):
                expected[row] += other + 1.0
        assert torch.equal(wait().to_dense(), expected)

    return check


def _object(operation: Operation, place: int, options: dict[str, Any]) -> Callable[[], None]:
    import horovod.torch as hvd

    def thing(other: int) -> list[str]:
        return ["x" * (operation.seed * 400 + other)] * 3

    root = operation.members[operation.root]
    one = hvd.broadcast_object(thing(place), root, **options)
    everyone = hvd.allgather_object(thing(place), **options)
    assert one == thing(operation.root)
    assert everyone == [thing(other) for other in range(len(operation.members))]
    return lambda: None


def _barrier(operation: Operation, place: int, options: dict[str, Any]) -> Callable[[], None]:
    import horovod.torch as hvd

    hvd.barrier(**options)
    return lambda: None


def _mismatch(operation: Operation, place: int, options: dict[str, Any]) -> Callable[[], None]:
    """The members do not agree: all of them are told, and nothing else suffers."""
    import torch

    import horovod.torch as hvd

    handle = hvd.allreduce_async(torch.ones(3 if place == 0 else 2), **options)

    def check() -> None:
        with pytest.raises(hvd.HorovodInternalError, match=ends_with(OperationCode.MISMATCHED)):
            hvd.synchronize(handle)

    return check
