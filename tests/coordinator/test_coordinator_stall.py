"""Which operations stall and for whom, and what is said about them at which time."""

import re
from collections.abc import Sequence

import pytest
from coordinator_builders import op
from error_codes import ends_with
from event_words import tells
from test_coordinator_blocked import agreed
from test_coordinator_negotiation import Ranks

from horovod.base.errors import OperationCode
from horovod.coordinator.core.agreement.stall import OVER, UNCERTAIN, Stall, StallTimes, StallWatch, Verdict, times_of
from horovod.coordinator.core.agreement.standing import FORGET_S
from horovod.protos.v1 import negotiation_pb2
from horovod.protos.v1 import types_pb2 as pb

X, Y, Z = op("allreduce.x"), op("allreduce.y"), op("allreduce.z")


def wait(
    ranks: Ranks,
    rank: int,
    one: pb.Operation,
    since_s: float,
    now_s: float,
    also: Sequence[pb.Operation] = (),
    executed: int = 0,
) -> None:
    """`rank` has waited for `one` since `since_s`; its last two reports. `also` is in flight there, too."""
    for time_s in (now_s - 1.0, now_s):
        ranks.say(rank, blocked=[one], waited_s=[time_s - since_s], now_s=time_s, also=also, executed=executed)


def missing(ranks: Ranks, now_s: float, after_s: float = 60.0) -> dict[str, tuple[int, ...]]:
    return {stall.name: stall.missing for stall in ranks.negotiation.stalls(now_s, after_s)}


# -- finding them: first use -------------------------------------------------------------------------------------------
def test_ranks_that_did_not_announce_are_missing() -> None:
    ranks = Ranks(3)
    ranks.say(0, X, Y, now_s=10.0)
    ranks.say(1, X, now_s=50.0)
    assert missing(ranks, 70.0) == {}
    assert ranks.negotiation.stalls(71.0, 60.0) == [
        Stall("allreduce.x", 61.0, (2,)),
        Stall("allreduce.y", 61.0, (1, 2)),
    ]
    ranks.say(2, X, Y, now_s=72.0)
    ranks.say(1, Y, now_s=72.0)
    assert missing(ranks, 999.0) == {}


def test_an_operation_that_nobody_waits_for_is_no_stall() -> None:
    """A question of an optimizer, which stands until all ranks have asked it."""
    ranks = Ranks(3)
    ranks.say(0, op("allreduce.x.all_made.question"), op("allreduce.x.all_made"), now_s=0.0)
    assert missing(ranks, 100.0) == {"allreduce.x.all_made": (1, 2)}


def test_a_rank_that_waits_for_another_form_of_the_tensor_is_not_missing() -> None:
    ranks = Ranks(3)
    agreed(ranks, X)
    ranks.say(0, op("allreduce.x", shape=[7]), now_s=0.0)
    wait(ranks, 1, X, 0.0, 61.0)
    assert missing(ranks, 61.0) == {"allreduce.x": (2,)}


def test_what_a_lost_rank_was_needed_for_is_no_stall() -> None:
    ranks = Ranks(3)
    ranks.say(0, X, now_s=0.0)
    ranks.take(ranks.negotiation.forget(2))
    assert missing(ranks, 100.0) == {}


def test_process_sets_stall_by_themselves() -> None:
    ranks = Ranks(3)
    ranks.take(
        ranks.negotiation.receive(
            0,
            negotiation_pb2.NegotiationMessage(
                epoch=1, process_sets=[negotiation_pb2.ProcessSetChange(process_set=1, ranks=[0, 2])]
            ),
            0.0,
        )
    )
    ranks.say(0, op("allreduce.x", process_set=1), now_s=0.0)
    assert missing(ranks, 61.0) == {"allreduce.x": (2,)}, "rank 1 is no member"


# -- finding them: under an id -----------------------------------------------------------------------------------------
def test_ranks_that_do_not_wait_are_missing() -> None:
    ranks = Ranks(3)
    agreed(ranks, X)
    wait(ranks, 0, X, 10.0, 70.0)
    wait(ranks, 2, X, 20.0, 70.0)
    assert missing(ranks, 70.0) == {}
    wait(ranks, 0, X, 10.0, 71.1)
    assert missing(ranks, 71.1) == {"allreduce.x": (1,)}
    assert missing(ranks, 71.1 + FORGET_S + 0.1) == {}, "nobody waits any more"


