"""The session of a training process with its coordinator: join, stay a member, leave.

One gRPC channel and one membership stream, read by one daemon thread. The stream's requests come from a queue, and
whenever that is empty for some seconds a heartbeat goes out. Until the world stands, anything that fails is tried again
until the deadline, unless waiting cannot help. Afterwards a member that is gone is told to the engine at once; a
coordinator that is gone is not an error by itself: what was agreed goes on (negotiation.py does the rest).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from horovod.protos.v1 import membership_pb2, membership_pb2_grpc
from horovod.worker.runtime.errors import MemberLostError, StartError
from horovod.worker.runtime.grpc_threads import GrpcThreads
from horovod.worker.runtime.probe import probe
from horovod.worker.runtime.world import World
from horovod.worker.setting import split_address

if TYPE_CHECKING:
    from horovod._core import Engine

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
NOT_CONNECTED = "it could not connect to the other members"  # why a member leaves a world that never stood
HEARTBEAT_SECONDS = 5.0  # the coordinator declares a member lost after 30 without one (docs/adr/0005-keepalive.md)
LEAVE_SECONDS = 2.0  # how long the coordinator has to acknowledge a leave by ending the stream
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 1.0
PROBE_SECONDS = 2.0

CHANNEL_OPTIONS = (
    # A coordinator that died is noticed at once (its connection is reset); these are for hosts that vanish. They are
    # long because a false alarm costs the world: on a machine with ten times more work than processors a healthy
    # process was seen to miss a limit of half a second (docs/adr/0005-keepalive.md).
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Also bounds one attempt to connect, so it must leave room for slow networks.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A channel is this session's own: no connection or backoff is shared with an earlier session, no proxy is asked.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

_HELPLESS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
}


def waiting_helps(code: grpc.StatusCode) -> bool:
    """False for a status that the same request gets again."""
    return code not in _HELPLESS


def explain(code: grpc.StatusCode, details: str, address: str, with_token: bool) -> str:
    """The sentence for a call that the coordinator ended with a status."""
    details = details.strip() or "without a reason"
    end = "" if details.endswith((".", "!", "?")) else "."
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        which = "the token of this process" if with_token else "this process, which has no token"
        return (
            f"The coordinator at {address} refused {which}: {details}{end} Set HOROVOD_TOKEN to the token of its job."
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"The gRPC server at {address} is not a Horovod coordinator ({details}). Check the host and the port in "
            "HOROVOD_COORDINATOR."
        )
    if code is grpc.StatusCode.INTERNAL:
        return (
            f"What the server at {address} answered is not understood ({details}). Check that it is a Horovod "
            "coordinator of this version."
        )
    return f"The coordinator at {address} ended the call: {details}{end}"


class Session:
    """One membership of one world. `join` first, then `attach`, at last `close`; a session is not used twice."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self._with_token = token is not None
        self.metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {token}"),) if token else ()
        self._host, self._port = split_address(address, "coordinator")
        self.addresses: frozenset[tuple[str, int]] = frozenset()  # numeric; known when the world stands
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.grpc_threads = GrpcThreads()  # of all streams on the channel
        self._stub = membership_pb2_grpc.MembershipStub(self.channel)
        self._changed = threading.Condition()
        self._attempt: _Attempt | None = None
        self._engine: Engine | None = None
        self._gone: list[membership_pb2.MemberGone] = []
        self._progress = ""
        self.world: World | None = None
        self.lost = ""  # why the membership stream is over, as a sentence; empty while it stands
        self._closing = False

    # -- joining ---------------------------------------------------------------------------------------------------
    def join(self, make_request: Callable[[], membership_pb2.JoinRequest], deadline: float) -> World:
        """Waits for the world; StartError with a sentence when it does not stand by `deadline` (time.monotonic()).

        `make_request` is called for each attempt, because a member id is used only once.
        """
        started = time.monotonic()
        delay = FIRST_RETRY_SECONDS
        warned = False
        while True:
            request = make_request()
            attempt = _Attempt(self, request)
            self._attempt = attempt
            attempt.start()
            with self._changed:
                self._changed.wait_for(attempt.is_decided, max(0.0, deadline - time.monotonic()))
                if attempt.world is not None:
                    self.world = World.from_message(attempt.world, request.member_id)
                    self.addresses = _resolve(self._host, self._port)
                    return self.world
                ended, reason = attempt.ended, attempt.reason
            if attempt.final:
                raise StartError(reason)
            if not attempt.heard:
                finding = probe(self._host, self._port, min(PROBE_SECONDS, max(0.2, deadline - time.monotonic())))
                if ended or not finding.speaks_grpc:
                    reason = (
                        f"The coordinator at {self.address} {finding.words}. Check HOROVOD_COORDINATOR (or the address "
                        "given to hvd.init()) and that the coordinator runs there."
                    )
                    ended = True
                if finding.hopeless:
                    raise StartError(reason)
            if not ended:
                raise StartError(self._too_late(request, time.monotonic() - started))
            left = deadline - time.monotonic()
            if left <= delay:
                raise StartError(f"{reason} Gave up after {time.monotonic() - started:.0f} s.")
            if not warned:
                log.warning("%s Trying for another %.0f s.", reason, left)
                warned = True
            with self._changed:
                self._changed.wait(delay)
            delay = min(2 * delay, LAST_RETRY_SECONDS)

    def _too_late(self, request: membership_pb2.JoinRequest, seconds: float) -> str:
        state = self._progress.strip().rstrip(".") or "it did not say what it waits for"
        return (
            f"The world of job {request.job!r} was not complete after {seconds:.0f} s; the coordinator at "
            f"{self.address} says: {state}. Start the missing processes with the same job, size and coordinator, or "
            "give them more time with HOROVOD_START_TIMEOUT."
        )

    # -- being a member ----------------------------------------------------------------------------------------------
    def attach(self, engine: Engine) -> None:
        """From now on the engine hears of members that are gone; also of those that went since the world stood."""
        with self._changed:
            self._engine = engine
            gone, self._gone = self._gone, []
        for event in gone:
            _tell(engine, event)

    def check(self, wait_seconds: float = 0.0) -> None:
        """Raises MemberLostError when a member is gone that others still need; for the time between world and engine.

        A member leaves in order only after all others are connected to it, unless it says NOT_CONNECTED.

        wait_seconds: how long to wait for such news; over at once when none can come any more.
        """

        def gone() -> str:
            needed = (event for event in self._gone if not event.orderly or NOT_CONNECTED in event.sentence)
            return next((event.sentence for event in needed), "")

        with self._changed:
            self._changed.wait_for(lambda: gone() or self.lost, wait_seconds)
            if sentence := gone():
                raise MemberLostError(sentence)

    # -- called by the attempt's thread --------------------------------------------------------------------------------
    def _on_event(self, attempt: _Attempt, event: membership_pb2.MembershipEvent) -> None:
        engine: Engine | None = None
        with self._changed:
            kind = event.WhichOneof("event")
            attempt.heard = True
            if kind == "progress":
                self._progress = event.progress.sentence
                log.info("Waiting for the world: %s", self._progress)
            elif kind == "world":
                if attempt.world is None:
                    attempt.world = event.world
                elif event.world.epoch != attempt.world.epoch:
                    attempt.fail(
                        f"The coordinator at {self.address} started epoch {event.world.epoch} without this process."
                    )
                    engine = self._engine
            elif kind == "refused":
                sentence = event.refused.sentence or "no reason was given."
                attempt.fail(f"The coordinator at {self.address} refused this process: {sentence}")
                engine = self._engine
            elif kind == "gone" and attempt.world is not None and event.gone.epoch == attempt.world.epoch:
                event.gone.sentence = event.gone.sentence or f"Rank {event.gone.rank} is gone, without a reason."
                engine = self._engine
                if engine is None:
                    self._gone.append(event.gone)
            self._changed.notify_all()
        if engine is not None:
            if kind == "gone":
                _tell(engine, event.gone)
            else:
                engine.abort(attempt.reason)

    def _on_end(self, attempt: _Attempt, code: grpc.StatusCode, details: str) -> None:
        with self._changed:
            if not attempt.reason:
                attempt.reason = explain(code, details, self.address, self._with_token)
                attempt.final = not waiting_helps(code)
            attempt.ended = True
            if attempt.world is not None and not self._closing:
                self.lost = attempt.reason
                log.warning(
                    "The connection to the coordinator at %s is lost: %s Operations that every rank knows go on.",
                    self.address,
                    attempt.reason,
                )
            self._changed.notify_all()

    # -- leaving -----------------------------------------------------------------------------------------------------
    def close(self, reason: str = "") -> None:
        """Leaves in order when there is a world to leave, and ends the channel. Idempotent; never raises."""
        self._closing = True
        if self._attempt is not None:
            self._attempt.leave(reason)
        self.channel.close()
        if self._attempt is not None:
            self._attempt.thread.join(LEAVE_SECONDS)
        self.grpc_threads.join(LEAVE_SECONDS)
        self._attempt = None  # it refers back to this object, and what belongs to the world is to go away now
        self._engine = None


