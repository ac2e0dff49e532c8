"""hvd.join() as the coordinator sees it: rounds, who stands in for whom, what is refused. No clock, no socket."""

import re

import pytest
from coordinator_builders import ALLGATHER, BARRIER, BROADCAST, FLOAT64, message, op
from error_codes import ends_with

from horovod.base.errors import OperationCode
from horovod.coordinator.core.agreement.budget import Answers
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.protos.v1 import negotiation_pb2 as pb
from horovod.protos.v1 import types_pb2

OPEN, ENDING, OVER = pb.JOIN_PHASE_OPEN, pb.JOIN_PHASE_ENDING, pb.JOIN_PHASE_OVER


class Ranks:
    """The ranks of one world, and what each of them was told."""

    def __init__(self, size: int, id_capacity: int = 1 << 14) -> None:
        self.negotiation = Negotiation(1, size, id_capacity)
        self.joins: list[list[pb.JoinState]] = [[] for _ in range(size)]
        self.plans: list[dict[str, pb.Plan]] = [{} for _ in range(size)]
        self.errors: list[dict[str, str]] = [{} for _ in range(size)]
        self.recalls: list[list[int]] = [[] for _ in range(size)]

    def _take(self, answers: Answers) -> None:
        for ranks, decisions in answers:
            for rank in ranks:
                self.joins[rank].extend(decisions.joins)
                self.plans[rank].update({plan.name: plan for plan in decisions.plans})
                self.errors[rank].update({error.name: error.sentence for error in decisions.errors})
                for recall in decisions.recalls:
                    self.recalls[rank].extend(recall.ids)

    def say(self, rank: int, *announce: types_pb2.Operation, resumed: bool = False) -> None:
        self._take(self.negotiation.receive(rank, message(announce), 0.0, resumed))

    def join(self, rank: int, round_: int = 0, without_zeros: bool = False, resumed: bool = False) -> None:
        said = message()
        said.join.CopyFrom(pb.Join(round=round_, contributes_none=without_zeros))
        self._take(self.negotiation.receive(rank, said, 0.0, resumed))

    def states(self, rank: int) -> list[tuple[int, list[int], int]]:
        """What `rank` was told since it was asked last: round, who has joined, phase."""
        told, self.joins[rank] = self.joins[rank], []
        return [(state.round, list(state.ranks), state.phase) for state in told]

    def finish(self, round_: int = 0) -> None:
        for rank in range(len(self.joins)):
            self.join(rank, round_, without_zeros=True)


def test_a_round_tells_all_ranks_of_each_phase() -> None:
    ranks = Ranks(3)
    for rank in (2, 0, 1):
        ranks.join(rank)
    ranks.join(1, without_zeros=True)
    ranks.join(0, without_zeros=True)
    phases = [(0, [2], OPEN), (0, [2, 0], OPEN), (0, [2, 0, 1], ENDING)]
    for rank in range(3):
        assert ranks.states(rank) == phases
    ranks.join(2, without_zeros=True)
    for rank in range(3):
        assert ranks.states(rank) == [(0, [2, 0, 1], OVER)]


def test_the_next_round_begins_with_nobody() -> None:
    ranks = Ranks(2)
    ranks.join(0)
    ranks.join(1)
    ranks.finish()
    ranks.states(0)
    ranks.join(1, round_=1)
    assert ranks.states(0) == [(1, [1], OPEN)]
    ranks.join(1, round_=1)  # again changes nothing
    ranks.join(0, round_=0)  # over: said before the news of its end arrived
    assert ranks.states(0) == []


def test_a_rank_that_has_joined_counts_as_having_announced_and_is_told_what() -> None:
    ranks = Ranks(3)
    ranks.say(0, op("allreduce.early"))
    ranks.say(1, op("allreduce.early"))
    assert not any(ranks.plans)
    ranks.join(2)
    ranks.say(1, op("allreduce.late", dtype=FLOAT64))
    assert "allreduce.late" not in ranks.plans[0]
    ranks.say(0, op("allreduce.late", dtype=FLOAT64))
    assert ranks.plans[0] == ranks.plans[1]
    for name, dtype in (("allreduce.early", op().tensors[0].dtype), ("allreduce.late", FLOAT64)):
        assert not ranks.plans[0][name].HasField("operation")
        assert ranks.plans[2][name].id == ranks.plans[0][name].id
        assert ranks.plans[2][name].operation.tensors[0].dtype == dtype


def test_the_working_ranks_must_agree_among_themselves() -> None:
    ranks = Ranks(3)
    ranks.join(1)
    ranks.say(0, op(shape=(2,)))
    ranks.say(2, op(shape=(3,)))
    for rank in (0, 2):
        found = ranks.errors[rank]["allreduce.x"]
        assert re.search(ends_with(OperationCode.MISMATCHED, "rank 0", "[2]", "rank 2", "[3]"), found)


