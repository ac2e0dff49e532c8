"""Every type of operation and every reduction that there is: results, names, checks, the timeline.

Nothing here knows the types: they come from the engine's table, and what must come out from outcomes.py. So a new one
is tested when it has its rows; tests/extended/native/test_new_operations.py adds some to a copy of the tree and runs
this.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from outcomes import OUTCOMES, REDUCTIONS
from world import DTYPES, EngineWorld, Member, spec

from horovod._core import OP_TRAITS, DType, OpType, ReduceOp
from horovod.coordinator.core.agreement import operations
from horovod.coordinator.core.agreement.agreement import disagreement
from horovod.protos.v1 import types_pb2 as pb

WITH_TENSORS = [kind for kind in OpType if not OP_TRAITS[kind.name]["no_tensors"]]
WORLDS = [(2, "shm"), (2, "tcp"), (4, "shm"), (4, "tcp"), (3, "hosts"), (2, "gloo"), (6, "sparse"), (6, "sparse_hosts")]
SHAPES = [(12, 2), (60_000,)]  # one that travels with its arrival, and one that does not
INTEGERS = [name for name in DTYPES if "int" in name]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest):
    with EngineWorld(*request.param) as made:
        yield made


def given(kind: OpType, rank: int, shape: tuple[int, ...], size: int) -> np.ndarray:
    """Ranks have different rows where they may."""
    rows = shape[0] + size * rank if OP_TRAITS[kind.name]["uneven_rows"] else shape[0]
    return np.arange(rows * int(np.prod(shape[1:])), dtype=np.int32).reshape(rows, *shape[1:]) * (rank + 1)


def outputs_for(kind: OpType, arrays: list[np.ndarray]) -> list[np.ndarray | None]:
    return [None if OP_TRAITS[kind.name]["allocates"] else np.empty_like(array) for array in arrays]


def adopted(
    kind: OpType, answer: object, arrays: list[np.ndarray], outputs: list[np.ndarray | None]
) -> list[np.ndarray]:
    if not OP_TRAITS[kind.name]["allocates"]:
        return [output for output in outputs if output is not None]
    made = answer[0] if isinstance(answer, tuple) else answer
    return [np.frombuffer(one, array.dtype).reshape(one.shape) for one, array in zip(made, arrays, strict=True)]


def test_every_type_and_reduction_has_a_row() -> None:
    assert set(OUTCOMES) == set(WITH_TENSORS)
    assert set(REDUCTIONS) == set(ReduceOp)


@pytest.mark.parametrize("kind", WITH_TENSORS, ids=lambda kind: kind.name.lower())
def test_results_of_single_and_grouped_operations(world: EngineWorld, kind: OpType) -> None:
    """All are in flight at once: by every root, alone and two tensors in a group, with a name and without."""
    wire = kind.name.lower()
    roots = range(world.size) if OP_TRAITS[kind.name]["rooted"] else (0,)
    groups = [SHAPES[:1], SHAPES[1:], *([] if kind == OpType.ALLTOALL else [SHAPES])]  # which has no groups

    def body(member: Member) -> None:
        running = []
        for root in roots:
            for shapes in groups:
                arrays = [given(kind, member.rank, shape, member.size) for shape in shapes]
                for name in (f"{wire}.{root}.{shapes}", f"{wire}.noname"):
                    outputs = outputs_for(kind, arrays)
                    running.append(
                        (root, shapes, arrays, outputs, member.submit(kind, name, arrays, outputs, root=root))
                    )
        for root, shapes, arrays, outputs, handle in running:
            for shape, got in zip(shapes, adopted(kind, handle.result(), arrays, outputs), strict=True):
                everybody = [given(kind, rank, shape, member.size) for rank in range(member.size)]
                np.testing.assert_array_equal(got, OUTCOMES[kind](everybody, member.rank, root))

    world.run(body)


@pytest.mark.parametrize("op", [op for op, function in REDUCTIONS.items() if function], ids=lambda op: op.name.lower())
def test_reductions(world: EngineWorld, op: ReduceOp) -> None:
    """On integers, of which every reduction has something to say."""

    def of(rank: int, dtype: str, count: int) -> np.ndarray:
        return np.random.default_rng(rank).integers(0, 4 if op == ReduceOp.PRODUCT else 100, count).astype(dtype)

    def body(member: Member) -> None:
        for dtype in INTEGERS:
            for count in (5, 70_000):
                array = of(member.rank, dtype, count)
                got = member.allreduce(array, f"allreduce.{op.name}.{dtype}.{count}", op)
                everybody = [of(rank, dtype, count) for rank in range(member.size)]
                np.testing.assert_array_equal(got, functools.reduce(REDUCTIONS[op], everybody))

    world.run(body)


@pytest.mark.parametrize("kind", WITH_TENSORS, ids=lambda kind: kind.name.lower())
def test_alone_everybody_gets_what_it_gave(kind: OpType) -> None:
    with EngineWorld(1) as world:
        array = given(kind, 0, (3, 2), 1)
        outputs = outputs_for(kind, [array])
        handle = world.members[0].submit(kind, f"{kind.name.lower()}.x", [array], outputs)
        np.testing.assert_array_equal(adopted(kind, handle.result(), [array], outputs)[0], array)


def test_the_timeline_has_their_names(tmp_path: Path) -> None:
    with EngineWorld(2) as world:
        world.engines[0].start_timeline(str(tmp_path / "timeline.json"), False, 0)

        def body(member: Member) -> None:
            for kind in WITH_TENSORS:
                array = given(kind, member.rank, (4,), 2)
                member.submit(kind, f"{kind.name.lower()}.x", [array], outputs_for(kind, [array])).result()

        world.run(body)
        world.engines[0].stop_timeline()
    names = {event.get("name") for event in json.loads((tmp_path / "timeline.json").read_text())}
    assert {f"NEGOTIATE_{kind.name}" for kind in WITH_TENSORS} <= names
    assert {kind.name for kind in WITH_TENSORS} <= names


# -- what the coordinator knows of them --------------------------------------------------------------------------------


def test_numbers_names_and_traits_equal_those_of_the_protocol() -> None:
    assert {f"OPERATION_TYPE_{kind.name}": int(kind) for kind in OpType} == dict(pb.OperationType.items())
    assert {f"REDUCE_OP_{op.name}": int(op) for op in ReduceOp} == dict(pb.ReduceOp.items())
    for kind in OpType:
        traits = operations.traits_of(pb.Operation(type=int(kind)))
        said = {field.name: getattr(traits, field.name) for field in pb.OperationTraits.DESCRIPTOR.fields}
        assert said == {name: value for name, value in OP_TRAITS[kind.name].items() if name in said}, kind.name


@pytest.mark.parametrize("kind", OpType, ids=lambda kind: kind.name.lower())
def test_the_coordinator_compares_what_the_traits_say(kind: OpType) -> None:
    traits = OP_TRAITS[kind.name]

    def op(shape: tuple[int, ...] = (4, 2), **fields: float) -> pb.Operation:
        made = pb.Operation(name=f"{kind.name.lower()}.x", type=int(kind), reduce_op=pb.REDUCE_OP_SUM, **fields)
        if not traits["no_tensors"]:
            made.tensors.add(dtype=DType.FLOAT32, shape=shape)
        return made

    def compared(one: pb.Operation, other: pb.Operation) -> bool:
        """Whether the ranks are told of the difference, and the engine would negotiate again because of it."""
        told = bool(disagreement({0: one, 1: other}, (0, 1)))
        assert told == (operations.signature(one) != operations.signature(other))
        return told

    assert operations.user_name(op().name) == "x"
    assert not operations.defect(op())
    assert not compared(op(), op())
    assert compared(op(), op(root_rank=1)) == traits["rooted"]
    assert compared(op(), op(prescale_factor=2)) == traits["reduces"]
    tensors = not traits["no_tensors"]
    assert compared(op(), op((4, 3))) == tensors
    assert compared(op(), op((5, 2))) == (tensors and not traits["uneven_rows"])
    assert bool(disagreement({0: op(()), 1: op(())}, (0, 1))) == traits["needs_rows"]
    assert bool(operations.defect(pb.Operation(name="x", type=int(kind), tensors=[pb.TensorSpec()]))) != tensors


def test_a_spec_says_its_type() -> None:
    for kind in OpType:
        assert f"OpSpec({kind.name}," in repr(spec(kind, {}))
