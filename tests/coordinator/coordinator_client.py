"""A member of a world as the tests of the services need it: two streams, read with deadlines, nothing else.

A deadline is the whole stream's: one that lives through many tests needs a longer one than the default.
"""

import queue
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
from coordinator_builders import attach_request, request

from horovod.base.proofs import attach_proof
from horovod.protos.v1 import membership_pb2, membership_pb2_grpc, negotiation_pb2, negotiation_pb2_grpc
from horovod.protos.v1 import types_pb2 as pb
from horovod.worker.runtime.token import Credential

TIMEOUT_S = 60.0  # on a busy machine
Message = TypeVar("Message")
Event = TypeVar("Event")


Metadata = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


def found_token(address: str) -> str | None:
    """That of a coordinator which was started without one, as members find it."""
    metadata = Credential(address, None).metadata()
    return metadata[0][1].removeprefix("Bearer ") if metadata else None


class Stream(Generic[Message, Event]):
    """A bidirectional call whose requests are sent one by one."""

    def __init__(self, method: Any, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        metadata = bearer(token) if token else None
        self.call = method(iter(self._requests.get, None), timeout=timeout_s, metadata=metadata)
        if not self.call.add_callback(self.half_close):  # or gRPC's thread would wait for a request for ever
            self.half_close()

    def send(self, message: Message) -> None:
        self._requests.put(message)

    def half_close(self) -> None:
        self._requests.put(None)

    def next(self) -> Event:
        event: Event = next(self.call)
        return event

    def rest(self) -> list[Event]:
        """Everything until the stream ends; raises grpc.RpcError when it ends badly."""
        return list(self.call)

    def failure(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ends, after skipping what comes before."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        return self.call.code(), self.call.details()

    def close(self) -> None:
        self.half_close()
        self.call.cancel()


class Member:
    """One process, with a channel of its own so that it can vanish."""

    def __init__(self, address: str, member_id: str, token: str | None, timeout_s: float, **fields: Any) -> None:
        self.request = request(member_id, **fields)
        self._address = address
        self.refused = membership_pb2.Refused()
        self.parted = False
        self.token, self._timeout_s = token, timeout_s
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options)
        self.membership: Stream[membership_pb2.MemberMessage, membership_pb2.MembershipEvent] = Stream(
            membership_pb2_grpc.MembershipStub(self.channel).Join, token, timeout_s
        )
        self.membership.send(membership_pb2.MemberMessage(join=self.request))
        self.negotiation: Stream[negotiation_pb2.NegotiationMessage, negotiation_pb2.Decisions]
        self.streams: list[Any] = [self.membership]
        self.world = membership_pb2.World()
        self.term = 0

    def event(self, kind: str) -> Any:
        """The next event of that kind; others that come before it are skipped, but not a refusal."""
        while True:
            event = self.membership.next()
            self.term = event.term or self.term
            found = event.WhichOneof("event")
            if found == kind:
                return getattr(event, kind)
            assert found != "refused", event.refused.sentence

    def wait_for_world(self) -> membership_pb2.World:
        self.world = self.event("world")
        received = membership_pb2.WorldReceived(epoch=self.world.epoch)
        self.membership.send(membership_pb2.MemberMessage(received=received))
        return self.world

    @property
    def rank(self) -> int:
        return [member.member_id for member in self.world.members].index(self.request.member_id)

    def attach(self, secret: bytes | None = None, **changes: Any) -> None:
        """Opens another membership stream and answers its challenge, as a member does whose stream broke."""
        attach = attach_request(self.request, self.world)
        for field, value in changes.items():
            setattr(attach, field, value)
        self.membership = Stream(membership_pb2_grpc.MembershipStub(self.channel).Join, self.token, self._timeout_s)
        self.streams.append(self.membership)
        self.membership.send(membership_pb2.MemberMessage(attach=attach))
        event = self.membership.next()
        if event.HasField("refused"):
            self.refused = event.refused
            return
        proof = attach_proof(self.world.secret if secret is None else secret, attach, event.challenge.nonce)
        self.membership.send(membership_pb2.MemberMessage(proof=membership_pb2.Proof(proof=proof)))

    def settle(self) -> None:
        """Afterwards the coordinator knows that this member has its world; what else it said has been read before."""
        self.attach()
        self.event("attached")

    def lose_connection(self) -> None:
        """What the coordinator sees of a connection that breaks, while the process lives on and may come back."""
        self.channel.close()
        self.membership.half_close()
        self.channel = grpc.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)])

    def hello(self) -> negotiation_pb2.Hello:
        return negotiation_pb2.Hello(
            job=self.request.job, member_id=self.request.member_id, rank=self.rank, term=self.term
        )

    def negotiate(self, *announce: pb.Operation, blocked: Sequence[pb.Operation] = ()) -> None:
        """Opens a negotiation stream that begins with these announcements. blocked: all that is in flight, and a thread
        waits for each."""
        self.negotiation = Stream(
            negotiation_pb2_grpc.NegotiationStub(self.channel).Negotiate, self.token, self._timeout_s
        )
        self.streams.append(self.negotiation)
        message = negotiation_pb2.NegotiationMessage(
            epoch=self.world.epoch, hello=self.hello(), announce=announce, blocked=blocked
        )
        if blocked:
            message.blocked_numbers.extend(range(len(blocked)))
            message.blocked_report.all_threads = True
            message.blocked_report.executed.add(process_set=0, count=0)
            for number, one in enumerate(blocked):
                message.blocked_report.unfinished.add(name=one.name, awaited=True, number=number)
        self.negotiation.send(message)

    def announce(self, *announce: pb.Operation) -> None:
        self.negotiation.send(negotiation_pb2.NegotiationMessage(epoch=self.world.epoch, announce=announce))

    def plans(self, count: int) -> dict[str, int]:
        found: dict[str, int] = {}
        while len(found) < count:
            found.update((plan.name, plan.id) for plan in self.negotiation.next().plans)
        return found

    def leave(self, reason: str = "") -> None:
        self.parted = True
        leave = membership_pb2.Leave(epoch=self.world.epoch, reason=reason)
        self.membership.send(membership_pb2.MemberMessage(leave=leave))

    def part(self) -> None:
        """Leaves in order if it can, so that the coordinator knows nothing of this member any more."""
        if self.world.epoch and not self.parted:
            self.leave()
            self.membership.failure()
        self.vanish()

    def vanish(self) -> None:
        """What the coordinator sees of a process that is killed."""
        self.parted = True
        self.channel.close()
        for stream in self.streams:
            stream.half_close()


class Crew:
    """Members that a test made; all are gone afterwards. Without a token they use one that they find."""

    def __init__(self, address: str, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self.token, self._timeout_s = token or found_token(address), timeout_s
        self._members: list[Member] = []

    def member(self, member_id: str, **fields: Any) -> Member:
        self._members.append(Member(self.address, member_id, self.token, self._timeout_s, **fields))
        return self._members[-1]

    def world(self, size: int, job: str = "digits") -> list[Member]:
        """`size` members in rank order, with negotiation streams that still have to be opened."""
        members = [self.member(f"{job}{rank}", job=job, size=size, rank=rank, pid=rank + 1) for rank in range(size)]
        for member in members:
            member.wait_for_world()
        return members

    def settled_world(self, size: int, job: str) -> list[Member]:
        """Like `world`; a stream that breaks from now on is no loss."""
        members = self.world(size, job)
        for member in members:
            member.settle()
        return members

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self._members:
            member.part()
