"""How much of the coordinator's memory members can take: what is kept because of them is counted, in bytes."""

import contextlib
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from coordinator_builders import ALLGATHER, FLOAT32, message, op
from coordinator_client import Crew
from error_codes import ends_with

from horovod.base.errors import OperationCode
from horovod.coordinator.core.agreement.budget import (
    MAX_MEMBER_BYTES,
    Budget,
    TooMuchError,
    operation_bytes,
    text_bytes,
)
from horovod.coordinator.core.agreement.decisions import Failures
from horovod.coordinator.core.agreement.ids import key_bytes
from horovod.coordinator.core.agreement.negotiation import Negotiation
from horovod.coordinator.core.agreement.process_set import set_bytes
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import negotiation_pb2
from horovod.protos.v1 import types_pb2 as pb

LIMIT = 1 << 20

# Operations that are large each in its own way; the argument makes them differ.
LARGE: dict[str, Callable[[int], pb.Operation]] = {
    "many small ones": lambda number: op(f"allreduce.{number}"),
    "names": lambda number: op(f"allreduce.{number}".ljust(4096, "x")),
    "names beyond Latin script": lambda number: op(f"allreduce.{number}".ljust(1024, "\U0001f525")),
    "tensors": lambda number: op(f"allreduce.{number}", tensors=[(FLOAT32, ())] * 5000),
    "dimensions": lambda number: op(f"allreduce.{number}", tensors=[(FLOAT32, range(1000, 1064))] * 50),
    "unknown fields": lambda number: pb.Operation.FromString(
        op(f"allreduce.{number}").SerializeToString() + b"\xfa\x7f\x80\x80\x04" + bytes(1 << 16)
    ),
}


def flood(negotiation: Negotiation, large: Callable[[int], pb.Operation], rank: int = 0) -> str:
    """Announces until it is too much, and returns the sentence."""
    for number in range(1 << 20):
        try:
            negotiation.receive(rank, message([large(number)]), 0.0)
        except TooMuchError as error:
            return str(error)
    raise AssertionError("nothing was too much")


@pytest.mark.parametrize("kind", LARGE)
def test_operations_that_wait_are_bounded_in_bytes(kind: str) -> None:
    negotiation = Negotiation(7, 2, member_bytes=LIMIT)
    sentence = flood(negotiation, LARGE[kind])
    held = negotiation.budget.of(0)
    assert LIMIT // 2 < held <= LIMIT
    assert re.search(ends_with(OperationCode.TOO_MANY, f" {held} ", "rank 0", "world 7", f" {LIMIT} "), sentence)
    # The others go on, with what rank 0 has announced and with more.
    answers = negotiation.receive(1, message([LARGE[kind](0), op("allgather.y", ALLGATHER)]), 0.0)
    assert [decision.plans[0].id for _, decision in answers] == [1]
    assert negotiation.budget.of(0) < held
    negotiation.forget(0)
    negotiation.forget(1)
    assert negotiation.budget.total == text_bytes(LARGE[kind](0).name), "only the id is left"


def test_all_members_together_are_bounded() -> None:
    negotiation = Negotiation(7, 8, member_bytes=LIMIT, world_bytes=2 * LIMIT)
    for rank in range(2):
        flood(negotiation, lambda number, rank=rank: op(f"allreduce.{rank}.{number}"), rank)
    sentence = flood(negotiation, lambda number: op(f"allreduce.2.{number}"), 2)
    assert negotiation.budget.total <= 2 * LIMIT
    held = f" {negotiation.budget.total} ", f" {negotiation.budget.of(2)} "
    assert re.search(ends_with(OperationCode.TOO_MANY, *held, "rank 2", "world 7", f" {2 * LIMIT} "), sentence)


def test_ranks_that_announce_the_same_share_it() -> None:
    negotiation = Negotiation(7, 21)
    large = op(tensors=[(FLOAT32, (2, 3))] * 1000)
    for rank in range(20):
        negotiation.receive(rank, message([large]), 0.0)
    assert negotiation.budget.of(0) == operation_bytes(large)
    assert negotiation.budget.total < 2 * operation_bytes(large)


