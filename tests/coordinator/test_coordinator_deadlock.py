"""Ranks that wait for each other in different operations, as the coordinator finds them. The clock is the test's."""

import re
from collections.abc import Callable, Collection

from coordinator_builders import BROADCAST, message, op
from hypothesis import given
from hypothesis import strategies as st

from horovod.base.errors import OperationCode, code_of
from horovod.coordinator.core.agreement.deadlock import Deadlock, DeadlockDetector, DeadlockTimes, times_of
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.coordinator.core.agreement.standing import FORGET_S, Standings
from horovod.protos.v1 import negotiation_pb2 as pb

TIMES = DeadlockTimes()


def held(
    *operations: str,
    awaited: Collection[str] = (),
    started: int = 7,
    all_threads: bool = True,
    executed: int = 0,
    heard: int = 0,
    cpu_s: float = 0.0,
    moving: bool = False,
) -> pb.BlockedReport:
    """`1:allreduce.x` is of process set 1. Without `awaited` a thread waits for the last of them.

    executed: operations that the rank has run, in each process set.
    """
    unfinished = []
    for text in operations:
        number, _, name = text.rpartition(":")
        waits = text in awaited if awaited else text == operations[-1]
        unfinished.append(pb.Unfinished(process_set=int(number or 0), name=name, awaited=waits))
    return pb.BlockedReport(
        started=started,
        all_threads=all_threads,
        unfinished=unfinished,
        executed=[pb.Executed(process_set=number, count=executed) for number in range(4)],
        heard=heard,
        cpu_us=int(cpu_s * 1e6),
        moving=moving,
    )


Report = pb.BlockedReport | Callable[[float], pb.BlockedReport]  # which changes with time


def computing(report: pb.BlockedReport) -> Report:
    def report_at(now_s: float) -> pb.BlockedReport:
        report.cpu_us = int(now_s * 1e6)
        return report

    return report_at


def look(
    reports: dict[int, Report],
    members: dict[int, tuple[int, ...]] | None = None,
    seconds: float = TIMES.still_s,
) -> Deadlock | None:
    """What is found when every rank reports each second for so long."""
    ranks = tuple(range(max(reports) + 1))
    standings, found, now_s = Standings(), None, 0.0
    detector = DeadlockDetector(standings, TIMES)
    while now_s <= seconds + 1.0 and found is None:
        for rank, report in reports.items():
            standings.report(rank, report(now_s) if callable(report) else report, now_s)
        found = detector.find(lambda number: (members or {}).get(number, ranks), now_s)
        now_s += 1.0
    return found


def says(found: Deadlock, facts: str) -> bool:
    """Whether the sentence has these facts in this order, and the code."""
    return re.search(facts, found.sentence) is not None and code_of(found.sentence) is OperationCode.DEADLOCK


def test_two_ranks_in_different_operations() -> None:
    found = look({0: held("x", "a"), 1: held("x", "b")})
    assert found is not None
    assert found.operations == ((0, "a"), (0, "b"))
    assert says(found, "rank 0 .* a, .* rank 1 .* rank 1 .* b, .* rank 0 ")


def test_the_first_operation_at_which_they_part_is_named() -> None:
    found = look({0: held("early", "a", "late", "x"), 1: held("b", "late", "x")})
    assert found is None, "all wait for x, which can complete"
    found = look({0: held("early", "a", awaited=["a"]), 1: held("b")})
    assert found is not None
    assert says(found, "rank 0 .* early, .* rank 1 ")
    assert " a," not in found.sentence
    assert set(found.operations) == {(0, "early"), (0, "a"), (0, "b")}


def test_optimizers_that_one_rank_alone_has_made() -> None:
    found = look({0: held("allreduce.weight#2.all_made"), 1: held("allreduce.weight.all_made")})
    assert found is not None
    assert says(found, "optimizers .* same order")
    found = look({0: held("allreduce.weight#2"), 1: held("allreduce.bias")})
    assert found is not None
    assert "optimizers" not in found.sentence


def test_an_operation_that_nobody_waits_for_is_not_named() -> None:
    """A question of an optimizer, which stands until all ranks have asked it."""
    question = "allreduce.w.all_made.question"
    found = look({0: held(question, "early", "a", awaited=["a"]), 1: held("b")})
    assert found is not None
    assert says(found, "rank 0 .* early, .* rank 1 ")
    assert "question" not in found.sentence
    found = look({0: held(question), 1: held("b")})
    assert found is not None
    assert says(found, "rank 0 .* allreduce.w.all_made.question,"), "hvd.join() waits for what is under way"


