"""Every cross-rank check: what it lets pass, and its place in the order of the checks."""

import copy
import re

import pytest
from coordinator_builders import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    AVERAGE,
    BARRIER,
    BROADCAST,
    CPU,
    FLOAT32,
    FLOAT64,
    GPU,
    MIN,
    REDUCESCATTER,
    SUM,
    op,
)
from error_codes import ends_with
from hypothesis import given
from hypothesis import strategies as st

from horovod.base.errors import OperationCode, code_of
from horovod.coordinator.core.agreement.agreement import disagreement
from horovod.coordinator.core.agreement.operations import defect, signature, user_name
from horovod.protos.v1 import types_pb2 as pb

PAIR = (FLOAT32, [2]), (FLOAT32, [3])


def check(*ops: pb.Operation) -> str:
    return disagreement(dict(enumerate(ops)), range(len(ops)))


@pytest.mark.parametrize(
    "ops",
    [
        [op("a", ALLGATHER, shape=[0, 3]), op("a", ALLGATHER, shape=[7, 3])],
        [op("a", ALLTOALL, shape=[4, 3]), op("a", ALLTOALL, shape=[9, 3])],
        [op("b", BARRIER), op("b", BARRIER)],
        [op(shape=[]), op(shape=[])],
        [op(prescale=float("nan")), op(prescale=float("nan"))],
        [op("g", tensors=PAIR), op("g", tensors=PAIR)],
        # what an operation does not use is not compared
        [op("b", BROADCAST, reduce_op=SUM, prescale=2.0), op("b", BROADCAST)],
        [op(root=0), op(root=5)],
        [op("a", ALLGATHER, root=1, reduce_op=MIN, postscale=3.0), op("a", ALLGATHER)],
    ],
)
def test_agreement(ops: list[pb.Operation]) -> None:
    assert check(*ops) == ""
    assert len({signature(one) for one in ops}) == 1


STEMS_IN_ORDER = {
    "dtype": "Mismatched data types: One rank had type ",
    "kind": "Mismatched operations: ",
    "count": "Mismatched ALLREDUCE tensor counts: ",
    "shape": "Mismatched ALLREDUCE tensor shapes: ",
    "factor": "Mismatched prescale and/or postscale factors: ",
    "reduce": "Mismatched reduction operation: ",
    "device": "Mismatched ALLREDUCE CPU/GPU device selection: ",
}


@given(st.sets(st.sampled_from(list(STEMS_IN_ORDER)), min_size=1))
def test_the_first_check_that_fails_speaks(differences: set[str]) -> None:
    one, other = op(), op()
    if "dtype" in differences:
        other.tensors[0].dtype = FLOAT64
    if "kind" in differences:
        other.type = REDUCESCATTER
    if "count" in differences:
        other.tensors.append(copy.copy(other.tensors[0]))
    if "shape" in differences:
        other.tensors[0].shape[0] += 1
    if "factor" in differences:
        other.postscale_factor = 0.25
    if "reduce" in differences:
        other.reduce_op = SUM
    if "device" in differences:
        other.device = GPU
    first = next(name for name in STEMS_IN_ORDER if name in differences)
    assert check(one, other).startswith(STEMS_IN_ORDER[first])


KINDS = st.sampled_from([ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER])
OPERATIONS = st.builds(
    op,
    name=st.just("x"),
    kind=KINDS,
    tensors=st.lists(
        st.tuples(st.sampled_from([FLOAT32, FLOAT64]), st.lists(st.integers(0, 2), min_size=1, max_size=2)),
        min_size=1,
        max_size=2,
    ),
    reduce_op=st.sampled_from([AVERAGE, SUM]),
    prescale=st.sampled_from([1.0, 0.5]),
    root=st.integers(0, 1),
    device=st.sampled_from([CPU, GPU]),
)


@given(OPERATIONS, OPERATIONS)
def test_signatures_differ_exactly_when_a_check_fails(one: pb.Operation, other: pb.Operation) -> None:
    assert (check(one, other) == "") == (signature(one) == signature(other))


def test_many_ranks_are_named_briefly() -> None:
    ops = {rank: op(shape=[1 if rank < 900 else rank]) for rank in range(1000)}
    sentence = disagreement(ops, range(1000))
    assert re.search(ends_with(OperationCode.MISMATCHED, "0-899", "[1]", "rank 900", "[900]", 97), sentence)
    assert len(sentence) < 500


@pytest.mark.parametrize(
    "broken",
    [
        op(name=""),
        op(name="x" * 5000),
        op(dtype=99),  # type: ignore[arg-type]
        op(kind=99),  # type: ignore[arg-type]
        op(reduce_op=99),  # type: ignore[arg-type]
        op(device=99),  # type: ignore[arg-type]
        op(shape=[-1]),
        op(shape=[1] * 65),
        op("b", BARRIER, tensors=PAIR),
    ],
)
def test_what_makes_no_sense_by_itself(broken: pb.Operation) -> None:
    assert code_of(defect(broken)) is OperationCode.INVALID
    assert defect(op()) == ""


@pytest.mark.parametrize(
    ("wire_name", "expected"),
    [
        ("allreduce.fc1.weight", "fc1.weight"),
        ("grouped_allgather.x", "x"),
        ("broadcast.noname.7", "noname.7"),
        ("layer.weight", "layer.weight"),
        ("allreduce", "allreduce"),
    ],
)
def test_user_names(wire_name: str, expected: str) -> None:
    assert user_name(wire_name) == expected
