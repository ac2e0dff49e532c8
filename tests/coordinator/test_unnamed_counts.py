"""Errors and stall reports about an unnamed operation say how many each rank has started, and where it stands."""

from coordinator_builders import BROADCAST, op
from test_coordinator_blocked import mismatched
from test_coordinator_deadlock import held, look, says
from test_coordinator_negotiation import Ranks
from test_coordinator_stall import X, wait

from horovod.coordinator.core.agreement.stall import StallTimes, StallWatch
from horovod.coordinator.core.agreement.standing import MOST_KINDS
from horovod.protos.v1 import negotiation_pb2 as pb


def report_of(ranks: Ranks, rank: int, report: pb.BlockedReport, now_s: float) -> None:
    report.heard = ranks.heard[rank]
    ranks.take(ranks.negotiation.receive(rank, pb.NegotiationMessage(epoch=1, blocked_report=report), now_s))


def counted(report: pb.BlockedReport, at: str = "", number: int = 0, **counts: int) -> pb.BlockedReport:
    report.at = at
    for kind, count in counts.items():
        report.unnamed.add(process_set=number, name=f"{kind}.noname", count=count)
    return report


def test_a_deadlock_tells_counts_and_lines() -> None:
    first = counted(held("allreduce.noname.7"), "train.py:4, in log", allreduce=8)
    found = look({0: first, 1: counted(held("allreduce.x"), "train.py:9, in step", allreduce=7, barrier=1)})
    assert found is not None
    assert says(found, r"allreduce\.noname, rank 0 .* 8 .* train\.py:4, in log; ")
    assert says(found, r"rank 1 .* 7 .* train\.py:9, in step\. .*HOROVOD_CHECK_CALL_SITES.*name=")
    assert "barrier" not in found.sentence


def test_a_process_set_has_counts_of_its_own() -> None:
    first = counted(held("1:allreduce.noname.2"), number=1, allreduce=3)
    found = look({0: first, 1: counted(held("1:x"), allreduce=9)})
    assert found is not None
    assert says(found, r"allreduce\.noname in process set 1, rank 0 .* 3; rank 1 .* 0\.")


def test_a_count_that_was_left_out_is_not_none() -> None:
    others = counted(held("x"), **{f"kind{index}": 1 for index in range(MOST_KINDS)})
    found = look({0: counted(held("allreduce.noname.0"), allreduce=1), 1: others})
    assert found is not None
    assert "rank 0 has started 1." in found.sentence
    assert "rank 1 has started" not in found.sentence


def test_operations_with_names_have_no_counts() -> None:
    found = look({0: counted(held("a"), "train.py:4", allreduce=8), 1: held("b")})
    assert found is not None
    assert "started 8" not in found.sentence


def test_a_line_that_moves_does_not_make_a_rank_busy() -> None:
    found = look({0: held("a"), 1: lambda now_s: counted(held("b"), f"train.py:{int(now_s)}, in poll")})
    assert found is not None


def test_a_number_without_end_is_no_error_of_the_coordinator() -> None:
    assert look({0: held(f"allreduce.noname.{'9' * 5000}"), 1: held("b")}) is not None


def test_a_stall_tells_counts_and_lines_once() -> None:
    ranks = Ranks(2)
    one, other = op("allreduce.noname.3"), op("allreduce.noname.4")
    ranks.say(0, one, other)
    for time_s in (60.0, 61.0):
        report = counted(held(one.name, other.name), "train.py:4, in log", allreduce=5)
        report_of(ranks, 0, report, time_s)
    stalls = ranks.negotiation.stalls(61.0, 1.0)
    assert len(stalls) == 2
    verdict = StallWatch(StallTimes(1.0, 2.0)).look(stalls, 61.0)
    for text in (verdict.warning, verdict.shutdown):
        assert text.count("of allreduce.noname, rank 0 has started 5 and is at train.py:4, in log. ") == 1
        assert "HOROVOD_CHECK_CALL_SITES" in text


def test_a_stall_of_an_operation_with_a_name_has_no_counts() -> None:
    ranks = Ranks(2)
    ranks.say(0, X)
    wait(ranks, 0, X, 0.0, 61.0)
    assert [stall.counts for stall in ranks.negotiation.stalls(61.0, 60.0)] == [""]


def test_signatures_that_differ_under_one_number() -> None:
    ranks = Ranks(2)
    ranks.say(0, op("allreduce.noname.3", shape=(2,)))
    report = counted(held("allreduce.noname.3"), "train.py:4, in log", allreduce=4)
    report_of(ranks, 0, report, 1.0)
    ranks.say(1, op("allreduce.noname.3", shape=(3,)), now_s=1.5)
    sentence = ranks.errors[1]["allreduce.noname.3"]
    assert mismatched(sentence, "rank 0 has started 4 and is at train.py:4, in log", "rank 1 has started 4")


def test_other_operations_under_one_number() -> None:
    ranks = Ranks(2)
    one, other = op("allreduce.noname.3"), op("broadcast.noname.3", BROADCAST)
    ranks.say(0, one, blocked=[one])
    ranks.say(1, other, blocked=[other])
    sentence = ranks.errors[0]["allreduce.noname.3"]
    assert mismatched(
        sentence, "of allreduce.noname, rank 0 has started 4", "of broadcast.noname", "HOROVOD_CHECK_CALL"
    )