def test_who_of_several_is_missing_is_not_known() -> None:
    ranks = Ranks(3)
    agreed(ranks, X)
    wait(ranks, 0, X, 0.0, 61.0)
    (found,) = ranks.negotiation.stalls(61.0, 60.0)
    assert (found.missing, found.certain) == ((1, 2), False)
    assert f"{UNCERTAIN}\nMissing ranks:\n1: " in StallWatch(StallTimes()).look([found], 61.0).warning
    wait(ranks, 2, X, 0.0, 61.0)
    (found,) = ranks.negotiation.stalls(61.0, 60.0)
    assert (found.missing, found.certain) == ((1,), True)


def test_many_short_waits_are_no_long_one() -> None:
    ranks = Ranks(2)
    agreed(ranks, X)
    for step in range(100):
        ranks.say(0, blocked=[X], waited_s=[1.6], now_s=2.0 * step)
        assert missing(ranks, 2.0 * step) == {}


def test_a_wait_that_every_rank_shares_is_no_stall() -> None:
    ranks = Ranks(2)
    agreed(ranks, X)
    wait(ranks, 0, X, 0.0, 61.0)
    wait(ranks, 1, X, 60.0, 61.0)
    assert missing(ranks, 61.0) == {}


def test_ranks_say_what_else_they_have_started() -> None:
    ranks = Ranks(3)
    agreed(ranks, X, Y)
    wait(ranks, 0, X, 0.0, 61.0)
    wait(ranks, 1, Y, 0.0, 61.0, also=[X])
    assert missing(ranks, 61.0) == {"allreduce.x": (2,), "allreduce.y": (0, 2)}


def test_who_has_run_more_may_have_completed_what_others_wait_for() -> None:
    """Its result is on its way to them: their hosts may be cut off from each other."""
    ranks = Ranks(2)
    agreed(ranks, X, Y)
    wait(ranks, 0, X, 0.0, 61.0)
    wait(ranks, 1, Y, 0.0, 61.0, executed=1)
    assert missing(ranks, 61.0) == {"allreduce.y": (0,)}
    wait(ranks, 0, X, 0.0, 63.0, executed=1)
    assert missing(ranks, 63.0) == {"allreduce.x": (1,), "allreduce.y": (0,)}


def test_two_ranks_in_different_orders_miss_each_other() -> None:
    ranks = Ranks(2)
    agreed(ranks, X, Y)
    wait(ranks, 0, X, 0.0, 61.0)
    wait(ranks, 1, Y, 0.0, 61.0)
    assert missing(ranks, 61.0) == {"allreduce.x": (1,), "allreduce.y": (0,)}


def test_time_in_which_the_job_was_stopped_with_its_coordinator_is_no_wait() -> None:
    """The coordinator's clock stood still then, the ranks' clocks did not."""
    ranks = Ranks(2)
    agreed(ranks, X)
    wait(ranks, 0, X, 0.0, 30.0)
    ranks.negotiation.restart_limits(31.0)
    wait(ranks, 0, X, -3600.0, 60.0)
    assert missing(ranks, 60.0) == {}
    wait(ranks, 0, X, -3600.0, 92.0)
    assert missing(ranks, 92.0) == {"allreduce.x": (1,)}


def test_a_late_report_alone_proves_nothing() -> None:
    ranks = Ranks(2)
    agreed(ranks, X)
    ranks.say(0, blocked=[X, X, X], waited_s=[60.0, 61.0, 62.0], now_s=62.0)  # they come with a stream opened again
    assert missing(ranks, 62.0) == {}


def test_what_waits_for_an_id_is_no_stall() -> None:
    ranks = Ranks(2, id_capacity=2)  # id 1 only
    agreed(ranks, X)
    ranks.say(0, Y)
    ranks.say(1, Y)
    assert ranks.recalls == [[1], [1]]
    wait(ranks, 0, Y, 0.0, 61.0)
    assert missing(ranks, 61.0) == {}


# -- what is said ------------------------------------------------------------------------------------------------------
def stall(waited_s: float, *missing: int, name: str = "allreduce.x") -> Stall:
    return Stall(name, waited_s, missing)


