"""Anything a client may send, well formed or not, against the real services over gRPC.

Whatever it is: the stream ends with a status in words, nothing unexpected is logged, and a world that runs meanwhile in
the same coordinator notices nothing. Messages are made from their descriptors, so a new field is covered as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from coordinator_builders import ALLREDUCE, attach_request, op
from coordinator_client import Crew, Stream
from fuzzing import FUZZ, Listener, finish, listening
from hypothesis import given
from hypothesis import strategies as st
from messages import messages

from horovod.base.proofs import attach_proof, rejoin_proof
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.protos.v1 import membership_pb2, membership_pb2_grpc, negotiation_pb2, negotiation_pb2_grpc

JOIN, NEGOTIATE = "/horovod.v1.Membership/Join", "/horovod.v1.Negotiation/Negotiate"
pytestmark = pytest.mark.longer


@pytest.fixture(scope="module")
def coordinator() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator() as running:
        yield running


@pytest.fixture(scope="module")
def witness(coordinator: EmbeddedCoordinator) -> Iterator[Witness]:
    # Its streams are open through all tests of this file.
    with listening() as listener, Crew(coordinator.address, timeout_s=600.0) as crew:
        yield Witness(crew, listener)


class Witness:
    """A world of two in the same coordinator, and its log."""

    def __init__(self, crew: Crew, listener: Listener) -> None:
        self._listener = listener
        self.members = crew.world(2, job="witness")
        self._count = 0
        for member in self.members:
            member.negotiate()

    def sees_nothing(self) -> None:
        self._count += 1
        name = f"allreduce.t{self._count}"
        for member in self.members:
            member.announce(op(name))
        assert self.members[0].plans(1).keys() == self.members[1].plans(1).keys() == {name}
        for rank, member in enumerate(self.members):  # a stream is read to where its news are
            member.attach()
            assert not member.event("attached").gone, rank
        self._listener.check()


# -- tests -------------------------------------------------------------------------------------------------------------
@FUZZ
@given(first=messages(membership_pb2.MemberMessage), rest=st.lists(messages(membership_pb2.MemberMessage), max_size=3))
def test_membership(coordinator: EmbeddedCoordinator, witness: Witness, first: Any, rest: list[Any]) -> None:
    with grpc.insecure_channel(coordinator.address) as channel:
        stream: Stream[bytes, bytes] = Stream(channel.stream_stream(JOIN), coordinator.token)
        for message in [first, *rest]:
            stream.send(message.SerializeToString())
        finish(stream)
    witness.sees_nothing()


@FUZZ
@given(
    request=messages(membership_pb2.JoinRequest),
    job=st.sampled_from(["fuzz", "witness"]),
    rest=st.lists(messages(membership_pb2.MemberMessage), max_size=3),
)
def test_members_that_get_in(
    coordinator: EmbeddedCoordinator, witness: Witness, request: Any, job: str, rest: list[Any]
) -> None:
    """A join request that is good in what matters, so that everything else in it is used."""
    request.protocol_version, request.job, request.size = PROTOCOL_VERSION, job, 1
    request.member_id, request.host.name = f"member of {job}", "node-a"
    request.ClearField("requested_rank")
    with grpc.insecure_channel(coordinator.address) as channel:
        stream: Stream[Any, Any] = Stream(channel.stream_stream(JOIN), coordinator.token)
        for message in [membership_pb2.MemberMessage(join=request), *rest]:
            stream.send(message.SerializeToString())
        finish(stream)
    witness.sees_nothing()


ALL_BUT_THE_SECRET = ("nothing", "noise", "of another nonce", "of another rank", "of another secret", "to join again")


@FUZZ
@given(
    false=st.sets(st.sampled_from(["job", "epoch", "member_id", "rank", "protocol_version"])),
    proof=st.sampled_from(ALL_BUT_THE_SECRET),
    noise=messages(membership_pb2.Attach),
    rest=st.lists(messages(membership_pb2.MemberMessage), max_size=3),
)
def test_strangers_that_attach(
    coordinator: EmbeddedCoordinator, witness: Witness, false: set[str], proof: str, noise: Any, rest: list[Any]
) -> None:
    """They know all of a member that runs, but for the secret of its world; and never are that member."""
    member = witness.members[1]
    attach = attach_request(member.request, member.world)
    attach.pid = noise.pid
    attach.process.CopyFrom(noise.process)
    for field in false:
        setattr(attach, field, getattr(noise, field))
    secret = member.world.secret

    def answer(nonce: bytes) -> bytes:
        if proof == "of another rank":
            return attach_proof(secret, attach_request(witness.members[0].request, member.world), nonce)
        return {
            "nothing": b"",
            "noise": noise.member_id.encode()[:64],
            "of another nonce": attach_proof(secret, attach, nonce[::-1] + b"x"),
            "of another secret": attach_proof(secret[::-1] + b"x", attach, nonce),
            "to join again": rejoin_proof(secret, attach.job, attach.epoch, attach.rank, attach.member_id),
        }[proof]

    with grpc.insecure_channel(coordinator.address) as channel:
        stream: Stream[Any, Any] = Stream(membership_pb2_grpc.MembershipStub(channel).Join, coordinator.token)
        stream.send(membership_pb2.MemberMessage(attach=attach))
        heard = [*heard_first(stream)]
        if heard and heard[0].HasField("challenge"):
            stream.send(
                membership_pb2.MemberMessage(proof=membership_pb2.Proof(proof=answer(heard[0].challenge.nonce)))
            )
        for message in rest:
            stream.send(message)
        stream.half_close()
        with contextlib.suppress(grpc.RpcError):
            heard += stream.rest()
        finish(stream)
    assert not any(event.HasField("attached") for event in heard)
    assert witness.members[1].membership.call.is_active(), "the true one keeps its stream"
    witness.sees_nothing()


def heard_first(stream: Stream[Any, Any]) -> Iterator[Any]:
    """The first event, when there is one."""
    with contextlib.suppress(grpc.RpcError, StopIteration):
        yield stream.next()


@FUZZ
@given(
    false=st.sets(st.sampled_from(["job", "member_id", "rank", "epoch"]), min_size=1),
    noise=messages(negotiation_pb2.NegotiationMessage),
)
def test_a_hello_that_is_almost_true(
    coordinator: EmbeddedCoordinator, witness: Witness, false: set[str], noise: Any
) -> None:
    """A stream for a member's negotiation is given to who says all that belongs together."""
    member = witness.members[1]
    hello, epoch = member.hello(), member.world.epoch
    for field in false - {"epoch"}:
        setattr(hello, field, getattr(noise.hello, field))
    if "epoch" in false:
        epoch = noise.epoch
    noise.epoch = epoch
    if hello == member.hello() and epoch == member.world.epoch:
        return
    noise.hello.CopyFrom(hello)
    with grpc.insecure_channel(coordinator.address) as channel:
        stub = negotiation_pb2_grpc.NegotiationStub(channel)
        stream: Stream[Any, Any] = Stream(stub.Negotiate, coordinator.token)
        stream.send(noise)
        stream.half_close()
        # Another coordinator may serve a job that this one does not know.
        refusals = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)
        assert stream.failure()[0] in refusals
    witness.sees_nothing()


