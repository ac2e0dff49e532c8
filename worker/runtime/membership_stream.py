"""One membership stream: what goes out waits in a queue, what comes in is read by the thread that calls `read`."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.channel import status_of

if TYPE_CHECKING:
    from horovod.worker.runtime.session import Session

Messages = Iterator[membership_pb2.MemberMessage]


class MembershipStream:
    def __init__(self, session: Session, first: membership_pb2.MemberMessage) -> None:
        """Begins the stream over the session's present connection. ValueError when its channel is closed."""
        self._outgoing: queue.SimpleQueue[membership_pb2.MemberMessage | None] = queue.SimpleQueue()
        self._outgoing.put(first)
        requests = iter(self._outgoing.get, None)  # runs in a thread of gRPC
        self.in_order = False  # the coordinator has ended it without an error
        self._call: Any = session.grpc_threads.start(session.coordinators.current.stub.Join, requests, session.metadata)

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
