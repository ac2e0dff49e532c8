"""The services over real gRPC on the loopback interface."""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from coordinator_builders import ALLGATHER, FLOAT64, op
from coordinator_client import Crew, Stream
from error_codes import ends_with
from event_words import NOT_BACK, WAS_LOST, tells
from resources import eventually

from horovod.base.errors import AccessCode, ClusterCode, OperationCode, WorldCode, code_of
from horovod.base.processes import process_namespace, stopped_turns
from horovod.coordinator.config import Limits
from horovod.coordinator.core.world.life import EXECUTED, PROCESS_ENDED
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.parts import MAX_REQUEST_BYTES
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.services.negotiation_service import MAX_MESSAGE_BYTES, combined
from horovod.protos.v1 import membership_pb2, negotiation_pb2, negotiation_pb2_grpc


@pytest.fixture(scope="module")
def coordinator() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator() as running:
        yield running


@pytest.fixture
def crew(coordinator: EmbeddedCoordinator) -> Iterator[Crew]:
    with Crew(coordinator.address) as made:
        yield made


def newer_stream_ended(older: Stream[Any, Any]) -> bool:
    """Whether rank 0's older stream ended because it has opened another one."""
    status, sentence = older.failure()
    ended = re.search(ends_with(ClusterCode.NEWER_STREAM, "Rank 0"), sentence)
    return status is grpc.StatusCode.ABORTED and ended is not None


# -- stalls ----------------------------------------------------------------------------------------------------------


def test_a_stall_is_told_to_rank_0_and_its_shutdown_to_every_stream(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "horovod.coordinator")
    options = {"stall_check_seconds": "0.1", "stall_shutdown_seconds": "0.2"}
    members = [crew.member(f"s{rank}", job="stalls", rank=rank, pid=rank + 1, options=options) for rank in range(2)]
    for member in members:
        member.wait_for_world()
    members[0].negotiate(op())
    warnings, shutdown = [], ""
    while not shutdown:
        decisions = members[0].negotiation.next()
        warnings += decisions.warnings
        shutdown = decisions.shutdown
    assert "1!: [allreduce.x]" in warnings[-1]
    assert re.search(ends_with(OperationCode.STALLED, "1!: [allreduce.x]"), shutdown)
    for member in members:  # one comes back, the other comes late
        member.negotiate()
        assert member.negotiation.next().shutdown == shutdown
    said = [record.getMessage() for record in caplog.records]
    assert [f"Job 'stalls': {one}" for one in (*warnings, shutdown)] == [one for one in said if "allreduce.x" in one]


def test_members_must_agree_on_the_times_of_a_stall(crew: Crew) -> None:
    crew.member("t0", job="times", rank=0, options={"stall_check_seconds": "60.0"}).event("progress")
    other = crew.member("t1", job="times", rank=1, options={"stall_check_seconds": "5.0"})
    sentence = other.membership.next().refused.sentence
    assert re.search(ends_with(WorldCode.MEMBERS_DISAGREE, "'times'", "stall_check_seconds"), sentence)


# -- membership ------------------------------------------------------------------------------------------------------


def test_a_world_lives_and_ends_and_the_next_one_follows(crew: Crew) -> None:
    first = crew.member("first", job="lives", pid=1)
    assert tells(first.event("progress").sentence, "1 of 2", "lives", "1 more")
    second = crew.member("second", job="lives", pid=2, host="node-b")
    world = first.wait_for_world()
    assert world == second.wait_for_world()
    assert [world.hosts[member.host].identity.name for member in world.members] == ["node-a", "node-b"]
    assert list(world.cross_ranks) == [0, 1]
    assert len(world.secret) == 32
    second.leave("the script ended")
    gone = first.event("gone")
    assert gone.orderly
    assert tells(gone.sentence, "Rank 1 (pid 2) on host node-b", "the script ended")
    assert second.membership.rest() == [], "the coordinator ends the stream of a member that said goodbye"
    assert second.membership.call.code() is grpc.StatusCode.OK

    again = crew.member("second again", job="lives", rejoin=(world, 1))
    assert "still has rank 0 (pid 1)" in again.event("progress").sentence
    crew.member("first again", job="lives", rejoin=(world, 0))
    next_world = again.wait_for_world()
    assert next_world.epoch == world.epoch + 1
    assert next_world.secret != world.secret


@pytest.fixture(scope="module")
def impatient() -> Iterator[Crew]:
    with EmbeddedCoordinator(limits=Limits(reattach_grace_s=0.2)) as running, Crew(running.address) as made:
        yield made


