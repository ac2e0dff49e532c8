"""Membership streams, the threads in which gRPC works for them, and how a member comes back whose stream broke."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from horovod.base.errors import without_code
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.channel import resolve, status_of
from horovod.worker.runtime.errors import StartError

if TYPE_CHECKING:
    from horovod.worker.runtime.coordinators import Coordinators
    from horovod.worker.runtime.local_member import LocalMember


# The threads in which gRPC works for this process's streams, so that none outlives them.
#
# gRPC for Python runs a stream in two daemon threads of its own: one iterates over the requests, one (for each
# channel) delivers events. Both hold the stream's lock now and then. A daemon thread that wants the GIL while the
# interpreter ends is stopped where it stands; when that is under the lock, the last garbage collection waits for the
# lock for ever in the stream's finalizer (seen once in 300 processes on a busy machine). So they are waited for while
# they can still run.

Message = TypeVar("Message")


class GrpcThreads:
    """Begins streams and knows their threads. Used from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the two below
        self._threads: set[threading.Thread] = set()
        self._unknown = 0  # streams whose threads are not known yet

    def start(
        self,
        method: grpc.StreamStreamMultiCallable[Message, Any],
        requests: Iterable[Message],
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """Begins a stream and returns its call."""
        before = set(threading.enumerate())
        call = method(self._told(requests), metadata=metadata)
        with self._changed:
            self._unknown += 2
        if not call.add_callback(self._remember):
            # The stream may be over already (a name that can't be resolved is enough), but the thread that told of it
            # may not be. Either this call started that thread, or an earlier call did, which is known or will tell.
            began = {thread for thread in threading.enumerate() if _is_of_grpc(thread)} - before
            with self._changed:
                self._unknown -= 1
                self._threads |= began
                self._changed.notify_all()
        return call

    def join(self, seconds: float) -> None:
        """Waits until the threads have ended, `seconds` at most. All calls must be cancelled, their requests ended."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._unknown <= 0, seconds)
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            # A thread of gRPC's core that has called Python is in the list of threads too, and can't be joined.
            if not isinstance(thread, threading._DummyThread):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _told(self, requests: Iterable[Message]) -> Iterator[Message]:
        self._remember()
        yield from requests

    def _remember(self) -> None:
        # Runs in the thread that is to be remembered: as its first step, or (for events) when the stream is over.
        with self._changed:
            self._unknown -= 1
            self._threads = {thread for thread in self._threads if thread.is_alive()} | {threading.current_thread()}
            self._changed.notify_all()


def _is_of_grpc(thread: threading.Thread) -> bool:
    """As far as the thread says what it runs; one that is about to end says nothing any more."""
    runs = getattr(thread, "_target", None)
    may_be = runs is None or str(getattr(runs, "__module__", "")).startswith("grpc.")
    return thread.daemon and may_be and thread.is_alive()


# Membership streams: what goes out waits in a queue, what comes in is read by the thread that calls `read`.

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


# How a member whose stream broke comes back: through all coordinators, for as long as its world runs.
#
# A stream that breaks is no end: another one is opened, on which the member proves that it belongs to the world
# (protos/v1/membership.proto). What was agreed goes on meanwhile, and also when all coordinators stay away
# (negotiator.py does the rest).

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 1.0
GOODBYE_ROUNDS = 2  # rounds through all coordinators: the one that was under way, and another


def stay(member: LocalMember) -> None:
    """Opens one stream after another, until the world is over for this process or its goodbye is said.

    Runs in the member's thread, which alone has the variables below. A member that is closed while its stream is
    away has no time to lose: each coordinator is tried once more, at once. Without a goodbye it would count as lost.
    """
    broken_at, delay, warned = time.monotonic(), FIRST_RETRY_SECONDS, False
    rounds_left = GOODBYE_ROUNDS
    while True:
        with member.changed:
            if member.final:
                return
            waits = not _go_on(member)
            if waits and member.goodbye is None:
                # The delay is random, so that the members of a large world do not come all at once.
                member.changed.wait_for(lambda: member.closing, delay * random.uniform(0.5, 1.0))
            elif waits:
                rounds_left -= 1
            if rounds_left == 0 or member.final:
                return
        began = time.monotonic()
        end = _come_back(member)
        was_attached = member.attached
        member.on_end(*end)
        lasted = time.monotonic() - began > LAST_RETRY_SECONDS
        if waits:
            delay = min(2 * delay, LAST_RETRY_SECONDS)
        if was_attached and lasted:
            delay = FIRST_RETRY_SECONDS
        if was_attached:
            broken_at, warned = time.monotonic(), False
        elif not warned and not member.final and time.monotonic() - broken_at > member.grace_seconds:
            warned = True
            log.warning(
                "The coordinator at %s can't be reached: %s Operations that every rank has run before "
                "continue, and this process tries to reconnect.",
                member.streams.address,
                without_code(member.reason),
            )


def _go_on(member: LocalMember) -> bool:
    """To the coordinator that the last one named, or the next one. False when it is time to wait first."""
    redirect, member.redirect = member.redirect, ""
    coordinators = member.streams.coordinators
    if redirect and coordinators.lead(redirect):
        return True
    return not coordinators.turn()


def _come_back(member: LocalMember) -> tuple[grpc.StatusCode, str]:
    """Runs one more stream of the member until it ends; returns how it ended."""
    streams = member.streams
    connection = streams.coordinators.current
    try:
        metadata = connection.metadata()
    except StartError as error:  # another user's process listens there, which must not see the token
        return grpc.StatusCode.UNAVAILABLE, str(error)
    addresses = resolve(connection.host, connection.port)
    with member.changed:
        if member.final:
            return grpc.StatusCode.CANCELLED, "the session is closed"
        streams.addresses |= addresses
        try:
            member.stream = streams.open(metadata, attach=member.attach_request())
        except ValueError as error:  # the channel is closed
            return grpc.StatusCode.CANCELLED, str(error)
    return member.stream.read(member.on_event)