def test_the_report() -> None:
    watch = StallWatch(StallTimes(60.0, 0.0))
    names = [f"allreduce.{index}" for index in range(7)]
    warning = watch.look([*(stall(61.0, 2, name=name) for name in names), stall(61.0, 0)], 61.0).warning
    assert "60 seconds" in warning
    assert warning.splitlines()[-2:] == [
        "0: [allreduce.x]",
        "2: [allreduce.0, allreduce.1, allreduce.2, allreduce.3, allreduce.4, allreduce.5 ...]",
    ]


def test_a_report_of_many_ranks_stays_short() -> None:
    warning = StallWatch(StallTimes()).look([stall(61.0, *range(1, 1001), name="n" * 4096)], 61.0).warning
    assert warning.endswith("\nand 936 more ranks")
    assert len(warning) < 20_000


def test_it_is_said_again_when_it_changes_and_every_warning_time_and_when_it_is_over() -> None:
    watch = StallWatch(StallTimes(60.0, 0.0))
    assert watch.look([stall(60.0, 1)], 60.0) == Verdict()
    assert "1: [allreduce.x]" in watch.look([stall(61.0, 1)], 61.0).warning
    assert watch.look([stall(62.0, 1)], 62.0) == Verdict()
    assert "2: [allreduce.x]" in watch.look([stall(63.0, 1, 2)], 63.0).warning
    assert watch.look([stall(122.9, 1, 2)], 122.9) == Verdict()
    assert "2: [allreduce.x]" in watch.look([stall(123.0, 1, 2)], 123.0).warning
    assert watch.look([stall(3.0, 1)], 124.0) == Verdict(warning=OVER)
    assert watch.look([], 125.0) == Verdict()


def test_the_shutdown_marks_the_ranks_and_is_the_last_word() -> None:
    watch = StallWatch(StallTimes(60.0, 120.0))
    watch.look([stall(61.0, 1), stall(61.0, 2, name="allreduce.y")], 61.0)
    assert watch.look([stall(120.0, 1)], 120.0).shutdown == ""
    verdict = watch.look([stall(121.0, 1), stall(90.0, 2, name="allreduce.y")], 121.0)
    assert re.search(ends_with(OperationCode.STALLED, 120, "\n1!: [allreduce.x]"), verdict.shutdown)
    assert "allreduce.y" not in verdict.shutdown
    assert verdict.warning.endswith("\n1!: [allreduce.x]\n2: [allreduce.y]")
    assert watch.look([stall(500.0, 1)], 500.0) == Verdict()


def test_a_shutdown_without_a_warning() -> None:
    watch = StallWatch(StallTimes(0.0, 30.0))
    assert watch.look([stall(29.0, 1)], 29.0) == Verdict()
    verdict = watch.look([stall(31.0, 1)], 31.0)
    assert verdict.warning == ""
    assert "1!: [allreduce.x]" in verdict.shutdown


# -- the settings ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "times", "shortest_s"),
    [
        ({}, StallTimes(60.0, 0.0), 60.0),
        ({"stall_check_seconds": "2.5", "stall_shutdown_seconds": "5.0"}, StallTimes(2.5, 5.0), 2.5),
        ({"stall_check_seconds": "5.0", "stall_shutdown_seconds": "5.0"}, StallTimes(5.0, 5.0), 5.0),
        ({"stall_check_seconds": "0.0", "stall_shutdown_seconds": "9.0"}, StallTimes(0.0, 9.0), 9.0),
        ({"stall_check_disable": "True", "stall_shutdown_seconds": "90.0"}, StallTimes(0.0, 0.0), 0.0),
        ({"stall_check_disable": "False"}, StallTimes(60.0, 0.0), 60.0),
        ({"stall_check_seconds": "soon", "stall_shutdown_seconds": "nan"}, StallTimes(60.0, 0.0), 60.0),
    ],
)
def test_times(options: dict[str, str], times: StallTimes, shortest_s: float) -> None:
    assert times_of(options) == (times, "")
    assert times.shortest_s == shortest_s


def test_a_shutdown_before_the_warning_is_ignored_in_words() -> None:
    times, sentence = times_of({"stall_check_seconds": "60.0", "stall_shutdown_seconds": "30.0"})
    assert times == StallTimes(60.0, 0.0)
    assert tells(sentence, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=30", "HOROVOD_STALL_CHECK_TIME_SECONDS=60")
