"""Ranks that wait for different things are told so; ranks that are merely slow are left alone."""

import re

from coordinator_builders import ALLGATHER, ALLREDUCE, BROADCAST, op
from error_codes import ends_with
from test_coordinator_negotiation import Ranks

from horovod.base.errors import OperationCode
from horovod.coordinator.core.agreement.blocked import MAX_REPORTS
from horovod.coordinator.core.agreement.standing import FORGET_S
from horovod.protos.v1 import types_pb2 as pb

REDUCE = op("allreduce.x", ALLREDUCE)
GATHER = op("allgather.x", ALLGATHER)


def mismatched(sentence: str, *facts: object) -> bool:
    return re.search(ends_with(OperationCode.MISMATCHED, *facts), sentence) is not None


def agreed(ranks: Ranks, *ops: pb.Operation) -> None:
    for one in ops:
        for rank in range(len(ranks.plans)):
            ranks.say(rank, one)
            ranks.plans[rank].clear()


def test_one_name_for_two_operations() -> None:
    ranks = Ranks(3)
    ranks.say(0, REDUCE)
    ranks.say(1, GATHER)
    ranks.say(2, GATHER)
    ranks.say(0, blocked=[REDUCE], now_s=1.0)
    ranks.say(1, blocked=[GATHER], now_s=1.1)
    assert ranks.errors == [{}, {}, {}], "rank 2 may still join in"
    for rank, one in enumerate([REDUCE, GATHER, GATHER]):
        ranks.say(rank, blocked=[one], now_s=60.0)
    sentence = ranks.errors[0]["allreduce.x"]
    assert mismatched(sentence, "'x'", "rank 0", "ALLREDUCE", "1 and 2", "ALLGATHER")
    for rank in range(3):
        assert ranks.errors[rank] == {"allreduce.x": sentence, "allgather.x": sentence}
    agreed(ranks, REDUCE, GATHER)
    assert ranks.errors[0]["allreduce.x"] == sentence, "nothing is left over"


def test_grouped_and_single_operations_of_one_name() -> None:
    ranks = Ranks(2)
    ranks.say(0, REDUCE)
    ranks.say(1, op("grouped_allreduce.x"))
    ranks.say(0, blocked=[REDUCE])
    ranks.say(1, blocked=[op("grouped_allreduce.x")])
    assert mismatched(ranks.errors[0]["allreduce.x"], "rank 0", "rank 1", "grouped ALLREDUCE")


def test_unnamed_operations_in_different_orders() -> None:
    ranks = Ranks(2)
    one, other = op("allreduce.noname.3"), op("broadcast.noname.3", BROADCAST)
    ranks.say(0, one, blocked=[one])
    ranks.say(1, other, blocked=[other])
    assert mismatched(ranks.errors[1]["broadcast.noname.3"], "number 4", "rank 0", "ALLREDUCE", "rank 1", "BROADCAST")
    assert set(ranks.errors[0]) == {"allreduce.noname.3", "broadcast.noname.3"}


def test_no_alarm_while_one_of_the_operations_can_still_complete() -> None:
    ranks = Ranks(2)
    ranks.say(0, REDUCE, GATHER)  # asynchronous; it waits for the reduction first
    ranks.say(0, blocked=[REDUCE], also=[GATHER])
    ranks.say(1, GATHER, now_s=8.0)
    assert ranks.plans == [{"allgather.x": 1}] * 2
    ranks.say(1, blocked=[GATHER], now_s=8.1)
    ranks.say(0, blocked=[REDUCE], also=[GATHER], now_s=8.2)
    ranks.say(0, blocked=[REDUCE], executed=1, now_s=9.0)  # rank 1 has still to run the gathering
    ranks.say(1, blocked=[GATHER], now_s=9.0)
    ranks.say(1, REDUCE, now_s=9.0)
    assert ranks.errors == [{}, {}]
    assert ranks.plans[0]["allreduce.x"] == 2


def test_different_names_never_alarm() -> None:
    ranks = Ranks(2)
    other = op("allgather.y", ALLGATHER)
    for now_s in range(5):  # after that they wait for each other for too long
        ranks.say(0, REDUCE, blocked=[REDUCE], now_s=now_s)
        ranks.say(1, other, blocked=[other], now_s=now_s)
    assert ranks.errors == [{}, {}]


# -- operations that run under an id ---------------------------------------------------------------------------------