def test_a_member_that_vanishes_for_longer_than_the_grace_is_told_to_the_others(impatient: Crew) -> None:
    members = impatient.settled_world(3, job="vanishes")
    members[1].vanish()
    for survivor in (members[0], members[2]):
        gone = survivor.event("gone")
        assert (gone.rank, gone.orderly, gone.epoch) == (1, False, members[0].world.epoch)
        assert gone.sentence.startswith(f"Rank 1 (pid 2) on host node-a {WAS_LOST}")
        assert tells(gone.sentence, NOT_BACK)


def test_half_closing_without_a_goodbye_is_no_goodbye(impatient: Crew) -> None:
    members = impatient.settled_world(2, job="half")
    members[0].membership.half_close()
    assert not members[1].event("gone").orderly


def test_a_silent_member_is_none_that_is_lost(impatient: Crew) -> None:
    members = impatient.settled_world(2, job="silent")
    impatient.settled_world(2, job="other")[1].vanish()
    other = impatient.settled_world(2, job="another")  # longer than the grace, seen from the coordinator
    other[1].vanish()
    other[0].event("gone")
    members[0].leave("the end")
    assert members[1].event("gone").orderly, "the first that it hears"


def test_a_connection_that_breaks_and_comes_back_is_no_news_for_the_others(crew: Crew) -> None:
    members = crew.settled_world(3, job="breaks")
    members[1].lose_connection()
    members[1].attach()
    assert not members[1].event("attached").gone
    members[2].lose_connection()
    members[0].leave("the end")
    assert members[1].event("gone").rank == 0
    members[2].attach()
    (gone,) = members[2].event("attached").gone
    assert (gone.rank, gone.orderly) == (0, True)
    members[1].negotiate(op())
    members[2].negotiate(op())


def test_a_newer_stream_of_a_member_replaces_the_older_after_the_proof(crew: Crew) -> None:
    """A connection of which only one side knows that it broke."""
    members = crew.settled_world(2, job="half-open")
    older = members[0].membership
    members[0].attach(secret=b"guessed")
    assert code_of(members[0].membership.next().refused.sentence) is WorldCode.UNPROVEN_MEMBER
    members[0].attach()
    members[0].event("attached")
    assert newer_stream_ended(older)
    members[1].leave()
    assert members[0].event("gone").rank == 1


def test_whoever_was_declared_lost_is_told_so(impatient: Crew) -> None:
    members = impatient.settled_world(2, job="too late")
    members[0].lose_connection()
    members[1].event("gone")
    members[0].attach()
    assert members[0].refused.reason == membership_pb2.REFUSAL_REASON_LOST
    refused = members[0].refused.sentence
    assert re.search(ends_with(WorldCode.DECLARED_LOST, "Rank 0 (pid 1) on host node-a"), refused)


def test_a_coordinator_that_was_restarted_does_not_know_the_world(crew: Crew) -> None:
    (member,) = crew.world(1, job="forgotten")
    member.attach(job="never heard of")
    assert member.refused.reason == membership_pb2.REFUSAL_REASON_UNKNOWN_WORLD


def test_what_a_peer_reports_counts_at_once(crew: Crew) -> None:
    members = crew.settled_world(3, job="reported")
    report = membership_pb2.PeerLost(epoch=members[0].world.epoch, rank=2)
    members[0].membership.send(membership_pb2.MemberMessage(peer_lost=report))
    members[2].vanish()
    gone = members[1].event("gone")
    assert tells(gone.sentence, "rank 0 (pid 1) on host node-a", "the coordinator")


# -- processes of this host ------------------------------------------------------------------------------------------