def test_what_is_only_slow_is_no_deadlock() -> None:
    two = {0: held("a"), 1: held("b")}
    assert look(two, seconds=TIMES.still_s - 3.0) is None, "not for long enough"
    assert look({**two, 1: held("b", all_threads=False)}) is None, "a thread of rank 1 may start a"
    assert look({0: held("a"), 1: held("a")}) is None, "both have it"
    assert look({0: held("a")}, {0: (0, 1)}) is None, "rank 1 computes"
    assert look({**two, 1: held("a", "b", awaited=["a", "b"])}) is None, "a will complete, and free a thread of each"
    short = held("b")
    short.cut_short = True
    assert look({0: held("a"), 1: short}) is None, "rank 1 may have started a"
    assert look({0: held("a"), 1: held()}) is None, "rank 1 waits for nothing"


def test_a_rank_on_its_way_is_waited_for() -> None:
    three: dict[int, Report] = {0: held("a"), 1: held("b"), 2: lambda now_s: held("c", started=int(now_s))}
    assert look(three) is None, "rank 2 may come to a or b yet, and would wait there alone"
    assert look(three, seconds=TIMES.still_s + TIMES.patience_s) is not None
    found = look({**three, 2: held("b")})
    assert found is not None
    assert says(found, "rank 0 .* a, .* ranks 1 and 2 .* ranks 1 and 2 .* b,")


def test_a_rank_that_starts_something_does_not_stand_still() -> None:
    two: dict[int, Report] = {0: held("a"), 1: lambda now_s: held("b", started=int(now_s))}
    assert look(two, seconds=10 * TIMES.idle_s) is None


def test_reports_that_end_are_forgotten() -> None:
    standings = Standings()
    detector = DeadlockDetector(standings, TIMES)
    for second in range(6):
        standings.report(0, held("a"), float(second))
    for second in range(6, 20):
        standings.report(1, held("b"), float(second))
        assert detector.find(lambda _: (0, 1), float(second)) is None or second <= 5 + FORGET_S


def test_a_cycle_through_process_sets() -> None:
    members = {1: (0, 1), 2: (1, 2), 3: (0, 2)}
    found = look({0: held("1:x"), 1: held("2:x"), 2: held("3:x")}, members)
    assert found is not None
    assert set(found.operations) == {(1, "x"), (2, "x"), (3, "x")}
    assert look({0: held("1:x"), 1: held("1:x", "2:x"), 2: held("3:x")}, members) is None, "set 1 goes on"


def test_a_rank_outside_may_free_the_others() -> None:
    # 0 and 1 wait for each other in different sets, but what 0 waits for lacks only rank 2, which works.
    assert look({0: held("1:x"), 1: held("2:y")}, {1: (0, 2), 2: (0, 1)}) is None


def test_every_rank_gets_the_error_and_may_go_on() -> None:
    negotiation = Negotiation(1, 2)
    errors: list[dict[str, str]] = [{}, {}]
    now_s = 0.0
    heard = [0, 0]
    for rank in range(2):  # "known" runs under an id, the other is announced by one rank only
        for ranks, decisions in negotiation.receive(rank, message([op("allreduce.known")]), now_s):
            heard = [decisions.serial if one in ranks else serial for one, serial in enumerate(heard)]
    negotiation.receive(1, message([op("allreduce.new")]), now_s)
    while not errors[0] and now_s < 60.0:
        now_s += 1.0
        for rank, name in enumerate(["allreduce.known", "allreduce.new"]):
            said = message(blocked=[op(name)], waited_s=[now_s])
            said.blocked_report.CopyFrom(held(name, heard=heard[rank]))
            for ranks, decisions in negotiation.receive(rank, said, now_s):
                for one in ranks:
                    heard[one] = decisions.serial
                    errors[one].update({error.name: error.sentence for error in decisions.errors})
    assert errors[0] == errors[1]
    assert errors[0].keys() == {"allreduce.known", "allreduce.new"}
    assert now_s <= TIMES.still_s + 2.0
    for rank in range(2):
        answers = negotiation.receive(rank, message([op("allreduce.new")]), now_s)
    assert any(decisions.plans for _, decisions in answers)