def test_a_new_signature_against_the_old_one_under_its_id() -> None:
    ranks = Ranks(2)
    agreed(ranks, op(shape=[3]))
    ranks.say(0, op(shape=[4]), now_s=10.0)
    ranks.say(1, blocked=[op(shape=[3])], now_s=10.1)
    assert ranks.errors == [{}, {}], "rank 0 may have completed what rank 1 waits for, and be in the next one"
    ranks.say(0, blocked=[op(shape=[4])], executed=1, now_s=10.5)
    assert ranks.errors == [{}, {}], "so it is"
    ranks.say(1, blocked=[op(shape=[3])], executed=1, now_s=11.1)
    assert ranks.errors[0] == ranks.errors[1]
    assert mismatched(ranks.errors[0]["allreduce.x"], "allreduce.x", "rank 0", "[4]", "rank 1", "[3]")


def test_both_signatures_under_ids_of_their_own() -> None:
    ranks = Ranks(2)
    agreed(ranks, op(shape=[3]), op(shape=[4]))
    for now_s in (1.0, 2.0):
        ranks.say(0, blocked=[op(shape=[3])], now_s=now_s)
        ranks.say(1, blocked=[op(shape=[4])], now_s=now_s + 0.1)
    assert mismatched(ranks.errors[0]["allreduce.x"], "[3]", "[4]")


def test_one_signature_under_its_id_is_only_slow() -> None:
    ranks = Ranks(2)
    agreed(ranks, REDUCE)
    for now_s in range(100):
        ranks.say(0, blocked=[REDUCE], now_s=now_s)
        ranks.say(1, blocked=[REDUCE], now_s=now_s)
    assert ranks.errors == [{}, {}]


def test_two_operations_of_one_name_under_ids() -> None:
    ranks = Ranks(2)
    agreed(ranks, REDUCE, GATHER)
    ranks.say(0, blocked=[REDUCE], executed=5, now_s=1.0)
    ranks.say(1, blocked=[GATHER], executed=6, now_s=1.5)
    assert ranks.errors == [{}, {}], "rank 1 may have reduced, and the result be on its way to rank 0"
    ranks.say(0, blocked=[REDUCE], executed=6, all_threads=False, now_s=2.0)
    assert ranks.errors == [{}, {}], "a thread of rank 0 may yet gather"
    ranks.say(0, blocked=[REDUCE], executed=6, now_s=2.5)
    assert set(ranks.errors[0]) == set(ranks.errors[1]) == {"allreduce.x", "allgather.x"}


def test_an_old_report_about_a_wait_that_is_over_proves_nothing() -> None:
    """Rank 0 waited for a slow step once; now rank 1 uses the same name for something new, and rank 0 is about to."""
    ranks = Ranks(2)
    agreed(ranks, REDUCE)
    ranks.say(0, blocked=[REDUCE], now_s=1.0)
    for tenths in range(12, 60):
        ranks.say(1, GATHER, blocked=[GATHER], executed=1, now_s=tenths / 10)
    assert ranks.errors == [{}, {}]
    ranks.say(0, GATHER, now_s=6.0)
    assert ranks.plans[0]["allgather.x"] == 2


def test_old_reports_do_not_hide_a_real_disagreement() -> None:
    ranks = Ranks(2)
    agreed(ranks, REDUCE)
    for rank in (0, 1):
        ranks.say(rank, blocked=[REDUCE], now_s=1.0)  # a slow step, long ago
    later_s = 2.0 + FORGET_S
    ranks.say(1, GATHER, blocked=[GATHER], now_s=later_s)
    ranks.say(0, blocked=[REDUCE], now_s=later_s)
    ranks.say(0, blocked=[REDUCE], now_s=later_s + 1.0)
    assert mismatched(ranks.errors[1]["allgather.x"], "rank 0", "ALLREDUCE", "rank 1", "ALLGATHER")


def test_a_rank_that_is_gone_causes_no_alarm() -> None:
    ranks = Ranks(2)
    ranks.say(1, GATHER, blocked=[GATHER])
    ranks.take(ranks.negotiation.forget(1))
    ranks.say(0, REDUCE, blocked=[REDUCE], now_s=1.0)
    assert ranks.errors == [{}, {}]


def test_reports_are_bounded_and_nonsense_is_ignored() -> None:
    ranks = Ranks(2)
    for index in range(2 * MAX_REPORTS):
        ranks.say(0, blocked=[op(f"allreduce.{index}"), op(f"allgather.{index}", ALLGATHER)])
    reports = ranks.negotiation._sets[0].reports
    ranks.say(1, op("allreduce.0"), op("allreduce.1"))
    assert sum(len(by_name) for user in reports._by_user_name.values() for by_name in user.values()) == MAX_REPORTS
    ranks.say(0, blocked=[op(shape=[-1]), op(process_set=9), op(name="")])
    assert ranks.errors == [{}, {}]