def test_what_a_message_led_to_before_it_was_too_much_is_told() -> None:
    negotiation = Negotiation(7, 2, member_bytes=LIMIT)
    negotiation.receive(0, message([op("allreduce.first")]), 0.0)
    with pytest.raises(TooMuchError) as error:
        negotiation.receive(1, message([op("allreduce.first"), *(LARGE["names"](number) for number in range(99))]), 0.0)
    assert [(ranks, [plan.name for plan in one.plans]) for ranks, one in error.value.answers] == [
        ((0, 1), ["allreduce.first"])
    ]


def test_sets_of_one_rank_do_not_add_to_its_limit() -> None:
    """There everything is agreed at once, and what has an id stays."""
    negotiation = Negotiation(7, 2, member_bytes=LIMIT)

    def fill() -> None:
        for number in range(1, 4000):
            change = negotiation_pb2.ProcessSetChange(process_set=number, ranks=[1])
            ops = [op(f"allreduce.{index}", process_set=number) for index in range(20)]
            negotiation.receive(1, negotiation_pb2.NegotiationMessage(process_sets=[change], announce=ops), 0.0)

    with pytest.raises(TooMuchError, match=ends_with(OperationCode.TOO_MANY, "rank 1", "world 7")):
        fill()
    assert negotiation.budget.of(1) <= LIMIT
    assert negotiation.budget.of(0) == 0


def test_reports_of_blocked_ranks_count() -> None:
    negotiation = Negotiation(7, 3, member_bytes=LIMIT)
    with pytest.raises(TooMuchError, match=ends_with(OperationCode.TOO_MANY, "rank 0", "allreduce.")):
        negotiation.receive(0, message(blocked=[LARGE["tensors"](number) for number in range(3)]), 0.0)
    unfinished = [negotiation_pb2.Unfinished(name=f"allreduce.{number}") for number in range(1000)]
    report = negotiation_pb2.BlockedReport(unfinished=unfinished)
    with pytest.raises(TooMuchError, match=ends_with(OperationCode.TOO_MANY, "rank 1", "1000 unfinished")):
        negotiation.receive(1, negotiation_pb2.NegotiationMessage(blocked_report=report), 0.0)
    assert max(negotiation.budget.of(rank) for rank in range(3)) <= LIMIT


def test_errors_that_are_kept_are_bounded_in_bytes() -> None:
    failures = Failures(max_count=100, max_bytes=10 * text_bytes("0000", "because"))
    for number in range(20):
        failures.put(0, 0, f"{number:04}", (), "because")
    assert failures.bytes_of(0) == 10 * text_bytes("0000", "because")
    assert failures.pop(0, 0, "0009") is None, "the oldest have gone"
    assert failures.pop(0, 0, "0019") == ((), "because")
    failures.put(0, 0, "large", (), "x" * 10**6)
    assert failures.bytes_of(0) == 0


# -- the count is right ------------------------------------------------------------------------------------------------