def test_everything_else_is_refused_until_the_round_is_over() -> None:
    ranks = Ranks(3)
    ranks.say(0, op("allgather.before", ALLGATHER))
    ranks.join(1)
    ranks.say(0, op("broadcast.x", BROADCAST))
    ranks.say(2, op("barrier.noname.0", BARRIER))
    for rank, name, kind in (
        (0, "allgather.before", "Allgather"),
        (0, "broadcast.x", "Broadcast"),
        (2, "barrier.noname.0", "Barrier"),
    ):
        assert ranks.errors[rank][name].startswith(f"{kind} is not supported with Join at this time.")
        assert re.search(ends_with(OperationCode.NOT_WITH_JOIN, "Rank 1", name), ranks.errors[rank][name])
    for rank in (0, 2):
        ranks.join(rank)
    ranks.finish()
    for rank in range(3):
        ranks.say(rank, op("broadcast.x", BROADCAST))
    assert all("broadcast.x" in plans for plans in ranks.plans)
    for rank in (1, 2):
        ranks.say(rank, op("allgather.before", ALLGATHER))
    assert not any("allgather.before" in plans for plans in ranks.plans), "rank 0 got an error for its own"
    ranks.say(0, op("allgather.before", ALLGATHER))
    assert all("allgather.before" in plans for plans in ranks.plans)


def test_other_process_sets_do_not_notice() -> None:
    ranks = Ranks(3)
    change = pb.ProcessSetChange(process_set=1, ranks=[0, 1])
    for rank in range(3):
        ranks._take(ranks.negotiation.receive(rank, pb.NegotiationMessage(epoch=1, process_sets=[change]), 0.0))
    ranks.join(1)
    ranks.say(0, op("allgather.y", ALLGATHER, process_set=1))
    assert not ranks.plans[0]
    assert not ranks.errors[0]
    ranks.say(1, op("allgather.y", ALLGATHER, process_set=1))
    assert "allgather.y" in ranks.plans[0]


@pytest.mark.parametrize("wire", ["allreduce.noname.0", "allreduce.jit.noname.0", "grouped_allreduce.2of3.noname.0"])
def test_the_ids_of_unnamed_operations_are_recalled_when_a_round_is_over(wire: str) -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.say(rank, op(wire), op("allreduce.named"), op("allreduce.noname.7.weight"))
    for rank in range(2):
        ranks.join(rank)
    assert ranks.recalls == [[], []]
    ranks.finish()
    unnamed = ranks.plans[0][wire].id
    assert ranks.recalls == [[unnamed], [unnamed]]
    # The number is used again and means something new, so it is agreed on anew.
    ranks.say(0, op(wire))
    assert ranks.plans[0][wire].id == unnamed
    ranks.say(1, op(wire))
    assert ranks.plans[0][wire].id == ranks.plans[1][wire].id != unnamed


def test_an_id_that_comes_late_reaches_the_joined_rank_too() -> None:
    ranks = Ranks(2, id_capacity=2)  # a single id
    for rank in range(2):
        ranks.say(rank, op("allreduce.a"))
    ranks.join(1)
    ranks.say(0, op("allreduce.b"))
    assert "allreduce.b" not in ranks.plans[1]
    for rank in range(2):
        answer = pb.RecallAnswer(process_set=0, ids=ranks.recalls[rank])
        ranks._take(ranks.negotiation.receive(rank, pb.NegotiationMessage(epoch=1, recalled=[answer]), 0.0))
    assert ranks.plans[1]["allreduce.b"].operation.name == "allreduce.b"


def test_a_rank_that_lost_its_stream_is_told_again() -> None:
    ranks = Ranks(2)
    ranks.join(0)
    for rank in range(2):
        ranks.states(rank)
    ranks.say(1, resumed=True)
    assert ranks.states(1) == [(0, [0], OPEN)]
    ranks.join(1)
    ranks.states(1)
    ranks.join(1, resumed=True)
    assert ranks.states(1) == [(0, [0, 1], ENDING)]
    ranks.finish()
    ranks.states(0)
    ranks.join(0, without_zeros=True, resumed=True)
    assert ranks.states(0) == [(0, [0, 1], OVER)]
    ranks.join(1, round_=1)
    ranks.states(0)
    ranks.join(0, without_zeros=True, resumed=True)  # it still has not heard of the end of the round before
    assert ranks.states(0) == [(0, [0, 1], OVER)]


def test_a_report_of_a_blocked_rank_after_all_have_joined_is_harmless() -> None:
    """No rank is left then that an operation could be compared with."""
    ranks = Ranks(2)
    for rank in range(2):
        ranks.join(rank)
    assert ranks.negotiation.receive(0, message(blocked=[op()]), 1.0) == []
