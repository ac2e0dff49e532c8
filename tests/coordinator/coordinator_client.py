"""A member of a world as the tests of the services need it: two streams, read with deadlines, nothing else.

A deadline is the whole stream's: one that lives through many tests needs a longer one than the default.
"""

import queue
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
from coordinator_builders import request

from horovod.protos.v1 import membership_pb2, membership_pb2_grpc, negotiation_pb2, negotiation_pb2_grpc
from horovod.protos.v1 import types_pb2 as pb

TIMEOUT_S = 20.0
Message = TypeVar("Message")
Event = TypeVar("Event")


class Stream(Generic[Message, Event]):
    """A bidirectional call whose requests are sent one by one."""

    def __init__(self, method: Any, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        self.call = method(iter(self._requests.get, None), timeout=timeout_s, metadata=metadata)

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

    def event(self, kind: str) -> Any:
        """The next event of that kind; others that come before it are skipped, but not a refusal."""
        while True:
            event = self.membership.next()
            found = event.WhichOneof("event")
            if found == kind:
                return getattr(event, kind)
            assert found != "refused", event.refused.sentence

    def wait_for_world(self) -> membership_pb2.World:
        self.world = self.event("world")
        return self.world

    @property
    def rank(self) -> int:
        return next(m.rank for m in self.world.members if m.member_id == self.request.member_id)

    def hello(self) -> negotiation_pb2.Hello:
        return negotiation_pb2.Hello(job=self.request.job, member_id=self.request.member_id, rank=self.rank)

    def negotiate(self, *announce: pb.Operation, blocked: Sequence[pb.Operation] = ()) -> None:
        """Opens a negotiation stream that begins with these announcements."""
        self.negotiation = Stream(
            negotiation_pb2_grpc.NegotiationStub(self.channel).Negotiate, self.token, self._timeout_s
        )
        self.streams.append(self.negotiation)
        self.negotiation.send(
            negotiation_pb2.NegotiationMessage(
                epoch=self.world.epoch, hello=self.hello(), announce=announce, blocked=blocked
            )
        )

    def announce(self, *announce: pb.Operation) -> None:
        self.negotiation.send(negotiation_pb2.NegotiationMessage(epoch=self.world.epoch, announce=announce))

    def plans(self, count: int) -> dict[str, int]:
        found: dict[str, int] = {}
        while len(found) < count:
            found.update((plan.name, plan.id) for plan in self.negotiation.next().plans)
        return found

    def heartbeat(self, epoch: int | None = None) -> None:
        beat = membership_pb2.Heartbeat(epoch=self.world.epoch if epoch is None else epoch)
        self.membership.send(membership_pb2.MemberMessage(heartbeat=beat))

    def leave(self, reason: str = "") -> None:
        leave = membership_pb2.Leave(epoch=self.world.epoch, reason=reason)
        self.membership.send(membership_pb2.MemberMessage(leave=leave))

    def vanish(self) -> None:
        """What the coordinator sees of a process that is killed."""
        self.channel.close()
        for stream in self.streams:
            stream.half_close()


class Crew:
    """Members that a test made; all are gone afterwards."""

    def __init__(self, address: str, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self._token, self._timeout_s = token, timeout_s
        self._members: list[Member] = []

    def member(self, member_id: str, **fields: Any) -> Member:
        self._members.append(Member(self.address, member_id, self._token, self._timeout_s, **fields))
        return self._members[-1]

    def world(self, size: int, job: str = "digits") -> list[Member]:
        """`size` members in rank order, with negotiation streams that still have to be opened."""
        members = [self.member(f"{job}{rank}", job=job, size=size, rank=rank, pid=rank + 1) for rank in range(size)]
        for member in members:
            member.wait_for_world()
        return members

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self._members:
            member.vanish()
