"""This process as a member: one member id, from its request to join until it leaves.

It begins as an attempt to join (session.py). Once the coordinator has sent a world, the member hears of other members
that are gone, reports lost peers, and leaves with a goodbye, over one stream after another
(membership_stream.py). Nothing is sent to show that this process lives: gRPC's keepalive does that without Python.

Coordinators that take over from each other do so in rising terms. Who has heard of a term believes no earlier one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import grpc

from horovod.base.errors import WorldCode, code_of, coded, without_code
from horovod.base.proofs import attach_proof
from horovod.base.protocol import PROTOCOL_VERSION, __version__
from horovod.base.words import plural, printable
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.channel import explain, waiting_helps
from horovod.worker.runtime.departures import Departures, tell
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.membership_stream import MembershipStream, MembershipStreams, stay
from horovod.worker.runtime.negotiator import CoordinatorLink
from horovod.worker.runtime.witness import lives
from horovod.worker.runtime.world import OnWorldChange, WorldChange, ignore_changes

if TYPE_CHECKING:
    from horovod._core import Engine

log = logging.getLogger(__name__)

# Seconds for a stream that is away to come back, and for the coordinator to end it once it has the leave.
LEAVE_SECONDS = 2.0


class LocalMember:
    """`start` first; once a world stands also `attach`; at last `close` and `let_go`. A member id is not used twice.

    Its thread, `horovod-membership`, reads the streams: it calls `on_event` and `on_end`, and opens every stream but
    the first. All other methods are called by other threads.
    """

    def __init__(
        self,
        streams: MembershipStreams,
        request: membership_pb2.JoinRequest,
        grace_seconds: float,
        on_change: OnWorldChange = ignore_changes,
    ) -> None:
        self._on_change = on_change
        self.streams = streams
        self.grace_seconds = grace_seconds
        self._request = request
        self._thread = threading.Thread(target=self._run, name="horovod-membership", daemon=True)
        # Guards all fields below and, once a world stands, `streams` with its coordinators; notified when one of them
        # has changed. The engine is called without it.
        self.changed = threading.Condition()
        self.stream: MembershipStream
        self.world: membership_pb2.World | None = None
        self.attached = False  # the stream stands, and the coordinator knows that it is this member's
        self.heard = False  # the other side spoke to us, so it is a coordinator
        self.ended = False  # the stream is over
        self.final = False  # another attempt would end in the same way, or nothing is left to be said
        self.reason = ""  # why the stream is over
        self.redirect = ""  # the address to which the coordinator redirects this member; "" for none
        self.is_done = False  # the job has done its work without this process
        self.is_state_lost = False  # what the job had committed is lost
        self.progress: tuple[str, str] | None = None  # what a coordinator waits for, and its address
        self.parked = False  # it waits beside a world that runs and will take it in
        self.was_parked = False
        self.goodbye: membership_pb2.Leave | None = None  # the goodbye for the stream that stands, or for the next one
        self.closing = False
        self._stays = False  # the goodbye leaves the stream open
        self.lost = ""  # why this process is no member any more, as a sentence; empty while it is or may be again
        self._removed = ""  # why the coordinator took it out of its world
        self._term = 0  # the highest term that was heard of
        self._engine: Engine | None = None
        self._departures = Departures()
        self._reports: dict[int, membership_pb2.PeerLost] = {}  # rank -> its loss; sent on every new stream
        # Rank -> the report that it can't be reached; sent on every new stream.
        self._unconnected: dict[int, membership_pb2.Unconnected] = {}
        self._leaving: membership_pb2.Leaving | None = None  # sent on every new stream
        self._work: membership_pb2.Work | None = None  # sent on every new stream
        self._is_noted = True  # whether the coordinator has taken note of `_work`

    # -- called by other threads ---------------------------------------------------------------------------------------
    def start(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Asks to join, over its first stream."""
        self.stream = self.streams.open(metadata, join=self._request)
        self._thread.start()

    def is_decided(self) -> bool:
        """Whether the attempt to join is over. With the lock."""
        return self.world is not None or self.ended

    def attach(self, engine: Engine) -> None:
        """From now on the engine hears of members that are gone, also of those that went before this call."""
        with self.changed:
            self._engine = engine
            all_gone = list(self._departures.all)
            removed = self._removed
        for gone in all_gone:
            tell(engine, gone)
        if removed:
            engine.abort(removed)

    def check(self, wait_seconds: float = 0.0) -> None:
        """Raises MemberLostError when a member is gone that others still need, and StartError when this one can't be in
        a world with others; for the time between world and engine.

        wait_seconds: how long to wait for such news; over at once when none can come any more.
        """

        def gone() -> str:
            return self._removed or self._departures.needed()

        with self.changed:
            self.changed.wait_for(lambda: gone() or self.lost, wait_seconds)
            if sentence := gone():
                if code_of(self._removed) is WorldCode.UNREACHABLE_PEER:
                    raise StartError(sentence)  # the next world would not have connections either
                raise self._departures.error(sentence)

    def link(self, seconds: float) -> CoordinatorLink | None:
        """The connection to the coordinator to which this member is attached; None if it is to none for so long."""
        with self.changed:
            self.changed.wait_for(lambda: self.attached or self.closing or self.lost, seconds)
            if not self.attached or self.closing:
                return None
            current = self.streams.coordinators.current
            return CoordinatorLink(current.channel, self.streams.metadata, current.address, self._term)

    def is_told_why(self, seconds: float) -> bool:
        """As `negotiator.Attached.is_told_why`."""

        def why() -> str:
            return self._removed or self._departures.needed()

        with self.changed:
            self.changed.wait_for(lambda: why() or self.lost or self.closing, seconds)
            return bool(why())

    @property
    def trouble(self) -> str:
        """Why there is no link, as the end of a sentence."""
        if unreachable := self.streams.coordinators.unreachable:
            return f"the coordinator at {unreachable}, which serves this job, is unreachable from here"
        return f"the coordinator at {self.streams.address} is unreachable"

    def report_lost(self, rank: int, process_ended: bool) -> None:
        """The data plane found that a peer is lost: its process ended, or else a connection to it broke."""
        with self.changed:
            if self.world is None or rank in self._reports:
                return
            report = membership_pb2.PeerLost(epoch=self.world.epoch, rank=rank, process_ended=process_ended)
            self._reports[rank] = report
            if self.attached:
                self.stream.send(peer_lost=report)

    def report_unconnected(self, tried: Mapping[int, str]) -> None:
        """No address of these ranks takes a connection. tried: what came of the attempts, by rank."""
        with self.changed:
            if self.world is None or not (news := sorted(tried.keys() - self._unconnected.keys())):
                return
            epoch, told = self.world.epoch, tried[news[0]]
            report = membership_pb2.Unconnected(epoch=epoch, ranks=news, tried=told)
            self._unconnected.update(dict.fromkeys(news, report))
            if self.attached:
                self.stream.send(unconnected=report)

    @property
    def is_elastic(self) -> bool:
        """Whether its world is one of an elastic job."""
        return self.world is not None and self.world.HasField("sizes")

    @property
    def has_commits(self) -> bool:
        """Whether the state that its world has begun with holds commits."""
        return self.world is not None and self.world.has_commits

    def say_leaving(self, reason: str) -> None:
        """Says that this member leaves for good at the next commit. Idempotent."""
        with self.changed:
            if self.world is None or self._leaving is not None:
                return
            self._leaving = membership_pb2.Leaving(epoch=self.world.epoch, reason=reason)
            if self.attached:
                self.stream.send(leaving=self._leaving)

    def say_work(self, *, committed: bool = False, done: bool | None = None, wait_seconds: float = 0.0) -> str:
        """Says what this member of an elastic world has done of the job's work, and waits until the coordinator's store
        has it: for so long at most. While the coordinator is away it only waits with the news that the work is done,
        for the grace that a member has: without it, whoever comes later would find the work lost. Returns why this
        process is no member of that world any more; "" while it is.
        """
        with self.changed:
            if self.world is None or not self.world.hears_of_work:
                return self._removed
            work = self._work or membership_pb2.Work(epoch=self.world.epoch)
            work.committed = work.committed or committed
            if done is not None:
                work.done = done
            self._work, self._is_noted = work, False
            if self.attached:
                self.stream.send(work=work)
            self.changed.wait_for(lambda: self._is_noted or not self.attached or self.closing, wait_seconds)
            if done and not (self._is_noted or self.attached):  # each later stream tells it
                self.changed.wait_for(lambda: self._is_noted or self.final or self.closing, self.grace_seconds)
            return self._removed

    def report_stopped(self, rank: int) -> None:
        """A process of this host, that of this rank, has been stopped for the limit of an elastic job."""
        with self.changed:
            if self.world is not None and self.attached and not self.closing:
                report = membership_pb2.Testimony(epoch=self.world.epoch, rank=rank, lives=True, stopped=True)
                self.stream.send(testimony=report)

    def close(self, reason: str, *, returns: bool = False, failed: bool = False, stays: bool = False) -> bool:
        """Leaves in order when there is a world to leave. Idempotent; never raises.

        returns: this process joins again at once. failed: its program has ended with an error. stays: where it is
        attached, the stream stays open until `let_go`, or until the coordinator ends it; whether it does is returned.
        """
        with self.changed:
            self.closing = True
            self._stays = stays and self.attached and not self.final
            if self.world is None or self.final:
                self.final = True
            else:
                self.goodbye = membership_pb2.Leave(
                    epoch=self.world.epoch, reason=reason, returns=returns, failed=failed
                )
                if self.attached:
                    self._say_goodbye()
            self.changed.notify_all()
        self._engine = None  # objects of the world are to go away now
        if self.goodbye is not None and not self._stays:
            self._thread.join(LEAVE_SECONDS)
        return self._stays

    def let_go(self) -> None:
        """Ends the channel, after `close`. Idempotent; never raises."""
        with self.changed:
            self.final = True  # no other stream from here on
        self.stream.cancel()
        with self.changed:
            self.streams.coordinators.close()
        self._thread.join(LEAVE_SECONDS)

    # -- called by the thread ------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self.on_end(*self.stream.read(self.on_event))
        if self.world is not None:
            stay(self)

    def on_event(self, event: membership_pb2.MembershipEvent) -> None:
        """The coordinator said something."""
        with self.changed:
            self.heard = True
            self.streams.coordinators.answered()
            _make_printable(event)
            if 0 < event.term < self._term:
                log.info(
                    "The coordinator at %s was replaced by another one and does not know it yet: it speaks for term "
                    "%d, but this process has heard of term %d.",
                    self.streams.address,
                    event.term,
                    self._term,
                )
                self.stream.cancel()
                return
            if self.world is not None or event.HasField("world"):
                self._term = max(self._term, event.term)
            news, removed = self._take(event)
            if removed:
                self._fail(removed)
                # The first reason is what the others are told, too.
                self._removed = (self._removed or removed) if self.world is not None else ""
            engine = self._engine
            self.changed.notify_all()
        if change := _change_in(event):
            try:
                self._on_change(change)
            except Exception:  # raised by a script's own state; this thread has other news to hear
                log.exception("News of processes that come or go could not be passed on.")
        if engine is not None:
            for gone in news:
                tell(engine, gone)
            if removed:
                engine.abort(removed)

    def on_end(self, code: grpc.StatusCode, details: str) -> None:
        """The stream is over."""
        with self.changed:
            if self.goodbye is not None and self.attached and self.stream.in_order:
                self.final = True  # the coordinator has the goodbye
            self.attached = False
            if not self.final:
                with_token = "authorization" in dict(self.streams.metadata)
                self.reason = explain(code, details, self.streams.address, with_token)
                # A member keeps trying: a status of some proxy on the way says nothing about the world.
                self.final = self.world is None and not waiting_helps(code)
            self.ended = True
            if self.world is not None and not self.closing:
                why = without_code(self.reason)
                log.info("The membership stream to the coordinator at %s ended: %s", self.streams.address, why)
                if self.final:
                    self.lost = self.reason
                    if not self._removed:
                        log.warning("%s Operations that every rank has run before continue.", why)
            self.changed.notify_all()

    def attach_request(self) -> membership_pb2.Attach:
        """Which member of which world this process is; for a coordinator that can check it."""
        assert self.world is not None
        ranks = (rank for rank, member in enumerate(self.world.members) if member.member_id == self._request.member_id)
        return membership_pb2.Attach(
            protocol_version=PROTOCOL_VERSION,
            version=__version__,
            job=self._request.job,
            epoch=self.world.epoch,
            member_id=self._request.member_id,
            rank=next(ranks, 0),
            pid=self._request.pid,
            process=self._request.process,
        )

    # -- with the lock -------------------------------------------------------------------------------------------------
    def _take(self, event: membership_pb2.MembershipEvent) -> tuple[Sequence[membership_pb2.MemberGone], str]:
        """Members that are gone, which is news, and why this process can't be a member; "" while it can."""
        match event.WhichOneof("event"):
            case "progress":
                self.progress = (event.progress.sentence, self.streams.address)
                self.parked = event.progress.parked
                self.was_parked = self.was_parked or self.parked
                level = logging.WARNING if event.progress.refused else logging.INFO
                log.log(level, "Waiting for the world: %s", event.progress.sentence)
            case "world":
                return (), self._enter(event.world)
            case "refused":
                return (), self._refuse(event.refused)
            case "unconnectable" if event.unconnectable.epoch == self._epoch:
                return (), event.unconnectable.sentence
            case "redirect":
                self.redirect = event.redirect.address
            case "gone":
                return self._departures.hear([event.gone], self._epoch), ""
            case "attached":
                return self._reattach(event.attached), ""
            case "challenge" if self.world is not None:
                proof = attach_proof(self.world.secret, self.attach_request(), event.challenge.nonce)
                self.stream.send(proof=membership_pb2.Proof(proof=proof))
            case "noted":
                self._is_noted = self._work is None or event.noted.done == self._work.done
            case "probe":
                self._testify(event.probe)
        return (), ""

    @property
    def _epoch(self) -> int | None:
        return None if self.world is None else self.world.epoch

    def _enter(self, world: membership_pb2.World) -> str:
        if self.world is None:
            self.world = world
            self.attached = True
            self.stream.send(received=membership_pb2.WorldReceived(epoch=world.epoch))
            if world.notice and self._request.member_id in [one.member_id for one in world.members[:1]]:
                log.warning("%s", printable(world.notice))
        elif world.epoch != self.world.epoch:
            return coded(
                WorldCode.DECLARED_LOST,
                f"The coordinator at {self.streams.address} started world {world.epoch} without this process.",
            )
        return ""

    def _refuse(self, refused: membership_pb2.Refused) -> str:
        code = code_of(refused.sentence)
        self.is_done, self.is_state_lost = code is WorldCode.JOB_DONE, code is WorldCode.STATE_LOST
        sentence = refused.sentence or "no reason was given."
        sentence = coded(
            code_of(sentence) or WorldCode.COORDINATOR_REFUSED,
            f"The coordinator at {self.streams.address} refused this process: {sentence}",
        )
        if refused.reason != membership_pb2.REFUSAL_REASON_UNKNOWN_WORLD:
            return sentence
        self._fail(sentence)  # the coordinator was restarted: what the ranks agreed goes on without it
        return ""

    def _reattach(self, attached: membership_pb2.Attached) -> Sequence[membership_pb2.MemberGone]:
        self.attached = True
        self.streams.coordinators.reached()
        for report in self._reports.values():
            self.stream.send(peer_lost=report)
        for one in {id(one): one for one in self._unconnected.values()}.values():
            self.stream.send(unconnected=one)
        if self._leaving is not None:
            self.stream.send(leaving=self._leaving)
        if self._work is not None:
            self.stream.send(work=self._work)
        if self.goodbye is not None:
            self._say_goodbye()
        return self._departures.hear(attached.gone, self._epoch)

    def _testify(self, probe: membership_pb2.Probe) -> None:
        """Says whether a process lives that the coordinator misses, where this process can see it."""
        if (alive := lives(probe.pid, probe.start_time)) is not None:
            self.stream.send(testimony=membership_pb2.Testimony(epoch=probe.epoch, rank=probe.rank, lives=alive))

    def _say_goodbye(self) -> None:
        self.stream.send(leave=self.goodbye)
        if not self._stays:
            self.stream.end()

    def _fail(self, sentence: str) -> None:
        self.reason, self.final, self.ended = sentence, True, True


def _change_in(event: membership_pb2.MembershipEvent) -> WorldChange | None:
    """What the event says of the next world; logs it."""
    if event.HasField("newcomers"):
        count = event.newcomers.count
        verb = "waits" if count == 1 else "wait"
        log.info("%s %s to join at the next commit.", plural(count, "further process"), verb)
        return WorldChange(event.newcomers.epoch, newcomers=count)
    if event.HasField("coming"):
        count = event.coming.count
        log.info("%s being started.", f"{plural(count, 'further process')} {'is' if count == 1 else 'are'}")
        return WorldChange(event.coming.epoch, coming=count)
    if event.HasField("leavers"):
        log.info("%s", event.leavers.sentence)
        return WorldChange(event.leavers.epoch, leavers=tuple(event.leavers.ranks))
    return None


def _make_printable(event: membership_pb2.MembershipEvent) -> None:
    """Makes sentences safe to print: they quote what other members sent."""
    kind = event.WhichOneof("event")
    parts = list(event.attached.gone) if kind == "attached" else []
    if kind in ("progress", "refused", "gone", "leavers", "unconnectable"):
        parts.append(getattr(event, kind))
    for part in parts:
        part.sentence = printable(part.sentence)
