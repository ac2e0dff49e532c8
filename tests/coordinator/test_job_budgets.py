"""Attacks of somebody who has the token of one job: what one message makes a coordinator do, and what it keeps.

Each field of each message that such a token admits is filled with as much as a message holds. The fields are found by
the descriptors, so that a new one is attacked too. What is asserted is counted (calls, bytes), never timed.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import grpc
import pytest
from coordinator_builders import op
from coordinator_client import Crew
from fuzzing import fields, fill
from hypothesis import given
from hypothesis import strategies as st

from horovod.base.proofs import job_token
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.core.agreement import negotiation as negotiation_module
from horovod.coordinator.core.agreement import operations
from horovod.coordinator.core.agreement.budget import TooMuchError
from horovod.coordinator.core.agreement.negotiation import STEP, Negotiation
from horovod.coordinator.core.agreement.takeover import ContradictionError
from horovod.coordinator.core.rates import Rate, RateLimits, Rates
from horovod.coordinator.core.world import checks
from horovod.coordinator.core.world.checks import defect_of, refusal_of, refusal_of_attach
from horovod.coordinator.core.world.leavers import to_go
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import membership_pb2, negotiation_pb2

LARGE_BYTES = 512 << 10  # of a message; a coordinator takes sixteen times as much
MOST_CALLS = 250_000  # of Python's functions for one message: about 30 ms
CLUSTER = "0123456789abcdef0123456789abcdef"


# But announced operations, of which there may be more: see below.
RANK_FIELDS = [path for path in fields(negotiation_pb2.NegotiationMessage.DESCRIPTOR) if path != ("announce",)]


def calls_of(work: Callable[[], object]) -> int:
    count = 0

    def heard(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(heard)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("distinct", [False, True], ids=["equal", "distinct"])
@pytest.mark.parametrize("takes_over", [False, True], ids=["", "taking over"])
@pytest.mark.parametrize("path", RANK_FIELDS, ids=".".join)
def test_what_one_message_of_a_rank_costs(path: tuple[str, ...], takes_over: bool, distinct: bool) -> None:
    message = negotiation_pb2.NegotiationMessage(epoch=1)
    if path[0] == "hello" or takes_over:
        message.hello.rank = 1
    fill(message, path, LARGE_BYTES, distinct)
    negotiation = Negotiation(1, 2, takes_over=takes_over)

    def receive() -> None:
        try:
            negotiation.receive(1, message, 0.0, resumed=message.HasField("hello"))
            negotiation.receive(1, message, 1.0)
            negotiation.stalls(100.0, 1.0)
        except (TooMuchError, ContradictionError):
            pass

    tracemalloc.start()
    try:
        receive()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept <= negotiation.budget.total + (1 << 20), "what is kept is charged"
    negotiation = Negotiation(1, 2, takes_over=takes_over)
    assert calls_of(receive) < 2 * MOST_CALLS


# -- announcements: a message may have more of them than of other entries ----------------------------------------------
def announced(kind: str, count: int) -> negotiation_pb2.NegotiationMessage:
    """A first message of rank 1 with so many operations, all different and all of this kind."""
    message = negotiation_pb2.NegotiationMessage(epoch=1, hello=negotiation_pb2.Hello(rank=1))
    for number in range(count):
        one = op(f"allreduce.{number}", shape=[1024])
        if kind == "of an unknown type":
            one.name, one.type = one.name.ljust(400, "x"), 99  # type: ignore[assignment]
        elif kind == "of an unknown set":
            one.process_set = number + 1
        elif kind == "of one name":
            one.name, one.root_rank = "allreduce.x", number
        message.announce.append(one)
    return message


KINDS = ("good", "of an unknown type", "of an unknown set", "of one name")


@pytest.mark.parametrize("takes_over", [False, True], ids=["", "taking over"])
@pytest.mark.parametrize("kind", KINDS)
def test_announcements_are_taken_in_by_steps_and_what_is_kept_is_charged(kind: str, takes_over: bool) -> None:
    message = announced(kind, 8 * STEP + 1)
    negotiation = Negotiation(1, 2, takes_over=takes_over)
    operations._signature_of.cache_clear()
    steps = negotiation.steps(1, message, 0.0)
    tracemalloc.start()
    try:
        calls = [calls_of(lambda: next(steps, None)) for _ in range(10)]
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert max(calls) < MOST_CALLS / 4
    assert calls[-1] < 10, "there are no more steps"
    # What is remembered of good operations, for all jobs together, is bounded by itself.
    remembered = operations._signature_of.cache_info().currsize * 2 * operations.MAX_REMEMBERED_BYTES
    assert kept <= negotiation.budget.total + remembered + (1 << 18)
    if kind.startswith("of an unknown"):
        assert remembered == 0, "operations that make no sense are not remembered"


def test_a_hello_counts_with_its_last_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that takes over tells a rank which of its operations have failed for others: so it must know all of
    them before the process set goes on, although other ranks are heard between two steps."""
    monkeypatch.setattr(negotiation_module, "STEP", 1)
    negotiation = Negotiation(1, 2, takes_over=True)
    message = announced("good", 3)
    steps = negotiation.steps(1, message, 0.0)
    assert next(steps) == []
    failed = negotiation_pb2.OperationError(name="allreduce.2", sentence="Rank 0 wants another shape.", number=1)
    other = negotiation_pb2.NegotiationMessage(epoch=1, hello=negotiation_pb2.Hello(rank=0, failed=[failed]))
    assert negotiation.receive(0, other, 0.0) == []
    assert next(steps) == []
    ((ranks, decisions),) = next(steps)
    assert ranks == (1,)
    assert [one.name for one in decisions.errors] == ["allreduce.2"]