def this_host(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """What the process would say of itself in a join request."""
    start_time = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return {"pid": process.pid, "namespace": process_namespace(), "start_time": start_time}


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"]) as running:
        yield running
        running.kill()


def test_the_end_of_a_process_of_this_host_needs_no_grace(crew: Crew, process: "subprocess.Popen[bytes]") -> None:
    member = crew.member("reaped 0", job="reaped", rank=0, **this_host(process))
    other = crew.member("reaped 1", job="reaped", rank=1)
    for one in (member, other):
        one.wait_for_world()
        one.settle()
    process.kill()
    gone = other.event("gone")  # although its stream stands: somebody else holds it
    assert tells(gone.sentence, f"Rank 0 (pid {process.pid}) on host node-a {WAS_LOST}", PROCESS_ENDED)


@pytest.mark.parametrize("lie", ["", "pid", "namespace", "start_time"])
def test_a_process_that_is_seen_to_live_is_never_lost(
    impatient: Crew, process: "subprocess.Popen[bytes]", lie: str
) -> None:
    """Unless the member has named another process than its own: that one says nothing about the member."""
    said = this_host(process)
    if lie:
        said[lie] = {"pid": 4_000_000, "namespace": "other", "start_time": 1}[lie]
    job = f"stopped {lie}"
    member = impatient.member(f"m0 {lie}", job=job, rank=0, **said)
    other = impatient.member(f"m1 {lie}", job=job, rank=1)
    for one in (member, other):
        one.wait_for_world()
        one.settle()
    process.send_signal(signal.SIGSTOP)
    member.lose_connection()
    witness = impatient.settled_world(2, job=f"meanwhile {lie}")
    witness[0].vanish()
    witness[1].event("gone")  # so the grace is over for whoever was away before
    member.attach()
    if lie:
        assert member.refused.reason == membership_pb2.REFUSAL_REASON_LOST
    else:
        assert not member.event("attached").gone


def test_a_stall_report_names_a_process_that_is_stopped(crew: Crew, process: "subprocess.Popen[bytes]") -> None:
    options = {"stall_check_seconds": "0.1"}
    other = crew.member("stops.0", job="stops", rank=0, pid=1, options=options)
    stopped = crew.member("stops.1", job="stops", rank=1, options=options, **this_host(process))
    for one in (other, stopped):
        one.wait_for_world()
    process.send_signal(signal.SIGSTOP)
    assert eventually(lambda: stopped_turns(process.pid) is not None)
    other.negotiate(op())
    warning = other.negotiation.next().warnings[0]
    assert warning.endswith(f"until a SIGCONT: rank 1 (pid {process.pid}) on host node-a.")


def test_a_process_that_runs_another_program_is_no_member_any_more(crew: Crew) -> None:
    with subprocess.Popen(["sh", "-c", "read line; exec sleep 20"], stdin=subprocess.PIPE) as shell:
        member = crew.member("shell", job="exec", rank=0, **this_host(shell))
        other = crew.member("other", job="exec", rank=1)
        for one in (member, other):
            one.wait_for_world()
            one.settle()
        assert shell.stdin is not None
        shell.stdin.write(b"go\n")
        shell.stdin.flush()
        assert eventually(lambda: b"sleep" in Path(f"/proc/{shell.pid}/cmdline").read_bytes()[:6])
        member.lose_connection()
        assert EXECUTED in other.event("gone").sentence
        shell.kill()


# -- the watch -------------------------------------------------------------------------------------------------------


def test_an_error_in_one_job_does_not_end_the_watch_over_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tick = Membership.tick

    def failing(self: Membership, job: str, *arguments: Any) -> Any:
        if job == "bad":
            raise RuntimeError("a bug")
        return tick(self, job, *arguments)

    monkeypatch.setattr(Membership, "tick", failing)
    limits = Limits(reattach_grace_s=0.1)
    with EmbeddedCoordinator(limits=limits) as coordinator, Crew(coordinator.address) as crew:
        crew.world(2, job="bad")
        members = crew.settled_world(2, job="good")
        members[0].vanish()
        assert members[1].event("gone").rank == 0
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "job 'bad'" in errors[0].getMessage()
    assert errors[0].exc_info is not None


def test_a_refusal_comes_in_words_and_harms_nobody(crew: Crew) -> None:
    first = crew.member("m0", job="refuses", options={"fusion": "64"})
    first.event("progress")
    wrong = crew.member("m1", job="refuses", options={"fusion": "65"})
    (event,) = wrong.membership.rest()
    assert re.search(ends_with(WorldCode.MEMBERS_DISAGREE, "fusion"), event.refused.sentence)
    crew.member("m2", job="refuses", options={"fusion": "64"})
    first.wait_for_world()


# -- negotiation -----------------------------------------------------------------------------------------------------


def test_a_first_step_is_agreed(crew: Crew) -> None:
    members = crew.world(2, job="step")
    step = [op(f"allreduce.grad{index}", shape=[index]) for index in range(161)]
    members[0].negotiate(*step[:80])
    members[0].announce(*step[80:])
    members[1].negotiate(*step)
    plans = members[0].plans(161)
    assert plans == members[1].plans(161)
    assert len(set(plans.values())) == 161


def test_mismatches_reach_every_rank(crew: Crew) -> None:
    members = crew.world(2, job="mismatch")
    members[0].negotiate(op())
    members[1].negotiate(op(dtype=FLOAT64))
    errors = [member.negotiation.next().errors[0] for member in members]
    assert errors[0] == errors[1]
    assert re.search(ends_with(OperationCode.MISMATCHED, "rank 0", "float32", "float64"), errors[0].sentence)
    for member in members:
        member.announce(op())
    assert members[0].plans(1) == members[1].plans(1)


def test_one_name_for_two_operations_is_found(crew: Crew) -> None:
    members = crew.world(2, job="names")
    reduce, gather = op("allreduce.x"), op("allgather.x", ALLGATHER)
    members[0].negotiate(reduce, blocked=[reduce])
    members[1].negotiate(gather, blocked=[gather])
    for member in members:
        errors = {error.name: error.sentence for error in member.negotiation.next().errors}
        assert set(errors) == {"allreduce.x", "allgather.x"}
        assert re.search(ends_with(OperationCode.MISMATCHED, "ALLREDUCE", "ALLGATHER"), errors["allreduce.x"])


def test_a_broken_stream_is_resumed(crew: Crew) -> None:
    members = crew.world(2, job="resumes")
    members[0].negotiate(op())
    members[1].negotiate(op("allreduce.other"))
    members[1].announce(op())
    plan = members[0].plans(1)
    members[0].negotiation.close()
    members[0].negotiate(op(), op("allreduce.other"))  # as if neither had been answered
    assert members[0].plans(2)["allreduce.x"] == plan["allreduce.x"]
    assert members[1].plans(2).items() >= plan.items()


def test_a_newer_stream_replaces_an_older_one(crew: Crew) -> None:
    (member,) = crew.world(1, job="replaces")
    member.negotiate()
    older = member.negotiation
    member.announce(op())
    assert member.plans(1)
    member.negotiate(op("allreduce.y"))
    assert member.plans(1) == {"allreduce.y": 2}
    assert newer_stream_ended(older)


def test_the_negotiation_ends_when_its_member_half_closes(crew: Crew) -> None:
    (member,) = crew.world(1, job="half-closes")
    member.negotiate()
    member.negotiation.half_close()
    assert member.negotiation.rest() == []
    assert member.negotiation.call.code() is grpc.StatusCode.OK


def test_the_negotiation_ends_with_its_member(crew: Crew) -> None:
    members = crew.world(2, job="ends")
    for member in members:
        member.negotiate(op())
    for member in members:
        assert member.plans(1) == {"allreduce.x": 1}
    members[0].leave()
    code, sentence = members[0].negotiation.failure()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert re.search(ends_with(WorldCode.EPOCH_OVER, "Rank 0", f"world {members[1].world.epoch}"), sentence)
    members[1].announce(op("allreduce.y"))  # goes on, and waits
    members[1].leave()
    assert members[1].negotiation.failure()[0] is grpc.StatusCode.FAILED_PRECONDITION


# -- strangers and garbage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"epoch": 77}, ends_with(WorldCode.EPOCH_OVER, "World 77", "'strangers'")),
        ({"member_id": "who"}, ends_with(WorldCode.UNPROVEN_MEMBER, "'who'")),
        ({"rank": 1}, ends_with(WorldCode.UNPROVEN_MEMBER, "rank 0", "rank 1")),
    ],
)
def test_strangers_are_refused(crew: Crew, changes: dict[str, object], pattern: str) -> None:
    members = crew.world(2, job="strangers")
    epoch = changes.pop("epoch", members[0].world.epoch)
    hello = members[0].hello()
    for field, value in changes.items():
        setattr(hello, field, value)
    stub = negotiation_pb2_grpc.NegotiationStub(members[0].channel)
    stream: Stream[negotiation_pb2.NegotiationMessage, negotiation_pb2.Decisions] = Stream(stub.Negotiate, crew.token)
    stream.send(negotiation_pb2.NegotiationMessage(epoch=epoch, hello=hello))  # type: ignore[arg-type]
    code, sentence = stream.failure()
    stream.half_close()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert re.search(pattern, sentence)


