"""The sentences of errors of operations, whole, with their codes. Other tests name the code and the facts."""

from collections.abc import Callable

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
    message,
    op,
)
from test_coordinator_deadlock import held, look
from test_coordinator_negotiation import Ranks, change, tell

from horovod.coordinator.core.agreement.agreement import disagreement
from horovod.coordinator.core.agreement.budget import TooMuchError
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.coordinator.core.agreement.operations import defect
from horovod.coordinator.core.agreement.stall import Stall, StallTimes, StallWatch
from horovod.coordinator.core.agreement.takeover import ContradictionError
from horovod.protos.v1 import types_pb2 as pb

PAIR = (FLOAT32, [2]), (FLOAT32, [3])


@pytest.mark.parametrize(
    ("ops", "sentence"),
    [
        (
            [op(dtype=FLOAT32), op(dtype=FLOAT64), op(dtype=FLOAT32)],
            (
                "Mismatched data types: One rank had type float32, but another rank had type float64, in allreduce.x: "
                "ranks 0 and 2 have float32; rank 1 has float64. Pass a tensor of the same dtype on every rank. "
                "[mismatched-operations]"
            ),
        ),
        (
            [op("g", tensors=PAIR), op("g", tensors=(PAIR[0], (FLOAT64, [3])))],
            (
                "Mismatched data types: One rank had type float32, but another rank had type float64, in tensor 2 of 2 "
                "of g: rank 0 has float32; rank 1 has float64. Pass a tensor of the same dtype on every rank. "
                "[mismatched-operations]"
            ),
        ),
        (
            [op("x", ALLREDUCE), op("x", BROADCAST)],
            (
                "Mismatched operations: One rank did ALLREDUCE, but another rank did BROADCAST, in x: rank 0 has "
                "ALLREDUCE; rank 1 has BROADCAST. Call the same operation under one name on every rank. "
                "[mismatched-operations]"
            ),
        ),
        (
            [op("g", tensors=PAIR), op("g", tensors=PAIR[:1])],
            (
                "Mismatched ALLREDUCE tensor counts: One rank grouped this many tensors: 2, but another rank "
                "grouped this many tensors: 1, in g: rank 0 has 2; rank 1 has 1. Pass the same list of "
                "tensors on every rank. [mismatched-operations]"
            ),
        ),
        (
            [op(shape=[2, 3]), op(shape=[2, 4])],
            (
                "Mismatched ALLREDUCE tensor shapes: One rank had shape [2, 3], but another rank had shape [2, 4], in "
                "allreduce.x: rank 0 has [2, 3]; rank 1 has [2, 4]. Pass a tensor of the same shape on every rank. "
                "[mismatched-operations]"
            ),
        ),
        (
            [op("b", BROADCAST, shape=[]), op("b", BROADCAST, shape=[1])],
            (
                "Mismatched BROADCAST tensor shapes: One rank had shape [], but another rank had shape [1], in b: "
                "rank 0 has []; rank 1 has [1]. Pass a tensor of the same shape on every rank. [mismatched-operations]"
            ),
        ),
        (
            [op("r", REDUCESCATTER, shape=[4]), op("r", REDUCESCATTER, shape=[5])],
            (
                "Mismatched REDUCESCATTER tensor shapes: One rank had shape [4], but another rank had shape [5], in r: "
                "rank 0 has [4]; rank 1 has [5]. Pass a tensor of the same shape on every rank. [mismatched-operations]"
            ),
        ),
        (
            [op(prescale=0.5), op(postscale=2.0)],
            (
                "Mismatched prescale and/or postscale factors: One rank had prescale_factor=0.5 and "
                "postscale_factor=1.0, but another rank had prescale_factor=1.0 and postscale_factor=2.0, in "
                "allreduce.x: rank 0 has prescale_factor=0.5 and postscale_factor=1.0; rank 1 has prescale_factor=1.0 "
                "and postscale_factor=2.0. Pass the same factors on every rank. [mismatched-operations]"
            ),
        ),
        (
            [op(reduce_op=AVERAGE), op(reduce_op=MIN)],
            (
                "Mismatched reduction operation: One rank asked for Average, but another rank asked for Min, in "
                "allreduce.x: rank 0 has Average; rank 1 has Min. Pass the same op= on every rank. "
                "[mismatched-operations]"
            ),
        ),
        (
            [op("a", ALLGATHER, shape=[]), op("a", ALLGATHER, shape=[])],
            (
                "Ranks 0 and 1 tried to ALLGATHER a rank-zero tensor, in a. The tensor needs at least one dimension; "
                "use for example tensor.reshape(1). [no-rows]"
            ),
        ),
        (
            [op("a", ALLTOALL, shape=[2]), op("a", ALLTOALL, shape=[])],
            (
                "Rank 1 tried to ALLTOALL a rank-zero tensor, in a. The tensor needs at least one dimension; use for "
                "example tensor.reshape(1). [no-rows]"
            ),
        ),
        (
            [op("r", REDUCESCATTER, shape=[])] * 2,
            (
                "Ranks 0 and 1 tried to REDUCESCATTER a rank-zero tensor, in r. The tensor needs at least one "
                "dimension; use for example tensor.reshape(1). [no-rows]"
            ),
        ),
        (
            [op("a", ALLGATHER, shape=[5]), op("a", ALLGATHER, shape=[5, 1])],
            (
                "Mismatched ALLGATHER tensor shapes: One rank had this many dimensions: 1, but another rank had this "
                "many dimensions: 2, in a: rank 0 has 1; rank 1 has 2. Pass a tensor with the same number of "
                "dimensions on every rank. [mismatched-operations]"
            ),
        ),
        (
            [op("a", ALLTOALL, shape=[5, 2]), op("a", ALLTOALL, shape=[6, 3])],
            (
                "Mismatched ALLTOALL tensor shapes: One rank had shape [*, 2], but another rank had shape [*, 3], in "
                "a: rank 0 has [*, 2]; rank 1 has [*, 3]. All dimensions but the first must be equal on every rank. "
                "[mismatched-operations]"
            ),
        ),
        (
            [op("r", REDUCESCATTER, reduce_op=MIN)] * 2,
            "REDUCESCATTER supports Average and Sum only, but ranks 0 and 1 asked for Min, in r. [undefined-reduction]",
        ),
        (
            [op("b", BROADCAST, root=1), op("b", BROADCAST, root=0)],
            (
                "Mismatched BROADCAST root ranks: One rank specified root rank 1, but another rank specified root rank "
                "0, in b: rank 0 has 1; rank 1 has 0. Pass the same root_rank on every rank. [mismatched-operations]"
            ),
        ),
        (
            [op("b", BROADCAST, root=2)] * 2,
            (
                "The BROADCAST root rank 2 of b is not a member of the process set, which has ranks 0 and 1. "
                "[invalid-root]"
            ),
        ),
        (
            [op(device=CPU), op(device=GPU)],
            (
                "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device CPU, but another "
                "rank specified device GPU, in allreduce.x: rank 0 has CPU; rank 1 has GPU. Pass a tensor on "
                "the same kind of device on every rank. [mismatched-operations]"
            ),
        ),
    ],
)
def test_of_ranks_that_disagree(ops: list[pb.Operation], sentence: str) -> None:
    assert disagreement(dict(enumerate(ops)), range(len(ops))) == sentence


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (op(name=""), "An operation needs a name of 1 to 4096 characters, but this one has 0. [invalid-operation]"),
        (op(shape=[-1]), "allreduce.x has a tensor with a negative dimension. [invalid-operation]"),
        (op(shape=[1] * 65), "allreduce.x has a tensor with more than 64 dimensions. [invalid-operation]"),
        (
            op(dtype=99),  # type: ignore[arg-type]
            (
                "allreduce.x has a type, reduce operation, device or dtype that this version does not know. "
                "[invalid-operation]"
            ),
        ),
        (
            op("b", BARRIER, tensors=PAIR),
            "b is a barrier, which has no tensors, but it came with 2. [invalid-operation]",
        ),
    ],
)
def test_of_what_makes_no_sense_by_itself(broken: pb.Operation, sentence: str) -> None:
    assert defect(broken) == sentence