def test_others_are_served_between_the_steps_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    steps = Negotiation.steps

    def recorded(*arguments: Any, **more: Any) -> Iterator[Any]:
        for answers in steps(*arguments, **more):
            told.append("step")
            asyncio.get_running_loop().call_soon(told.append, "others")
            yield answers

    with EmbeddedCoordinator(token=CLUSTER) as coordinator, Crew(coordinator.address, CLUSTER) as crew:
        (member,) = crew.world(1, job="j")
        monkeypatch.setattr(Negotiation, "steps", recorded)
        member.negotiate(*(op(f"allreduce.{number}") for number in range(3 * STEP)))
        assert len(member.plans(3 * STEP)) == 3 * STEP
    assert told[:5] == ["step", "others", "step", "others", "step"]


@pytest.mark.parametrize("distinct", [False, True], ids=["equal", "distinct"])
@pytest.mark.parametrize("path", list(fields(membership_pb2.MemberMessage.DESCRIPTOR)), ids=".".join)
def test_what_one_message_of_a_member_costs(path: tuple[str, ...], distinct: bool) -> None:
    message = membership_pb2.MemberMessage()
    if path[0] == "join":
        host = membership_pb2.HostIdentity(name="h")
        message.join.MergeFrom(
            membership_pb2.JoinRequest(protocol_version=PROTOCOL_VERSION, job="j", member_id="m", size=2, host=host)
        )
    elif path[0] == "attach":
        message.attach.MergeFrom(membership_pb2.Attach(protocol_version=PROTOCOL_VERSION, job="j", member_id="m"))
    fill(message, path, LARGE_BYTES, distinct)
    said = []

    def receive() -> None:
        if message.HasField("join"):
            said.append(refusal_of(message.join))
        elif message.HasField("attach"):
            said.append(refusal_of_attach(message.attach))
        else:
            said.append(defect_of(message))

    assert calls_of(receive) < MOST_CALLS
    if path not in (("unreachable",), ("proof", "proof")):  # which are compared and not kept
        assert said[0], "so large a field is refused"
        assert len(said[0]) < 2000


# -- members that can't connect ----------------------------------------------------------------------------------------
def model_to_go(pairs: Collection[tuple[int, int]], newcomers: Collection[int]) -> set[int]:
    """The definition, which takes the number of pairs for each rank that goes."""
    left, gone = set(pairs), set()
    while left:
        missed = Counter(rank for pair in left for rank in pair)
        worst = max(missed, key=lambda rank: (rank in newcomers, missed[rank], rank))
        gone.add(worst)
        left = {pair for pair in left if worst not in pair}
    return gone


RANKS = st.integers(0, 8)


@given(st.lists(st.tuples(RANKS, RANKS).filter(lambda pair: pair[0] != pair[1]), max_size=30), st.sets(RANKS))
def test_who_goes_is_as_defined(pairs: list[tuple[int, int]], newcomers: set[int]) -> None:
    assert to_go(pairs, newcomers) == model_to_go(pairs, newcomers)


def test_who_goes_is_found_soon_in_a_large_world() -> None:
    pairs = [(one, other) for one in range(200) for other in range(one)]
    assert calls_of(lambda: to_go(pairs, ())) < 40 * len(pairs)


# -- time and memory of a job ------------------------------------------------------------------------------------------
def test_a_job_that_takes_all_the_time_waits() -> None:
    limits = RateLimits(Rates(seconds=Rate(10, 0.5)))
    limits.used("greedy", 8.0, 0.0)
    assert limits.pause_s("greedy", 0.0) == 0.0
    limits.used("greedy", 4.0, 0.0)
    assert limits.pause_s("greedy", 0.0) == 4.0
    assert limits.pause_s("greedy", 3.0) == 1.0
    assert limits.pause_s("greedy", 4.0) == 0.0
    assert limits.pause_s("other", 0.0) == 0.0


def test_the_time_of_all_streams_is_charged_to_their_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, charged = set(), set()
    monkeypatch.setattr(RateLimits, "pause_s", lambda _, job, now_s: asked.add(job) or 0.0)
    monkeypatch.setattr(RateLimits, "used", lambda _, job, seconds, now_s: charged.add((job, seconds > 0)))
    with EmbeddedCoordinator(token=CLUSTER) as coordinator, Crew(coordinator.address, CLUSTER) as crew:
        for job in ("a", "b"):
            member = crew.world(1, job=job)[0]
            if job == "b":
                member.negotiate(op("x"))
                member.plans(1)
            else:
                member.settle()
    assert asked == {"a", "b"}
    assert charged == {("a", True), ("b", True)}


def test_a_message_that_names_too_much_ends_its_own_stream_only() -> None:
    with EmbeddedCoordinator(token=CLUSTER) as coordinator, Crew(coordinator.address, job_token(CLUSTER, "j")) as crew:
        one, other = crew.world(2, job="j")
        report = membership_pb2.Unconnected(epoch=one.world.epoch, ranks=[1] * (checks.MAX_SIZE + 1))
        one.membership.send(membership_pb2.MemberMessage(unconnected=report))
        code, _ = one.membership.failure()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        message = negotiation_pb2.NegotiationMessage(epoch=other.world.epoch)
        message.recalled.extend(negotiation_pb2.RecallAnswer() for _ in range(1 << 15))
        other.negotiate(op("x"))
        other.negotiation.send(message)
        code, sentence = other.negotiation.failure()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, sentence