def test_ids_of_what_has_failed_are_recalled_with_the_errors_in_one_message() -> None:
    """Otherwise a rank that goes on would complete what another one waits for that has not heard of its error yet."""
    negotiation = Negotiation(1, 3)
    added = pb.NegotiationMessage(epoch=1, process_sets=[pb.ProcessSetChange(process_set=3, ranks=[0, 1])])
    negotiation.receive(0, added, 0.0)
    in_set = op("allreduce.g", process_set=3)
    for rank in range(3):
        known = [op("allreduce.f"), *([in_set] if rank < 2 else []), op("allreduce.h")]
        negotiation.receive(rank, message(known), 0.0)
    told: dict[tuple[int, ...], pb.Decisions] = {}
    now_s = 0.0
    while not told and now_s < 60.0:
        now_s += 1.0
        for rank, name in enumerate(["allreduce.f", "3:allreduce.g", "allreduce.f"]):
            said = pb.NegotiationMessage(epoch=1, blocked_report=held(name, heard=100))
            told.update(negotiation.receive(rank, said, now_s))
    f, g = (0, "allreduce.f"), (3, "allreduce.g")
    assert {ranks: sorted((one.process_set, one.name) for one in said.errors) for ranks, said in told.items()} == {
        (0, 1): [f, g],
        (2,): [f],
    }
    assert {
        ranks: sorted((one.process_set, list(one.ids)) for one in said.recalls) for ranks, said in told.items()
    } == {
        (0, 1): [(0, [1]), (3, [1])],
        (2,): [(0, [1])],
    }


def until_told(negotiation: Negotiation, *names: str) -> dict[tuple[int, ...], pb.Decisions]:
    """What the ranks are told that wait for these operations."""
    told: dict[tuple[int, ...], pb.Decisions] = {}
    now_s = 0.0
    while not told and now_s < 60.0:
        now_s += 1.0
        for rank, name in enumerate(names):
            said = pb.NegotiationMessage(epoch=1, blocked_report=held(name, heard=100))
            told.update(negotiation.receive(rank, said, now_s))
    return told


def test_ids_of_unnamed_operations_are_recalled_by_whatever_number_they_go() -> None:
    negotiation = Negotiation(1, 2)
    known = [op("allreduce.noname.8"), op("broadcast.noname.9", BROADCAST), op("allreduce.x")]
    for rank in range(2):
        negotiation.receive(rank, message(known), 0.0)
    told = until_told(negotiation, "allreduce.noname.40", "broadcast.noname.41")
    assert [list(one.ids) for said in told.values() for one in said.recalls] == [[1, 2]]


def test_a_rank_whose_stream_broke_hears_of_what_has_failed_under_an_id() -> None:
    negotiation = Negotiation(1, 2)
    for rank in range(2):
        negotiation.receive(rank, message([op("allreduce.f"), op("allreduce.g")]), 0.0)
    told = until_told(negotiation, "allreduce.f", "allreduce.g")
    heard = [error for said in told.values() for error in said.errors]
    assert sorted(error.name for error in heard) == ["allreduce.f", "allreduce.g"]

    def again(*failed: pb.OperationError) -> list[str]:
        hello = message(hello=pb.Hello(failed=failed))
        answers = negotiation.receive(0, hello, 60.0, resumed=True)
        return sorted(error.name for _, said in answers for error in said.errors)

    assert again() == ["allreduce.f", "allreduce.g"]
    assert again(*heard) == []


# -- what is no proof --------------------------------------------------------------------------------------------------


def test_hosts_that_are_cut_off_from_each_other() -> None:
    """Rank 1 has run what rank 0 waits for, and waits for the next: the result is on its way to rank 0."""
    cut: dict[int, Report] = {0: held("a", executed=6), 1: held("b", executed=7)}
    assert look(cut, seconds=1000.0) is None
    both_ways: dict[int, Report] = {0: held("a"), 1: held("a")}
    assert look(both_ways, seconds=1000.0) is None
    three: dict[int, Report] = {0: held("a", executed=6), 1: held("b", executed=7), 2: held("b", executed=7)}
    assert look(three, seconds=1000.0) is None


def test_who_is_behind_may_miss_what_others_wait_for() -> None:
    """Both stopped in the middle of what they have agreed on; rank 0 has still to run an operation."""
    found = look({0: held("a", executed=6), 1: held("b", executed=7)})
    assert found is None, "rank 0 will run one more, perhaps a"
    found = look({0: held("a", "c", executed=6, awaited=["c"]), 1: held("b", executed=6)})
    assert found is not None
    assert set(found.operations) == {(0, "a"), (0, "c"), (0, "b")}


def test_a_rank_in_the_middle_of_a_change() -> None:
    assert look({0: held("a", moving=True), 1: held("b")}, seconds=1000.0) is None


def test_a_process_set_of_which_a_rank_has_not_heard() -> None:
    without = held("1:b")
    del without.executed[1:]
    assert look({0: held("1:a"), 1: without}, seconds=1000.0) is None


