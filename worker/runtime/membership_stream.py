"""Membership streams: what goes out waits in a queue, what comes in is read by the thread that calls `read`."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.channel import status_of
from horovod.worker.runtime.grpc_threads import GrpcThreads

if TYPE_CHECKING:
    from horovod.worker.runtime.coordinators import Coordinators

Metadata = tuple[tuple[str, str], ...]
Outgoing = queue.SimpleQueue["membership_pb2.MemberMessage | None"]


class MembershipStreams:
    """Opens the streams of one session, one after another, each to the coordinator whose turn it is."""

    def __init__(self, coordinators: Coordinators) -> None:
        self.coordinators = coordinators
        self.grpc_threads = GrpcThreads()  # threads of all streams
        self.metadata: Metadata = ()  # metadata of the latest stream
        # Numeric addresses of coordinators that were spoken to in this world.
        self.addresses: frozenset[tuple[str, int]] = frozenset()

    @property
    def address(self) -> str:
        """Of the coordinator that is spoken to, or was last."""
        return self.coordinators.current.address

    def open(self, metadata: Metadata, **first: Any) -> MembershipStream:
        """A stream that begins with a MemberMessage of this field. ValueError when the channel is closed."""
        self.metadata = metadata
        message = membership_pb2.MemberMessage(unreachable=self.coordinators.unreachable, **first)
        outgoing: Outgoing = queue.SimpleQueue()
        outgoing.put(message)
        requests = iter(outgoing.get, None)  # runs in a thread of gRPC
        return MembershipStream(
            outgoing, self.grpc_threads.start(self.coordinators.current.stub.Join, requests, metadata)
        )


class MembershipStream:
    def __init__(self, outgoing: Outgoing, call: Any) -> None:
        self._outgoing = outgoing
        self._call = call
        self.in_order = False  # the coordinator has ended it without an error

    def send(self, **message: Any) -> None:
        """A MemberMessage with this field. It is dropped when the stream has ended."""
        self._outgoing.put(membership_pb2.MemberMessage(**message))

    def end(self) -> None:
        """Nothing more will be sent."""
        self._outgoing.put(None)

    def cancel(self) -> None:
        self.end()
        self._call.cancel()

    def read(self, on_event: Callable[[membership_pb2.MembershipEvent], None]) -> tuple[grpc.StatusCode, str]:
        """Reads every event until the stream ends; returns how it ended."""
        try:
            for event in self._call:
                on_event(event)
            self.in_order = True
        except grpc.RpcError as error:
            return status_of(error)
        finally:
            self.end()
        return grpc.StatusCode.UNAVAILABLE, "it ended the membership stream"