@pytest.mark.parametrize("changes", [{"job": "nope"}, {"term": 1 << 40}, {"term": 0}])
def test_who_is_not_attached_here_has_to_find_out_who_serves_its_job(crew: Crew, changes: dict[str, object]) -> None:
    members = crew.world(2, job="unattached")
    hello = members[0].hello()
    for field, value in changes.items():
        setattr(hello, field, value)
    stub = negotiation_pb2_grpc.NegotiationStub(members[0].channel)
    stream: Stream[negotiation_pb2.NegotiationMessage, negotiation_pb2.Decisions] = Stream(stub.Negotiate, crew.token)
    stream.send(negotiation_pb2.NegotiationMessage(epoch=members[0].world.epoch, hello=hello))
    code, sentence = stream.failure()
    stream.half_close()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert re.search(ends_with(ClusterCode.NOT_SERVED_HERE, "Rank 0", repr(hello.job)), sentence)


def test_a_stale_epoch_within_a_stream_is_refused(crew: Crew) -> None:
    (member,) = crew.world(1, job="within")
    member.negotiate()
    member.negotiation.send(negotiation_pb2.NegotiationMessage(epoch=member.world.epoch + 1, announce=[op()]))
    code, sentence = member.negotiation.failure()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    epochs = f"world {member.world.epoch + 1}", f"world {member.world.epoch}."
    assert re.search(ends_with(OperationCode.CONTRADICTION, "Rank 0", *epochs), sentence)