def unnamed_in_different_orders(ranks: Ranks) -> None:
    one, other = op("allreduce.noname.3"), op("broadcast.noname.3", BROADCAST)
    ranks.say(0, one, blocked=[one])
    ranks.say(1, other, blocked=[other])
    ranks.say(2, other, blocked=[other])


def one_name_for_two_operations(ranks: Ranks) -> None:
    for rank, one in enumerate([op("allreduce.x"), op("allgather.x", ALLGATHER), op("allgather.x", ALLGATHER)]):
        ranks.say(rank, one, blocked=[one])


def call_of_no_member(ranks: Ranks) -> None:
    ranks.negotiation.add_process_set(1, [2, 1])
    ranks.say(0, op(process_set=1))


def waits_in_a_set_that_is_removed(ranks: Ranks) -> None:
    tell(ranks, 0, change(1, 0, 1))
    ranks.say(0, op(process_set=1))
    tell(ranks, 1, change(1, 0, 1, removed=True))


def gathers_with_a_rank_that_has_joined(ranks: Ranks) -> None:
    joined = message()
    joined.join.SetInParent()
    ranks.take(ranks.negotiation.receive(1, joined, 0.0))
    ranks.say(0, op("allgather.x", ALLGATHER))


@pytest.mark.parametrize(
    ("happens", "sentence"),
    [
        (
            one_name_for_two_operations,
            (
                "Mismatched operations: One rank did ALLREDUCE, but another rank did ALLGATHER, under the name 'x': "
                "rank 0 has ALLREDUCE; ranks 1 and 2 have ALLGATHER. Call the same operation under one name on every "
                "rank. [mismatched-operations]"
            ),
        ),
        (
            unnamed_in_different_orders,
            (
                "Mismatched operations: One rank did ALLREDUCE, but another rank did BROADCAST, for the unnamed "
                "operation number 4: rank 0 has ALLREDUCE; ranks 1 and 2 have BROADCAST. Call unnamed operations in "
                "the same order on every rank, or give them names. Operations without a name match by their number: of "
                "allreduce.noname, rank 0 has started 4; ranks 1 and 2 have started 0; of broadcast.noname, rank 0 has "
                "started 0; ranks 1 and 2 have started 4. If only some ranks call one of them, "
                "HOROVOD_CHECK_CALL_SITES=1 shows the line. Operations with names (name=) can't be mixed up. "
                "[mismatched-operations]"
            ),
        ),
        (
            lambda ranks: ranks.say(0, op(process_set=3)),
            "Process set 3 of allreduce.x is not registered in world 1. [no-such-process-set]",
        ),
        (
            call_of_no_member,
            (
                "Rank 0 is not a member of the provided process set: allreduce.x runs in process set 1, which has "
                "ranks 1 and 2. [not-in-process-set]"
            ),
        ),
        (
            waits_in_a_set_that_is_removed,
            (
                "Rank 1 has removed the process set of ranks 0 and 1, so allreduce.x can't complete in it. "
                "[no-such-process-set]"
            ),
        ),
        (
            gathers_with_a_rank_that_has_joined,
            (
                "Allgather is not supported with Join at this time. Rank 1 has called hvd.join(), so until all ranks "
                "have joined only allreduce runs in the global process set (for sparse gradients: "
                "DistributedOptimizer(sparse_as_dense=True)). It was allgather.x. [not-with-join]"
            ),
        ),
    ],
)
def test_of_what_ranks_are_told(happens: Callable[[Ranks], None], sentence: str) -> None:
    ranks = Ranks(3)
    happens(ranks)
    assert set(ranks.errors[0].values()) == {sentence}


