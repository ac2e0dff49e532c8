"""A world of one, and a process set of one, refuse what the coordinator would refuse there, in its words.

Nothing is announced where a rank is alone, so the engine has the coordinator's checks of one operation a second time
(csrc/collectives/alone.cc). This compares the two over a table of operations that may be wrong in any way.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from error_codes import ends_with
from world import (
    ADASUM,
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_SUM,
    ALLTOALL,
    AVERAGE,
    BARRIER,
    BROADCAST,
    MAX,
    REDUCESCATTER,
    SUM,
    EngineWorld,
)

from horovod._core import DType, OpSpec
from horovod.base.errors import OperationCode, code_of, without_code
from horovod.coordinator.core.agreement.agreement import disagreement
from horovod.coordinator.core.agreement.operations import MAX_DIMENSIONS, MAX_NAME_LENGTH, MAX_TENSORS, defect
from horovod.protos.v1 import types_pb2 as pb

FLOAT32 = DType.FLOAT32
MEMORY = np.zeros(64, np.float32)
Shapes = tuple[tuple[int, ...], ...]
Case = tuple[int, str, Shapes, int, int]  # kind, name, shapes, reduce operation, root's distance from the only member

KINDS = (ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER)
SHAPES: tuple[Shapes, ...] = (
    (),
    ((),),
    ((4,),),
    ((0,),),
    ((2, 3),),
    ((4,), ()),
    ((), (4,)),
    ((2,), (3,)),
    ((-1,),),
    ((2, -3),),
    ((1,) * MAX_DIMENSIONS,),
    ((1,) * (MAX_DIMENSIONS + 1),),
)
NAMES = ("", "x", "é" * MAX_NAME_LENGTH, "é" * (MAX_NAME_LENGTH + 1), "y" * (MAX_NAME_LENGTH + 1))


def cases() -> Iterator[Case]:
    for kind, shapes in itertools.product(KINDS, SHAPES):
        for reduce_op in (SUM, AVERAGE, MAX, ADASUM) if kind in (ALLREDUCE, REDUCESCATTER) else (SUM,):
            yield kind, "some.name", shapes, reduce_op, 0
    for name in NAMES:
        yield ALLREDUCE, name, ((4,),), SUM, 0
        yield ALLGATHER, name, ((),), SUM, 0  # of two defects the first counts
    for root in (-1, 1, 100):
        yield BROADCAST, "some.name", ((4,),), SUM, root
    yield ALLREDUCE, "some.name", ((0,),) * MAX_TENSORS, SUM, 0
    yield ALLREDUCE, "some.name", ((0,),) * (MAX_TENSORS + 1), SUM, 0


def expected_of(case: Case, rank: int) -> str:
    """What the coordinator says when `rank` is the only one to take part; "" when it is content."""
    kind, name, shapes, reduce_op, root = case
    op = pb.Operation(name=name, type=kind, reduce_op=reduce_op, root_rank=rank + root)
    op.prescale_factor = op.postscale_factor = 1.0
    for shape in shapes:
        op.tensors.add(dtype=FLOAT32, shape=shape)
    return defect(op) or disagreement({rank: op}, [rank])


def outcome_of(engine, case: Case, rank: int, process_set: int) -> tuple[str, str]:
    """Where it was refused, "call" or "result", and the sentence; or twice ""."""
    kind, name, shapes, reduce_op, root = case
    address = MEMORY.ctypes.data
    in_place = kind in (ALLREDUCE, BROADCAST)
    tensors = [(address, address if in_place else 0, FLOAT32, shape) for shape in shapes]
    spec = OpSpec(kind, op=reduce_op, root=rank + root, process_set=process_set)
    try:
        handle = engine.submit(spec, name, tensors)
    except (ValueError, RuntimeError) as error:
        return "call", str(error)
    try:
        handle.result()
    except RuntimeError as error:
        return "result", str(error)
    return "", ""


def check(engine, rank: int, process_set: int) -> None:
    seen = collections.Counter()
    for case in cases():
        expected = expected_of(case, rank)
        where, sentence = outcome_of(engine, case, rank, process_set)
        if where == "call":  # so it is in a world of any size: the coordinator hears of none of these
            assert expected or case[2] == (), (case, sentence)
        else:
            assert without_code(sentence) == without_code(expected), case
            assert not sentence or code_of(sentence) in (OperationCode.INVALID, OperationCode.NO_ROWS), case
        seen[where] += 1
    assert min(seen["call"], seen["result"], seen[""]) > 10, seen


def test_in_a_world_of_one() -> None:
    with EngineWorld(1) as world:
        check(world.engines[0], 0, 0)


@pytest.mark.parametrize("transport", ["in_process", "tcp"])
def test_in_a_set_of_one(transport: str) -> None:
    with EngineWorld(2, transport) as world:
        check(world.engines[1], 1, world.add_set(1, 1))


def test_after_the_end_nothing_is_accepted() -> None:
    tensor = (MEMORY.ctypes.data, MEMORY.ctypes.data, FLOAT32, (4,))
    with EngineWorld(1) as world:
        world.engines[0].abort("rank 0 on host here gave up. [peer-lost]")
        with pytest.raises(RuntimeError, match=ends_with(OperationCode.PEER_LOST, "gave up. (", "allreduce.x")):
            world.engines[0].submit(ALLREDUCE_SUM, "allreduce.x", [tensor])
    with EngineWorld(1) as world:
        world.engines[0].close()
        with pytest.raises(RuntimeError, match=ends_with(OperationCode.SHUT_DOWN)):
            world.engines[0].submit(ALLREDUCE_SUM, "allreduce.x", [tensor])