METHODS = ["/horovod.v1.Membership/Join", "/horovod.v1.Negotiation/Negotiate"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("garbage", "codes"),
    [
        (b"\xff\xff\xff\xff", {grpc.StatusCode.INVALID_ARGUMENT}),
        (b"", {grpc.StatusCode.INVALID_ARGUMENT}),  # an empty message is well formed
        (b"\0" * (MAX_REQUEST_BYTES + 1), {grpc.StatusCode.RESOURCE_EXHAUSTED}),
        (None, {grpc.StatusCode.INVALID_ARGUMENT}),  # no message at all
    ],
    ids=["noise", "empty", "huge", "nothing"],
)
def test_garbage_ends_only_its_own_stream(
    crew: Crew, method: str, garbage: bytes | None, codes: set[grpc.StatusCode]
) -> None:
    with grpc.insecure_channel(crew.address) as channel:
        raw: Stream[bytes, bytes] = Stream(channel.stream_stream(method), crew.token)
        if garbage is None:
            raw.half_close()
        else:
            raw.send(garbage)
        code, sentence = raw.failure()
        raw.half_close()
    assert code in codes
    assert sentence
    crew.world(2, job="unharmed")


def test_garbage_after_joining_is_a_loss(crew: Crew) -> None:
    members = crew.world(2, job="after")
    members[0].membership.send(membership_pb2.MemberMessage(join=members[0].request))
    code, sentence = members[0].membership.failure()
    assert (code, code_of(sentence)) == (grpc.StatusCode.INVALID_ARGUMENT, ClusterCode.WRONG_MESSAGE)
    assert members[1].event("gone").rank == 0


@pytest.mark.parametrize("token", [None, "wrong"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens(method: str, token: str | None) -> None:
    with EmbeddedCoordinator(token="secret") as coordinator:
        with grpc.insecure_channel(coordinator.address) as channel:
            raw: Stream[bytes, bytes] = Stream(channel.stream_stream(method), token)
            code, sentence = raw.failure()
            raw.half_close()
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert re.search(ends_with(AccessCode.WRONG_TOKEN, "HOROVOD_TOKEN"), sentence)
        with Crew(coordinator.address, "secret") as crew:
            for member in crew.world(2):
                member.negotiate(op())
                assert member.rank in (0, 1)


# -- fitting decisions into messages ---------------------------------------------------------------------------------


def decisions(first: int, count: int, length: int) -> negotiation_pb2.Decisions:
    plans = [
        negotiation_pb2.Plan(name=str(number).rjust(length, "x"), id=number) for number in range(first, first + count)
    ]
    return negotiation_pb2.Decisions(epoch=5, plans=plans)


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([decisions(0, 3, 8)], 1),
        ([decisions(0, 3, 8), decisions(3, 4, 8), decisions(7, 1, 8)], 1),
        ([decisions(0, 3, MAX_MESSAGE_BYTES // 2)], 3),
        ([decisions(0, 1, 8), decisions(1, 5, MAX_MESSAGE_BYTES // 4), decisions(6, 1, 8)], 2),
    ],
)
def test_decisions_are_combined_up_to_a_bound(items: list[negotiation_pb2.Decisions], messages: int) -> None:
    before = [item.SerializeToString() for item in items]
    made = list(combined(items))
    assert len(made) == messages
    assert all(message.ByteSize() <= MAX_MESSAGE_BYTES and message.epoch == 5 for message in made)
    ids = [plan.id for message in made for plan in message.plans]
    assert ids == list(range(len(ids)))
    assert len(ids) == sum(len(item.plans) for item in items)
    assert before == [item.SerializeToString() for item in items], "items are shared with other streams"
