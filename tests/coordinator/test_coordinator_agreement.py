"""Every cross-rank check: its sentence, and its place in the order of the checks."""

import copy

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
from hypothesis import given
from hypothesis import strategies as st

from horovod.coordinator.core.agreement.agreement import disagreement
from horovod.coordinator.core.agreement.operations import defect, signature, user_name
from horovod.protos.v1 import types_pb2 as pb

PAIR = (FLOAT32, [2]), (FLOAT32, [3])


def check(*ops: pb.Operation) -> str:
    return disagreement(dict(enumerate(ops)), range(len(ops)))


@pytest.mark.parametrize(
    ("ops", "sentence"),
    [
        (
            [op(dtype=FLOAT32), op(dtype=FLOAT64), op(dtype=FLOAT32)],
            (
                "Mismatched data types: One rank had type float32, but another rank had type float64, in allreduce.x: "
                "ranks 0 and 2 have float32; rank 1 has float64. Pass a tensor of the same dtype on every rank."
            ),
        ),
        (
            [op("g", tensors=PAIR), op("g", tensors=(PAIR[0], (FLOAT64, [3])))],
            (
                "Mismatched data types: One rank had type float32, but another rank had type float64, in tensor 2 of "
                "2 of g: rank 0 has float32; rank 1 has float64. Pass a tensor of the same dtype on every rank."
            ),
        ),
        (
            [op("x", ALLREDUCE), op("x", BROADCAST)],
            (
                "Mismatched operations: One rank did ALLREDUCE, but another rank did BROADCAST, in x: rank 0 has "
                "ALLREDUCE; rank 1 has BROADCAST. Call the same operation under one name on every rank."
            ),
        ),
        (
            [op("g", tensors=PAIR), op("g", tensors=PAIR[:1])],
            (
                "Mismatched ALLREDUCE tensor counts: One rank grouped this many tensors: 2, but another rank "
                "grouped this many tensors: 1, in g: rank 0 has 2; rank 1 has 1. Pass the same list of "
                "tensors on every rank."
            ),
        ),
        (
            [op(shape=[2, 3]), op(shape=[2, 4])],
            (
                "Mismatched ALLREDUCE tensor shapes: One rank had shape [2, 3], but another rank had shape [2, 4], in "
                "allreduce.x: rank 0 has [2, 3]; rank 1 has [2, 4]. Pass a tensor of the same shape on every rank."
            ),
        ),
        (
            [op("b", BROADCAST, shape=[]), op("b", BROADCAST, shape=[1])],
            (
                "Mismatched BROADCAST tensor shapes: One rank had shape [], but another rank had shape [1], in b: "
                "rank 0 has []; rank 1 has [1]. Pass a tensor of the same shape on every rank."
            ),
        ),
        (
            [op("r", REDUCESCATTER, shape=[4]), op("r", REDUCESCATTER, shape=[5])],
            (
                "Mismatched REDUCESCATTER tensor shapes: One rank had shape [4], but another rank had shape [5], in "
                "r: rank 0 has [4]; rank 1 has [5]. Pass a tensor of the same shape on every rank."
            ),
        ),
        (
            [op(prescale=0.5), op(postscale=2.0)],
            (
                "Mismatched prescale and/or postscale factors: One rank had prescale_factor=0.5 and "
                "postscale_factor=1.0, but another rank had prescale_factor=1.0 and postscale_factor=2.0, in "
                "allreduce.x: rank 0 has prescale_factor=0.5 and postscale_factor=1.0; rank 1 has prescale_factor=1.0 "
                "and postscale_factor=2.0. Pass the same factors on every rank."
            ),
        ),
        (
            [op(reduce_op=AVERAGE), op(reduce_op=MIN)],
            (
                "Mismatched reduction operation: One rank asked for Average, but another rank asked for Min, in "
                "allreduce.x: rank 0 has Average; rank 1 has Min. Pass the same op= on every rank."
            ),
        ),
        (
            [op("a", ALLGATHER, shape=[]), op("a", ALLGATHER, shape=[])],
            (
                "Ranks 0 and 1 tried to ALLGATHER a rank-zero tensor, in a. The tensor needs at least one dimension; "
                "use for example tensor.reshape(1)."
            ),
        ),
        (
            [op("a", ALLTOALL, shape=[2]), op("a", ALLTOALL, shape=[])],
            (
                "Rank 1 tried to ALLTOALL a rank-zero tensor, in a. The tensor needs at least one dimension; use for "
                "example tensor.reshape(1)."
            ),
        ),
        (
            [op("r", REDUCESCATTER, shape=[])] * 2,
            (
                "Ranks 0 and 1 tried to REDUCESCATTER a rank-zero tensor, in r. The tensor needs at least one "
                "dimension; use for example tensor.reshape(1)."
            ),
        ),
        (
            [op("a", ALLGATHER, shape=[5]), op("a", ALLGATHER, shape=[5, 1])],
            (
                "Mismatched ALLGATHER tensor shapes: One rank had this many dimensions: 1, but another rank had this "
                "many dimensions: 2, in a: rank 0 has 1; rank 1 has 2. Pass a tensor with the same number of "
                "dimensions on every rank."
            ),
        ),
        (
            [op("a", ALLTOALL, shape=[5, 2]), op("a", ALLTOALL, shape=[6, 3])],
            (
                "Mismatched ALLTOALL tensor shapes: One rank had shape [*, 2], but another rank had shape [*, 3], in "
                "a: rank 0 has [*, 2]; rank 1 has [*, 3]. All dimensions but the first must be equal on every rank."
            ),
        ),
        (
            [op("r", REDUCESCATTER, reduce_op=MIN)] * 2,
            "REDUCESCATTER supports Average and Sum only, but ranks 0 and 1 asked for Min, in r.",
        ),
        (
            [op("b", BROADCAST, root=1), op("b", BROADCAST, root=0)],
            (
                "Mismatched BROADCAST root ranks: One rank specified root rank 1, but another rank specified root "
                "rank 0, in b: rank 0 has 1; rank 1 has 0. Pass the same root_rank on every rank."
            ),
        ),
        (
            [op("b", BROADCAST, root=2)] * 2,
            "The BROADCAST root rank 2 of b is not a member of the process set, which has ranks 0 and 1.",
        ),
        (
            [op(device=CPU), op(device=GPU)],
            (
                "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device CPU, but another "
                "rank specified device GPU, in allreduce.x: rank 0 has CPU; rank 1 has GPU. Pass a tensor on "
                "the same kind of device on every rank."
            ),
        ),
    ],
)
def test_sentences(ops: list[pb.Operation], sentence: str) -> None:
    assert check(*ops) == sentence


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
    assert "ranks 0-899 have [1]; rank 900 has [900]; " in sentence
    assert "other ranks have 97 other values" in sentence
    assert len(sentence) < 500


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (op(name=""), "a name of 1 to 4096"),
        (op(name="x" * 5000), "a name of 1 to 4096"),
        (op(dtype=99), "does not know"),  # type: ignore[arg-type]
        (op(kind=99), "does not know"),  # type: ignore[arg-type]
        (op(reduce_op=99), "does not know"),  # type: ignore[arg-type]
        (op(device=99), "does not know"),  # type: ignore[arg-type]
        (op(shape=[-1]), "negative dimension"),
        (op(shape=[1] * 65), "more than 64 dimensions"),
        (op("b", BARRIER, tensors=PAIR), "a barrier, which has no tensors"),
    ],
)
def test_what_makes_no_sense_by_itself(broken: pb.Operation, words: str) -> None:
    assert words in defect(broken)
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