def test_of_a_deadlock() -> None:
    found = look({0: held("x", "a"), 1: held("x", "b"), 2: held("x", "b")})
    assert found is not None
    assert found.sentence == (
        "The ranks submit different operations and wait for each other: rank 0 waits for a, which ranks 1 and 2 have "
        "not started and ranks 1 and 2 wait for b, which rank 0 has not started. These are the first operations at "
        "which they part. All ranks of a process set must call the same operations; look for a condition that differs "
        "between ranks, such as their number or the length of their data (hvd.join() is for ranks with less data). "
        "[deadlock]"
    )


def test_of_a_stall() -> None:
    verdict = StallWatch(StallTimes(60.0, 120.0)).look([Stall("allreduce.x", 121.0, (1,))], 121.0)
    assert verdict.shutdown == (
        'One or more rank (marked by "!") is stalled for longer than 120 seconds. Will shutdown.\n'
        "Missing ranks:\n1!: [allreduce.x] [stalled]"
    )


def test_of_contradictions() -> None:
    ranks = Ranks(3)
    tell(ranks, 1, change(1, 0, 1))
    with pytest.raises(ContradictionError) as other_ranks:
        tell(ranks, 0, change(1, 0, 2))
    assert str(other_ranks.value) == (
        "Rank 0 says that process set 1 has ranks 0 and 2, but other ranks said that it has ranks 0 and 1; all ranks "
        "must register the same sets in the same order. [contradiction]"
    )
    with pytest.raises(ContradictionError) as no_set:
        tell(ranks, 0, change(2, 0, 3))
    assert str(no_set.value) == (
        "Rank 0 speaks of process set 2 with the ranks [0, 3], which can't be a set of a world of 3; expected "
        "ascending ranks below that. [contradiction]"
    )


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (
            {"member_bytes": 2000},
            (
                "The coordinator holds 0 bytes for rank 1 in world 7, and 14670 more for operation 'x' would exceed "
                "its limit of 2000 bytes for one rank. Announce operations under names that come back in each step; "
                "other ranks must start them, too. [too-many-operations]"
            ),
        ),
        (
            {"world_bytes": 2000},
            (
                "The coordinator holds 0 bytes for world 7, and 14670 more for operation 'x' of rank 1, which has 0 of "
                "them, would exceed its limit of 2000 bytes for one world. Announce operations under names that come "
                "back in each step; other ranks must start them, too. [too-many-operations]"
            ),
        ),
    ],
)
def test_of_a_flood(limits: dict[str, int], sentence: str) -> None:
    with pytest.raises(TooMuchError) as error:
        Negotiation(7, 2, **limits).receive(1, message([op("x", tensors=[(FLOAT32, ())] * 100)]), 0.0)
    assert str(error.value) == sentence
