"""Ranks that wait for each other in different operations, as the coordinator finds them. The clock is the test's."""

from collections.abc import Collection

from coordinator_builders import message, op
from hypothesis import given
from hypothesis import strategies as st

from horovod.coordinator.core.blocked import FORGET_S
from horovod.coordinator.core.deadlock import Deadlock, DeadlockDetector, DeadlockTimes
from horovod.coordinator.core.negotiation import Negotiation
from horovod.protos.v1 import negotiation_pb2 as pb

TIMES = DeadlockTimes()


def held(
    *operations: str, awaited: Collection[str] = (), started: int = 7, all_threads: bool = True
) -> pb.BlockedReport:
    """`1:allreduce.x` is of process set 1. Without `awaited` a thread waits for the last of them."""
    unfinished = []
    for text in operations:
        number, _, name = text.rpartition(":")
        waits = text in awaited if awaited else text == operations[-1]
        unfinished.append(pb.Unfinished(process_set=int(number or 0), name=name, awaited=waits))
    return pb.BlockedReport(started=started, all_threads=all_threads, unfinished=unfinished)


def look(
    reports: dict[int, pb.BlockedReport],
    members: dict[int, tuple[int, ...]] | None = None,
    seconds: float = TIMES.still_s,
) -> Deadlock | None:
    """What is found when every rank reports each second for so long."""
    ranks = tuple(range(max(reports) + 1))
    detector, found, now_s = DeadlockDetector(TIMES), None, 100.0
    while now_s <= 100.0 + seconds + 1.0 and found is None:
        for rank, report in reports.items():
            detector.report(rank, report, now_s)
        found = detector.find(lambda number: (members or {}).get(number, ranks), now_s)
        now_s += 1.0
    return found


def test_two_ranks_in_different_operations() -> None:
    found = look({0: held("x", "a"), 1: held("x", "b")})
    assert found is not None
    assert found.operations == ((0, "a"), (0, "b"))
    assert "rank 0 waits for a, which rank 1 has not started and rank 1 waits for b, which rank 0 has" in found.sentence


def test_the_first_operation_at_which_they_part_is_named() -> None:
    found = look({0: held("early", "a", "late", "x"), 1: held("b", "late", "x")})
    assert found is None, "all wait for x, which can complete"
    found = look({0: held("early", "a", awaited=["a"]), 1: held("b")})
    assert found is not None
    assert "rank 0 waits for early," in found.sentence
    assert set(found.operations) == {(0, "early"), (0, "a"), (0, "b")}


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
    assert look({0: held("a"), 1: pb.BlockedReport(started=1, all_threads=True)}) is None, "rank 1 waits for nothing"


def test_a_rank_on_its_way_is_waited_for() -> None:
    three = {0: held("a"), 1: held("b"), 2: held("c", all_threads=False)}
    assert look(three) is None, "rank 2 may come to a or b yet, and would wait there alone"
    assert look(three, seconds=TIMES.patience_s) is not None
    found = look({**three, 2: held("b")})
    assert found is not None
    assert "rank 0 waits for a, which ranks 1 and 2 have not started and ranks 1 and 2 wait for b" in found.sentence


def test_a_rank_that_starts_something_does_not_stand_still() -> None:
    detector = DeadlockDetector(TIMES)
    for second in range(30):
        detector.report(0, held("a"), float(second))
        detector.report(1, held("b", started=second), float(second))
        assert detector.find(lambda _: (0, 1), float(second)) is None


def test_reports_that_end_are_forgotten() -> None:
    detector = DeadlockDetector(TIMES)
    for second in range(6):
        detector.report(0, held("a"), float(second))
    for second in range(6, 20):
        detector.report(1, held("b"), float(second))
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
    for rank in range(2):  # "known" runs under an id, the other is announced by one rank only
        negotiation.receive(rank, message([op("allreduce.known")]), now_s)
    negotiation.receive(1, message([op("allreduce.new")]), now_s)
    while not errors[0] and now_s < 60.0:
        now_s += 1.0
        for rank, name in enumerate(["allreduce.known", "allreduce.new"]):
            said = message(blocked=[op(name)], waited_s=[now_s])
            said.blocked_report.CopyFrom(held(name))
            for ranks, decisions in negotiation.receive(rank, said, now_s):
                for one in ranks:
                    errors[one].update({error.name: error.sentence for error in decisions.errors})
    assert errors[0] == errors[1]
    assert errors[0].keys() == {"allreduce.known", "allreduce.new"}
    assert now_s <= TIMES.still_s + 2.0
    for rank in range(2):
        answers = negotiation.receive(rank, message([op("allreduce.new")]), now_s)
    assert any(decisions.plans for _, decisions in answers)


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
    found = look(reports, seconds=TIMES.patience_s)
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
