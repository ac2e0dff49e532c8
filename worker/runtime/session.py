"""The session of a training process with its coordinator: join, stay a member, leave.

One gRPC channel and one membership stream at a time, read by one daemon thread. Until the world stands, anything that
fails is tried again until the deadline, unless waiting cannot help. Afterwards a member that is gone is told to the
engine at once. A stream that breaks is no end: the thread opens another one and proves that it belongs to the world
(protos/v1/membership.proto), again and again for as long as the world runs, at each of the coordinators that there are.
What was agreed goes on meanwhile, and also when they all stay away (negotiation.py does the rest). Nothing is sent to
show that this process lives: gRPC's keepalive does that without Python.

Coordinators that take over from each other do so in rising terms. Who has heard of a term believes no earlier one.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import grpc

from horovod.protos.v1 import membership_pb2
from horovod.telemetry import tracing
from horovod.worker.runtime.channel import explain, resolve, waiting_helps
from horovod.worker.runtime.coordinators import Coordinators
from horovod.worker.runtime.errors import MemberLostError, StartError, WorldNeverStoodError
from horovod.worker.runtime.grpc_threads import GrpcThreads
from horovod.worker.runtime.membership_stream import MembershipStream
from horovod.worker.runtime.negotiation import Link
from horovod.worker.runtime.probe import probe
from horovod.worker.runtime.proofs import attach_proof
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.runtime.witness import lives
from horovod.worker.runtime.world import World
from horovod.worker.words import printable

if TYPE_CHECKING:
    from horovod._core import Engine

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 3
NOT_CONNECTED = "it could not connect to the other members"  # why a member leaves a world that never stood
LEAVE_SECONDS = 2.0  # to come back where the stream is away, and for the coordinator to end it once it has the leave
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 1.0
GOODBYE_ROUNDS = 2  # through all coordinators: the one that was under way, and another
PROBE_SECONDS = 2.0


class Session:
    """One membership of one world. `join` first, then `attach`, at last `close`; a session is not used twice."""

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        tls: ClientTls | None = None,
        keepalive_timeout_seconds: float = 20.0,
        reattach_grace_seconds: float = 10.0,
        relay: str = "",
    ) -> None:
        self.coordinators = Coordinators(address, token, tls, keepalive_timeout_seconds, relay)
        self.metadata: tuple[tuple[str, str], ...] = ()  # of the latest stream
        self._grace_seconds = reattach_grace_seconds
        self.addresses: frozenset[tuple[str, int]] = frozenset()  # numeric, of those that were spoken to in this world
        self.grpc_threads = GrpcThreads()  # of all streams
        self._changed = threading.Condition()  # guards all below and the fields of the attempt
        self._attempt: _Attempt | None = None
        self._engine: Engine | None = None
        self._gone: list[membership_pb2.MemberGone] = []  # all that were heard of
        self._known: dict[int, bool] = {}  # their ranks; whether in order
        self._reports: dict[int, membership_pb2.PeerLost] = {}  # by rank; told on every stream
        self._progress = ""
        self._progress_at = ""  # which coordinator said it
        self.world: World | None = None
        self._term = 0  # the highest that was heard of
        self.lost = ""  # why this process is no member any more, as a sentence; empty while it is or may be again
        self._closing = False

    @property
    def address(self) -> str:
        """Of the coordinator that is spoken to, or was last."""
        return self.coordinators.current.address

    # -- joining ---------------------------------------------------------------------------------------------------
    def join(self, make_request: Callable[[], membership_pb2.JoinRequest], deadline: float) -> World:
        """Waits for the world; StartError with a sentence when it does not stand by `deadline` (time.monotonic()).

        `make_request` is called for each attempt, because a member id is used only once.
        """
        started = time.monotonic()
        delay = FIRST_RETRY_SECONDS
        warned = False
        reasons: dict[str, str] = {}  # the latest of each coordinator
        while True:
            reason, final = self._try(make_request(), deadline, started)
            if self.world is not None:
                return self.world
            redirect = self._attempt.redirect if self._attempt else ""
            if redirect and self.coordinators.lead(redirect):
                continue
            if final:
                raise StartError(reason)
            reasons[self.address] = reason
            waits = self.coordinators.turn()
            left = deadline - time.monotonic()
            if left <= (delay if waits else 0.0):
                told = " ".join(dict.fromkeys(reasons.values()))
                raise StartError(f"{told} Gave up after {time.monotonic() - started:.0f} s.")
            if not waits:
                continue
            if not warned:
                log.warning("%s Trying for another %.0f s.", reason, left)
                warned = True
            with self._changed:
                self._changed.wait(delay)
            delay = min(2 * delay, LAST_RETRY_SECONDS)

    def _try(self, request: membership_pb2.JoinRequest, deadline: float, started: float) -> tuple[str, bool]:
        """One attempt. Sets `world`; or returns why there is none, and whether another attempt would end alike."""
        connection = self.coordinators.current
        self.metadata = (*connection.metadata(), *tracing.headers())
        attempt = _Attempt(self, request)
        self._attempt = attempt
        try:
            attempt.start()
        except BaseException:
            self._attempt = None  # it has no stream that close() could end, which must not hide this error
            raise
        with self._changed:
            self._changed.wait_for(attempt.is_decided, max(0.0, deadline - time.monotonic()))
            if attempt.world is not None:
                connection.credential.confirm()
                self.coordinators.reached()
                self.world = World.from_message(attempt.world, request.member_id)
                self.addresses = resolve(connection.host, connection.port)
                return "", False
            ended, reason = attempt.ended, attempt.reason
        if attempt.final and not connection.credential.is_outdated():
            return reason, True
        if not attempt.heard:
            seconds = min(PROBE_SECONDS, max(0.2, deadline - time.monotonic()))
            finding = probe(connection.host, connection.port, seconds, connection.tls)
            if ended or not finding.speaks_grpc:
                reason = f"The coordinator at {connection.address} {finding.words}. {finding.remedy}"
                ended = True
            if finding.hopeless:
                return reason, True
        if not ended:
            raise StartError(self._too_late(request, time.monotonic() - started))
        return reason, False

    def _too_late(self, request: membership_pb2.JoinRequest, seconds: float) -> str:
        state, at = self._progress.strip().rstrip("."), self._progress_at or self.address
        state = state or "it did not say what it waits for"
        return (
            f"The world of job {request.job!r} was not complete after {seconds:.0f} s; the coordinator at "
            f"{at} says: {state}. Start the missing processes with the same job, size and coordinator, or "
            "give them more time with HOROVOD_START_TIMEOUT."
        )

    # -- being a member ----------------------------------------------------------------------------------------------
    def attach(self, engine: Engine) -> None:
        """From now on the engine hears of members that are gone, also of those that went before this call."""
        with self._changed:
            self._engine = engine
            gone = list(self._gone)
            removed = self._attempt.removed if self._attempt else ""
        for event in gone:
            _tell(engine, event)
        if removed:
            engine.abort(removed)

    def check(self, wait_seconds: float = 0.0) -> None:
        """Raises MemberLostError when a member is gone that others still need; for the time between world and engine.

        A member leaves in order only after all others are connected to it, unless it says NOT_CONNECTED.

        wait_seconds: how long to wait for such news; over at once when none can come any more.
        """

        def gone() -> str:
            needed = (event for event in self._gone if not event.orderly or NOT_CONNECTED in event.sentence)
            return next((event.sentence for event in needed), "") or (self._attempt.removed if self._attempt else "")

        with self._changed:
            self._changed.wait_for(lambda: gone() or self.lost, wait_seconds)
            if sentence := gone():
                never_stood = any(event.never_stood for event in self._gone)
                raise WorldNeverStoodError(sentence) if never_stood else MemberLostError(sentence)

    def link(self, seconds: float) -> Link | None:
        """The connection to the coordinator to which this member is attached; None if it is to none for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_attached() or self._closing or self.lost, seconds)
            if not self._is_attached() or self._closing:
                return None
            current = self.coordinators.current
            return Link(current.channel, self.metadata, current.address, self._term)

    @property
    def trouble(self) -> str:
        """Why there is no link, as the end of a sentence."""
        if unreachable := self.coordinators.unreachable:
            return f"the coordinator at {unreachable}, which serves this job, is unreachable from here"
        return f"the coordinator at {self.address} is unreachable"

    def _is_attached(self) -> bool:
        return self._attempt is not None and self._attempt.attached

    def report_lost(self, rank: int, process_ended: bool) -> None:
        """The data plane found that a peer is lost: its process ended, or else a connection to it broke."""
        with self._changed:
            if self.world is None or rank in self._reports:
                return
            report = membership_pb2.PeerLost(epoch=self.world.epoch, rank=rank, process_ended=process_ended)
            self._reports[rank] = report
            if self._attempt is not None and self._attempt.attached:
                self._attempt.stream.send(peer_lost=report)

    # -- called by the attempt's thread --------------------------------------------------------------------------------
    def on_event(self, attempt: _Attempt, event: membership_pb2.MembershipEvent) -> None:
        abort = ""
        news: list[membership_pb2.MemberGone] = []
        with self._changed:
            kind = event.WhichOneof("event")
            attempt.heard = True
            self.coordinators.answered()
            _make_printable(event)
            if 0 < event.term < self._term:
                log.info(
                    "The coordinator at %s was replaced by another one and does not know it yet: it speaks for term "
                    "%d, but this process has heard of term %d.",
                    self.address,
                    event.term,
                    self._term,
                )
                attempt.stream.cancel()
                return
            if attempt.world is not None or kind == "world":
                self._term = max(self._term, event.term)
            if kind == "progress":
                self._progress, self._progress_at = event.progress.sentence, self.address
                log.info("Waiting for the world: %s", self._progress)
            elif kind == "world":
                if attempt.world is None:
                    attempt.world = event.world
                    attempt.attached = True
                    attempt.stream.send(received=membership_pb2.WorldReceived(epoch=event.world.epoch))
                elif event.world.epoch != attempt.world.epoch:
                    abort = f"The coordinator at {self.address} started epoch {event.world.epoch} without this process."
            elif kind == "refused":
                sentence = event.refused.sentence or "no reason was given."
                sentence = f"The coordinator at {self.address} refused this process: {sentence}"
                if event.refused.reason == membership_pb2.REFUSAL_REASON_UNKNOWN_WORLD:
                    attempt.fail(sentence)
                else:
                    abort = sentence
            elif kind == "redirect":
                attempt.redirect = event.redirect.address
            elif kind == "gone":
                news = self._new([event.gone], attempt)
            elif kind == "attached":
                news = self._new(event.attached.gone, attempt)
                attempt.attached = True
                self.coordinators.reached()
                for report in self._reports.values():
                    attempt.stream.send(peer_lost=report)
                if attempt.goodbye is not None:
                    attempt.say_goodbye()
            elif kind == "challenge" and attempt.world is not None:
                request = attempt.attach_request()
                attempt.stream.send(proof=attach_proof(attempt.world.secret, request, event.challenge.nonce))
            elif kind == "probe" and (alive := lives(event.probe.pid, event.probe.start_time)) is not None:
                testimony = membership_pb2.Testimony(epoch=event.probe.epoch, rank=event.probe.rank, lives=alive)
                attempt.stream.send(testimony=testimony)
            if abort:
                attempt.fail(abort)
                attempt.removed = abort if attempt.world is not None else ""
            engine = self._engine
            self._changed.notify_all()
        if engine is not None:
            for gone in news:
                _tell(engine, gone)
            if abort:
                engine.abort(abort)

    def _new(self, all_gone: Iterable[membership_pb2.MemberGone], attempt: _Attempt) -> list[membership_pb2.MemberGone]:
        """The members of this epoch that are gone and were not heard of before."""
        news = []
        for gone in all_gone:
            stale = attempt.world is None or gone.epoch != attempt.world.epoch
            if stale or self._known.get(gone.rank) in (False, gone.orderly):  # a loss is worse than a goodbye
                continue
            gone.sentence = gone.sentence or f"Rank {gone.rank} is gone, without a reason."
            self._known[gone.rank] = gone.orderly
            news.append(gone)
        self._gone += news
        return news

    def on_end(self, attempt: _Attempt, code: grpc.StatusCode, details: str) -> None:
        """The attempt's stream is over."""
        with self._changed:
            if attempt.goodbye is not None and attempt.attached and attempt.stream.in_order:
                attempt.final = True  # the coordinator has it
            attempt.attached = False
            if not attempt.final:
                attempt.reason = explain(code, details, self.address, "authorization" in dict(self.metadata))
                # A member keeps trying: a status of some proxy on the way says nothing about the world.
                attempt.final = attempt.world is None and not waiting_helps(code)
            attempt.ended = True
            if attempt.world is not None and not self._closing:
                log.info("The membership stream to the coordinator at %s ended: %s", self.address, attempt.reason)
                if attempt.final:
                    self.lost = attempt.reason
                    if not attempt.removed:
                        log.warning("%s Operations that every rank knows go on.", attempt.reason)
            self._changed.notify_all()

    def stay(self, attempt: _Attempt) -> None:
        """Opens one stream after another, until the world is over for this process or its goodbye is said.

        A session that is closed while its stream is away has no time to lose: each coordinator is tried once more, at
        once. Without a goodbye the member would count as lost.
        """
        broken_at, delay, warned = time.monotonic(), FIRST_RETRY_SECONDS, False
        rounds_left = GOODBYE_ROUNDS
        while True:
            with self._changed:
                if attempt.final:
                    return
                waits = not self._go_on(attempt)
                if waits and attempt.goodbye is None:
                    # Spread, so that the members of a large world do not come all at once.
                    self._changed.wait_for(lambda: self._closing, delay * random.uniform(0.5, 1.0))
                elif waits:
                    rounds_left -= 1
                if rounds_left == 0 or attempt.final:
                    return
            began = time.monotonic()
            end = self._come_back(attempt)
            was_attached = attempt.attached
            self.on_end(attempt, *end)
            lasted = time.monotonic() - began > LAST_RETRY_SECONDS
            if waits:
                delay = min(2 * delay, LAST_RETRY_SECONDS)
            if was_attached and lasted:
                delay = FIRST_RETRY_SECONDS
            if was_attached:
                broken_at, warned = time.monotonic(), False
            elif not warned and not attempt.final and time.monotonic() - broken_at > self._grace_seconds:
                warned = True
                log.warning(
                    "The coordinator at %s can't be reached: %s Operations that every rank knows go on; this process "
                    "keeps trying to come back.",
                    self.address,
                    attempt.reason,
                )

    def _go_on(self, attempt: _Attempt) -> bool:
        """To the coordinator that the last one named, or the next one. False when it is time to wait first."""
        redirect, attempt.redirect = attempt.redirect, ""
        if redirect and self.coordinators.lead(redirect):
            return True
        return not self.coordinators.turn()

    def _come_back(self, attempt: _Attempt) -> tuple[grpc.StatusCode, str]:
        """Runs one more stream of the member until it ends; returns how it ended."""
        try:
            metadata = self.coordinators.current.metadata()
        except StartError as error:  # another user's process listens there, which must not see the token
            return grpc.StatusCode.UNAVAILABLE, str(error)
        addresses = resolve(self.coordinators.current.host, self.coordinators.current.port)
        with self._changed:
            if attempt.final:
                return grpc.StatusCode.CANCELLED, "the session is closed"
            self.metadata = metadata
            self.addresses |= addresses
            unreachable = self.coordinators.unreachable
            first = membership_pb2.MemberMessage(attach=attempt.attach_request(), unreachable=unreachable)
            try:
                attempt.stream = MembershipStream(self, first)
            except ValueError as error:  # the channel is closed
                return grpc.StatusCode.CANCELLED, str(error)
        return attempt.stream.read(lambda event: self.on_event(attempt, event))

    # -- leaving -----------------------------------------------------------------------------------------------------
    def close(self, reason: str = "") -> None:
        """Leaves in order when there is a world to leave, and ends the channel. Idempotent; never raises."""
        with self._changed:
            self._closing = True
            if self._attempt is not None:
                self._attempt.leave(reason)
            self._changed.notify_all()
        if self._attempt is not None:
            self._attempt.wait_until_left(self._changed)
        with self._changed:
            self.coordinators.close()
        if self._attempt is not None:
            self._attempt.thread.join(LEAVE_SECONDS)
        self.grpc_threads.join(LEAVE_SECONDS)
        self._attempt = None  # it refers back to this object, and what belongs to the world is to go away now
        self._engine = None