def counted_anew(negotiation: Negotiation) -> Counter[int]:
    """What the budget should say of each rank, from what there is."""
    found: Counter[int] = Counter()
    for number, one in negotiation._sets.items():
        for announced in one.pending.values():
            for rank, announcement in announced.items():
                found[rank] += announcement.bytes
        for by_rank in one.reports._by_user_name.values():
            for rank, reports in by_rank.items():
                found[rank] += sum(report.bytes for report in reports.values())
        for agreed in one.agreed.values():
            found[agreed.payer] += agreed.bytes
        for number_of_key, key in one.ids._live.items():
            found[one.ids._payer[number_of_key]] += key_bytes(key)
        if number:
            found[one.registrant] += set_bytes(one.members)
    for rank, standing in negotiation._standings._of.items():
        found[rank] += standing.bytes
    return +found


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_count_is_right(seed: int) -> None:
    dice = random.Random(seed)
    size = dice.randint(1, 4)
    negotiation = Negotiation(7, size, id_capacity=dice.choice([4, 100]), member_bytes=dice.choice([20_000, LIMIT]))
    now_s = 0.0
    for _ in range(300):
        now_s += dice.choice([0.0, 0.3, 4.0])
        rank = dice.randrange(size)
        ops = [
            op(f"allreduce.{dice.randrange(4)}", shape=(dice.randrange(2),), process_set=dice.randrange(3))
            for _ in range(dice.randrange(4))
        ]
        members = sorted(dice.sample(range(size), dice.randint(1, size)))
        one = negotiation_pb2.NegotiationMessage(
            announce=ops if dice.random() < 0.6 else [],
            blocked=ops if dice.random() < 0.3 else [],
            recalled=[negotiation_pb2.RecallAnswer(process_set=dice.randrange(3), ids=range(9))],
        )
        if dice.random() < 0.2:
            number = dice.randint(1, 2)
            known = negotiation._sets.get(number)
            one.process_sets.add(
                process_set=number, ranks=known.ranks if known else members, removed=dice.random() < 0.5
            )
        if dice.random() < 0.1:
            one.blocked_report.unfinished.add(name="allreduce.1")
        if dice.random() < 0.05:
            one.join.round = negotiation._joining._round
            one.join.contributes_none = dice.random() < 0.5
        with contextlib.suppress(TooMuchError):
            negotiation.receive(rank, one, now_s, resumed=dice.random() < 0.1)
        if dice.random() < 0.01:
            negotiation.forget(rank)
        anew = counted_anew(negotiation)
        assert {rank: negotiation.budget.of(rank) for rank in range(size)} == {rank: anew[rank] for rank in range(size)}
        assert negotiation.budget.total == anew.total()


def test_the_count_is_not_below_what_a_process_takes() -> None:
    """One member could make a coordinator take 221 MB before, and more with operations of many tensors."""
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from test_coordinator_budget import LARGE, flood
from horovod.coordinator.core.agreement.negotiation import Negotiation
def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
kept = []
for kind, large in LARGE.items():
    before = resident_bytes()
    kept.append(Negotiation(7, 2, member_bytes=16 << 20))
    flood(kept[-1], large)
    print(resident_bytes() - before, kept[-1].budget.of(0), kind)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert run.stderr == ""
    for line in run.stdout.splitlines():
        taken, counted, kind = line.split(maxsplit=2)
        assert int(taken) < 1.25 * int(counted), kind
    assert len(run.stdout.splitlines()) == len(LARGE)
    assert MAX_MEMBER_BYTES <= 64 << 20


def test_a_flood_ends_the_stream_of_its_member_in_words() -> None:
    with EmbeddedCoordinator() as coordinator, Crew(coordinator.address) as crew:
        members = crew.world(2)
        for member in members:
            member.negotiate(op())
        for member in members:
            assert member.plans(1)
        large = [LARGE["names"](number) for number in range(3000)]
        for first in range(0, len(large), 200):
            members[1].announce(*large[first : first + 200])
        code, sentence = members[1].negotiation.failure()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.search(ends_with(OperationCode.TOO_MANY, "rank 1", f" {MAX_MEMBER_BYTES} "), sentence)
        members[0].announce(large[0])
        assert members[0].plans(1)


def test_a_budget_that_is_exceeded_stays_as_it_was() -> None:
    budget = Budget(1, member_limit=10, world_limit=15)
    budget.charge(0, 10, "a")
    with pytest.raises(TooMuchError):
        budget.charge(0, 1, "b")
    with pytest.raises(TooMuchError):
        budget.charge(1, 6, "c")
    budget.charge(1, 5, "d")
    budget.release(0, 10)
    assert (budget.of(0), budget.of(1), budget.total) == (0, 5, 5)