class _Attempt:
    """One membership stream. All fields are guarded by the session's condition."""

    def __init__(self, session: Session, request: membership_pb2.JoinRequest) -> None:
        self._session = session
        self._outgoing: queue.SimpleQueue[membership_pb2.MemberMessage | None] = queue.SimpleQueue()
        self._outgoing.put(membership_pb2.MemberMessage(join=request))
        self.world: membership_pb2.World | None = None
        self.heard = False  # it spoke to us, so it is a coordinator
        self.ended = False
        self.final = False  # another attempt would end in the same way
        self.reason = ""
        self.thread = threading.Thread(target=self._read, name="horovod-membership", daemon=True)

    def start(self) -> None:
        session = self._session
        self._call = session.grpc_threads.start(session._stub.Join, self._requests(), session.metadata)
        self.thread.start()

    def is_decided(self) -> bool:
        return self.world is not None or self.ended

    def fail(self, sentence: str) -> None:
        self.reason, self.final, self.ended = sentence, True, True

    def leave(self, reason: str) -> None:
        if self.world is not None and not self.ended:
            leave = membership_pb2.Leave(epoch=self.world.epoch, reason=reason)
            self._outgoing.put(membership_pb2.MemberMessage(leave=leave))
            self._outgoing.put(None)
            self.thread.join(LEAVE_SECONDS)
        self._outgoing.put(None)
        self._call.cancel()

    def _requests(self) -> Iterator[membership_pb2.MemberMessage]:
        # Runs in a thread of gRPC.
        while True:
            try:
                message = self._outgoing.get(timeout=HEARTBEAT_SECONDS)
            except queue.Empty:
                epoch = self.world.epoch if self.world else 0
                message = membership_pb2.MemberMessage(heartbeat=membership_pb2.Heartbeat(epoch=epoch))
            if message is None:
                return
            yield message

    def _read(self) -> None:
        code, details = grpc.StatusCode.UNAVAILABLE, "it ended the membership stream"
        try:
            for event in self._call:
                self._session._on_event(self, event)
        except grpc.RpcError as error:
            code, details = status_of(error)
        finally:
            self._outgoing.put(None)
            self._session._on_end(self, code, details)


def _resolve(host: str, port: int) -> frozenset[tuple[str, int]]:
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset((str(row[4][0]), port) for row in rows)


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Code and text of an error. A sync call raises itself, which its class does not say."""
    call: Any = error
    if not hasattr(call, "code"):
        return grpc.StatusCode.UNKNOWN, str(error)
    return call.code(), call.details() or ""


def _tell(engine: Engine, gone: membership_pb2.MemberGone) -> None:
    with contextlib.suppress(Exception):  # the engine may be closing, and then it does not matter any more
        if gone.orderly:
            engine.peer_left(gone.rank, gone.sentence)
        else:
            engine.abort(gone.sentence)