def test_decisions_that_are_on_their_way() -> None:
    """What the coordinator refuses ends without being run; a rank that has not heard of it waits for no other."""
    standings = Standings()
    detector = DeadlockDetector(standings, TIMES)
    standings.told([0, 1], 3)

    def find(heard: int, from_s: int) -> Deadlock | None:
        found = None
        for second in range(from_s, from_s + 10):
            standings.report(0, held("a", heard=heard), float(second))
            standings.report(1, held("b", heard=3), float(second))
            found = found or detector.find(lambda _: (0, 1), float(second))
        return found

    assert find(2, 0) is None
    assert find(3, 10) is not None
    standings.told([0], 4)
    assert find(3, 20) is None
    standings.new_stream(0)
    assert find(0, 30) is not None, "what was sent on an earlier stream is no longer on its way"


# -- ranks of which no thread is known to be blocked -------------------------------------------------------------------


def test_graphs_that_wait_for_each_other() -> None:
    """The engine has their operations; no thread waits. Nothing has been computed for a minute."""
    graphs: dict[int, Report] = {
        rank: lambda now_s, name=name: held(name, all_threads=False, cpu_s=0.01 * now_s)  # type: ignore[misc]
        for rank, name in enumerate("fg")
    }
    assert look(graphs, seconds=TIMES.idle_s - 2.0) is None
    found = look(graphs, seconds=TIMES.idle_s)
    assert found is not None
    assert says(found, "rank 0 .* f, .* rank 1 .* rank 1 .* g, .* rank 0 ")


def test_a_graph_that_computes_may_go_on() -> None:
    computes: dict[int, Report] = {0: held("f", all_threads=False), 1: computing(held("g", all_threads=False))}
    assert look(computes, seconds=10 * TIMES.idle_s) is None
    once: dict[int, Report] = {**computes, 1: lambda now_s: held("g", all_threads=False, cpu_s=min(now_s, 20.0))}
    assert look(once, seconds=TIMES.idle_s) is None, "it has computed for 20 s"
    assert look(once, seconds=30.0 + TIMES.idle_s) is not None


def test_a_graph_of_which_something_can_complete_may_go_on() -> None:
    both: dict[int, Report] = {
        0: held("f", "both", all_threads=False),
        1: held("g", "both", all_threads=False),
    }
    assert look(both, seconds=10 * TIMES.idle_s) is None


def test_a_thread_that_waits_for_a_graph() -> None:
    """As at the end of an epoch with more steps on one rank: one averages metrics, the other trains."""
    found = look({0: held("metric"), 1: held("gradient", all_threads=False)}, seconds=TIMES.idle_s)
    assert found is not None
    assert set(found.operations) == {(0, "metric"), (0, "gradient")}


def test_members_may_do_without() -> None:
    assert times_of({}) == TIMES
    assert times_of({"deadlock_check_disable": "False"}) == TIMES
    assert times_of({"deadlock_check_disable": "True"}) is None
    negotiation = Negotiation(1, 2, deadlock=None)
    for second in range(200):
        for rank, name in enumerate("ab"):
            said = pb.NegotiationMessage(epoch=1, blocked_report=held(name))
            assert negotiation.receive(rank, said, float(second)) == []


@given(st.data())
def test_nobody_who_may_go_on_is_ever_ended(data: st.DataObject) -> None:
    """Whatever is ended lacks a rank that can't start it before something that is ended itself."""
    size = data.draw(st.integers(2, 5))
    names = "abcd"
    reports = {}
    for rank in range(size):
        operations = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3))
        awaited = data.draw(st.lists(st.sampled_from(operations), unique=True, min_size=1))
        reports[rank] = held(*operations, awaited=awaited, all_threads=data.draw(st.booleans()))
    said: dict[int, Report] = {rank: computing(one) if not one.all_threads else one for rank, one in reports.items()}
    found = look(said, seconds=TIMES.still_s + TIMES.patience_s)
    held_by = {name: {r for r, one in reports.items() if name in [u.name for u in one.unfinished]} for name in names}

    def may_go_on(free: set[int]) -> set[int]:
        """Ranks for which an operation they wait for is held by all, or lacks only free ranks."""
        return {
            rank
            for rank, one in reports.items()
            if not one.all_threads
            or any(u.awaited and set(range(size)) - held_by[u.name] <= free for u in one.unfinished)
        }

    free: set[int] = set()
    while (more := may_go_on(free)) != free:
        free = more
    stuck = set(range(size)) - free
    assert (found is None) == (not stuck)
    if found is not None:
        for _, name in found.operations:
            assert stuck - held_by[name]