@FUZZ
@given(talk=st.lists(messages(negotiation_pb2.NegotiationMessage), min_size=1, max_size=3))
def test_strangers_that_negotiate(coordinator: EmbeddedCoordinator, witness: Witness, talk: list[Any]) -> None:
    with grpc.insecure_channel(coordinator.address) as channel:
        stream: Stream[bytes, bytes] = Stream(channel.stream_stream(NEGOTIATE), coordinator.token)
        for message in talk:
            stream.send(message.SerializeToString())
        finish(stream)
    witness.sees_nothing()


@FUZZ
@given(
    talks=st.lists(st.lists(messages(negotiation_pb2.NegotiationMessage), max_size=3), min_size=2, max_size=2),
    alike=st.booleans(),
    sane=st.booleans(),
)
def test_members_that_negotiate(
    coordinator: EmbeddedCoordinator, witness: Witness, talks: list[list[Any]], alike: bool, sane: bool
) -> None:
    """Both ranks of a world say anything, so that what one says is compared with what the other says."""
    with Crew(coordinator.address) as crew:
        members = crew.world(2, job="fuzz")
        for member, talk in zip(members, [talks[0], talks[0]] if alike else talks, strict=True):
            stub = negotiation_pb2_grpc.NegotiationStub(member.channel)
            stream: Stream[Any, Any] = Stream(stub.Negotiate, coordinator.token)
            member.streams.append(stream)
            stream.send(negotiation_pb2.NegotiationMessage(epoch=member.world.epoch, hello=member.hello()))
            for message in talk:
                message.epoch = member.world.epoch
                for said in [*message.announce, *message.blocked] if sane else []:
                    said.type, said.process_set = ALLREDUCE, 0
                    said.reduce_op, said.device = said.reduce_op % 6, said.device % 2
                    for tensor in said.tensors:
                        tensor.dtype = tensor.dtype % 11
                stream.send(message)
            finish(stream)
        for member in members:
            member.leave()
            member.membership.rest()
    witness.sees_nothing()


@FUZZ
@given(data=st.data(), method=st.sampled_from([JOIN, NEGOTIATE]))
def test_damaged_bytes(coordinator: EmbeddedCoordinator, witness: Witness, data: st.DataObject, method: str) -> None:
    """A message with changed, missing or additional bytes, which protobuf may or may not take for another message."""
    kind = membership_pb2.MemberMessage if method == JOIN else negotiation_pb2.NegotiationMessage
    good = data.draw(messages(kind)).SerializeToString()
    at = data.draw(st.integers(0, len(good)))
    bad = good[:at] + data.draw(st.binary(max_size=8)) + good[data.draw(st.integers(at, len(good))) :]
    with grpc.insecure_channel(coordinator.address) as channel:
        stream: Stream[bytes, bytes] = Stream(channel.stream_stream(method), coordinator.token)
        stream.send(bad)
        finish(stream)
    witness.sees_nothing()