class _Attempt:
    """One member id: an attempt to join and, when it succeeds, the membership, over one stream after another."""

    def __init__(self, session: Session, request: membership_pb2.JoinRequest) -> None:
        self._session = session
        self._request = request
        self.world: membership_pb2.World | None = None
        self.attached = False  # the stream stands, and the coordinator knows that it is this member's
        self.heard = False  # it spoke to us, so it is a coordinator
        self.ended = False  # the stream is over
        self.final = False  # another attempt would end in the same way, or nothing is left to be said
        self.goodbye: membership_pb2.Leave | None = None  # for the stream that stands, or the next one
        self.redirect = ""  # where the coordinator sends it
        self.removed = ""  # why this process is no member of its world any more
        self.reason = ""
        self.stream: MembershipStream
        self.thread = threading.Thread(target=self._run, name="horovod-membership", daemon=True)

    def start(self) -> None:
        unreachable = self._session.coordinators.unreachable
        first = membership_pb2.MemberMessage(join=self._request, unreachable=unreachable)
        self.stream = MembershipStream(self._session, first)
        self.thread.start()

    def is_decided(self) -> bool:
        return self.world is not None or self.ended

    def fail(self, sentence: str) -> None:
        self.reason, self.final, self.ended = sentence, True, True

    def attach_request(self) -> membership_pb2.Attach:
        assert self.world is not None
        ranks = (rank for rank, member in enumerate(self.world.members) if member.member_id == self._request.member_id)
        return membership_pb2.Attach(
            protocol_version=PROTOCOL_VERSION,
            job=self._request.job,
            epoch=self.world.epoch,
            member_id=self._request.member_id,
            rank=next(ranks, 0),
            pid=self._request.pid,
            process=self._request.process,
        )

    def leave(self, reason: str) -> None:
        """With the session's lock."""
        if self.world is None or self.final:
            self.final = True
            return
        self.goodbye = membership_pb2.Leave(epoch=self.world.epoch, reason=reason)
        if self.attached:
            self.say_goodbye()

    def say_goodbye(self) -> None:
        self.stream.send(leave=self.goodbye)
        self.stream.end()

    def wait_until_left(self, lock: threading.Condition) -> None:
        """Without the lock."""
        if self.goodbye is not None:
            self.thread.join(LEAVE_SECONDS)
        with lock:
            self.final = True  # no other stream from here on
        self.stream.cancel()

    def _run(self) -> None:
        session = self._session
        session.on_end(self, *self.stream.read(lambda event: session.on_event(self, event)))
        if self.world is not None:
            session.stay(self)


def _make_printable(event: membership_pb2.MembershipEvent) -> None:
    """Makes sentences safe to print: they quote what other members sent."""
    kind = event.WhichOneof("event")
    parts = list(event.attached.gone) if kind == "attached" else []
    if kind in ("progress", "refused", "gone"):
        parts.append(getattr(event, kind))
    for part in parts:
        part.sentence = printable(part.sentence)


def _tell(engine: Engine, gone: membership_pb2.MemberGone) -> None:
    with contextlib.suppress(Exception):  # the engine may be closing, and then it does not matter any more
        if gone.orderly:
            engine.peer_left(gone.rank, gone.sentence)
        else:
            engine.abort(gone.sentence)
