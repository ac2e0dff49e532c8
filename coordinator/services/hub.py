"""The state that the servicers share: the core's decisions on one side, open streams and the store on the other.

Everything here runs in one event loop, so that a core decision and its effects are one step. Only the store is
awaited.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from horovod.coordinator.core.budget import TooMuchError
from horovod.coordinator.core.clock import JudgeClock
from horovod.coordinator.core.deadlock import USUAL_TIMES, DeadlockTimes
from horovod.coordinator.core.effects import Close, Effect, Ended, Form, Gone, Send, TellLater
from horovod.coordinator.core.formation import Formation
from horovod.coordinator.core.membership import Membership
from horovod.coordinator.core.negotiation import Negotiation
from horovod.coordinator.core.overview import JobOverview
from horovod.coordinator.core.stall import StallWatch, times_of
from horovod.coordinator.limits import Limits
from horovod.coordinator.metrics import CoordinatorMetrics
from horovod.coordinator.store import Store, StoreError
from horovod.coordinator.store.jobs import next_epoch, publish_world, retract_world
from horovod.protos.v1 import membership_pb2, negotiation_pb2
from horovod.telemetry.logs import about

from .outbox import Outbox
from .processes import ProcessWatch
from .session import DecisionsOutbox, NegotiationSession

STORE_RETRY_S = 0.5
MOST_TICKS_LATE = 5  # a tick that comes later than this means that the coordinator itself was stopped

EventOutbox = Outbox[membership_pb2.MembershipEvent]

_log = logging.getLogger(__name__)


class Hub:
    def __init__(
        self,
        store: Store,
        *,
        limits: Limits = Limits(),  # noqa: B008 - a frozen value
        deadlock: DeadlockTimes = USUAL_TIMES,
        told_level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
        secret: Callable[[], bytes] = lambda: secrets.token_bytes(32),
    ) -> None:
        """told_level: at which the log repeats what rank 0 shows to the user."""
        self._store = store
        self._limits = limits
        self._told_level = told_level
        self._true_clock = clock
        self._judge = JudgeClock(clock(), limits.tick_s, MOST_TICKS_LATE * limits.tick_s)
        self._secret = secret
        self._membership = Membership(limits.reattach_grace_s)
        self._processes = ProcessWatch(self._process_ended)
        self._deadlock = deadlock
        self._events: dict[str, EventOutbox] = {}  # by member id; of members that are away none
        self._sessions: dict[str, NegotiationSession] = {}  # by job
        self._tasks: set[asyncio.Task[None]] = set()
        self.metrics = CoordinatorMetrics(self.overview)
        self._empty = asyncio.Event()  # no world has a member
        self._empty.set()
        self._stopping = False

    def _clock(self) -> float:
        """The time that counts for every limit (core/clock.py)."""
        return self._judge.read(self._true_clock())

    # -- membership --------------------------------------------------------------------------------------------------

    def join(self, request: membership_pb2.JoinRequest, events: EventOutbox) -> str:
        """Why the request is refused; "" when it is not and `events` gets what happens from now on."""
        refusal, effects = self._membership.join(request, self._clock())
        if refusal:
            self.metrics.refusals.add(1, "join")
            _log.info("Refused: %s", refusal, extra=about(request.job))
        else:
            self._events[request.member_id] = events
            self._processes.watch(request.member_id, request.pid, request.process)
        self._carry_out(effects)
        return refusal

    def challenge(self, attach: membership_pb2.Attach) -> membership_pb2.Refused | bytes:
        """What a member that wants to come back has to answer; or why it can't come back at all."""
        return self._membership.may_attach(attach) or self._secret()

    def attach(
        self, attach: membership_pb2.Attach, nonce: bytes, proof: bytes, events: EventOutbox
    ) -> membership_pb2.Refused | None:
        """The member is back, and `events` gets what happens from now on; or why not."""
        refused, effects = self._membership.attach(attach, nonce, proof, self._clock())
        told = about(attach.job, attach.epoch, attach.rank)
        if refused is not None:
            self.metrics.refusals.add(1, "attach")
            _log.info("Refused: %s", refused.sentence, extra=told)
            return refused
        _log.info("Rank %d of job %r is attached again.", attach.rank, attach.job, extra=told)
        if older := self._events.get(attach.member_id):
            older.fail(grpc.StatusCode.ABORTED, f"Rank {attach.rank} opened a newer stream.")
        self._events[attach.member_id] = events
        self._processes.watch(attach.member_id, attach.pid, attach.process)
        self._carry_out(effects)
        return None

    def received(self, member_id: str, epoch: int) -> None:
        self._membership.received(member_id, epoch)

    def peer_lost(self, member_id: str, report: membership_pb2.PeerLost) -> None:
        self._carry_out(self._membership.peer_lost(member_id, report, self._clock()))

    def testified(self, member_id: str, testimony: membership_pb2.Testimony) -> None:
        self._carry_out(self._membership.testified(member_id, testimony, self._clock()))

    def leave(self, member_id: str, reason: str) -> None:
        self._carry_out(self._membership.leave(member_id, reason, self._clock()))

    def lost(self, member_id: str, cause: str) -> None:
        self._carry_out(self._membership.lost(member_id, cause, self._clock()))

    def disconnected(self, member_id: str, events: EventOutbox) -> None:
        """A stream of the member is over. Nothing happens when it had said goodbye or has another stream."""
        if self._events.get(member_id) is events:
            del self._events[member_id]
            if not self._stopping:
                self._carry_out(self._membership.disconnected(member_id, self._clock()))

    def _process_ended(self, member_id: str, cause: str) -> None:
        self._carry_out(self._membership.process_ended(member_id, cause, self._clock()))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if stream := self._events.get(effect.member_id):
                    stream.put(effect.event)
            elif isinstance(effect, Close):
                self._processes.forget(effect.member_id)
                if closed := self._events.pop(effect.member_id, None):
                    closed.close()
            elif isinstance(effect, Form):
                self._start(self._form(effect.formation))
            elif isinstance(effect, TellLater):
                asyncio.get_running_loop().call_later(effect.delay_s, self._tell_progress, effect.job)
            elif isinstance(effect, Gone):
                self._rank_gone(effect)
            else:
                self._world_ended(effect)

    def _tell_progress(self, job: str) -> None:
        if not self._stopping:
            self._carry_out(self._membership.tell_progress(job, self._clock()))

    async def _form(self, formation: Formation) -> None:
        """Takes the next epoch from the store, writes the world there, and tells the members."""
        while self._membership.is_forming(formation):
            try:
                epoch = await next_epoch(self._store, formation.job)
                secret = self._secret()
                entry = await publish_world(self._store, formation.world(epoch, secret))
            except StoreError as error:
                _log.warning("Job %r can't form its world yet: %s", formation.job, error, extra=about(formation.job))
                await asyncio.sleep(STORE_RETRY_S)
                continue
            if entry is None:
                continue  # somebody else published a later epoch; take the one after it
            effects = self._membership.formed(formation, epoch, secret)
            if not effects:  # a member went away meanwhile
                await retract_world(self._store, formation.job, entry.revision)
                return
            if old := self._sessions.pop(formation.job, None):
                old.end(f"Epoch {old.epoch} of job {old.job!r} is over.")
            size = len(formation.places)
            times, ignored = times_of(next(iter(formation.requests.values())).options)
            self._sessions[formation.job] = NegotiationSession(
                formation.job,
                epoch,
                Negotiation(epoch, size, deadlock=self._deadlock),
                entry.revision,
                StallWatch(times),
                ignored,
                self._told_level,
                metrics=self.metrics,
            )
            self._empty.clear()
            self.metrics.worlds_formed.add(1, formation.job)
            told = about(formation.job, epoch)
            _log.info("Job %r: epoch %d has %d member(s).", formation.job, epoch, size, extra=told)
            self._carry_out(effects)

    def _rank_gone(self, gone: Gone) -> None:
        _log.info("%s", gone.sentence, extra=about(gone.job, gone.epoch, gone.rank))
        if not gone.orderly:
            self.metrics.losses.add(1, gone.job)
        session = self._sessions.get(gone.job)
        if session is None or session.epoch != gone.epoch:
            return
        if stream := session.streams.pop(gone.rank, None):
            stream.fail(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"Rank {gone.rank} is no longer part of epoch {gone.epoch} of job {gone.job!r}.",
            )
        session.reports.pop(gone.rank, None)
        session.send(session.negotiation.forget(gone.rank))

    def _world_ended(self, ended: Ended) -> None:
        session = self._sessions.get(ended.job)
        if session is not None and session.epoch == ended.epoch:
            del self._sessions[ended.job]
            if not self._sessions:
                self._empty.set()
            session.end(f"Epoch {session.epoch} of job {session.job!r} is over.")
            self._start(retract_world(self._store, session.job, session.store_revision))

    # -- negotiation -------------------------------------------------------------------------------------------------

    def open_session(
        self, message: negotiation_pb2.NegotiationMessage, decisions: DecisionsOutbox
    ) -> NegotiationSession | str:
        """Admits a negotiation stream by its first message; or the sentence why not."""
        hello = message.hello
        sentence = self._membership.stranger(hello.job, message.epoch, hello.member_id, hello.rank)
        session = self._sessions.get(hello.job)
        if sentence or session is None:
            return sentence or f"Epoch {message.epoch} of job {hello.job!r} is over."
        if old := session.streams.get(hello.rank):
            old.fail(grpc.StatusCode.ABORTED, f"Rank {hello.rank} opened a newer stream.")
        session.streams[hello.rank] = decisions
        if session.shutdown:
            session.tell_shutdown(hello.rank)
        if hello.rank == 0 and session.ignored:
            session.warn(session.ignored)
            session.ignored = ""
        return session

    def negotiate(self, session: NegotiationSession, rank: int, message: negotiation_pb2.NegotiationMessage) -> None:
        """May raise TooMuchError or ContradictionError."""
        resumed = message.HasField("hello") and rank in session.seen
        session.seen.add(rank)
        if message.HasField("report"):
            session.reports[rank] = message.report
        self.metrics.announcements.add(len(message.announce), session.job)
        try:
            session.send(session.negotiation.receive(rank, message, self._clock(), resumed))
        except TooMuchError as error:
            session.send(error.answers)
            raise

    def close_session(self, session: NegotiationSession, rank: int, decisions: DecisionsOutbox) -> None:
        """The stream is over; its member may come back with another one."""
        if session.streams.get(rank) is decisions:
            del session.streams[rank]

    # -- life --------------------------------------------------------------------------------------------------------

    def overview(self) -> list[JobOverview]:
        """All jobs as they are now. May be called from other threads."""
        return self._membership.overview({session.job: session.reports for session in list(self._sessions.values())})

    async def watch_clock(self) -> None:
        """Finds members and operations that are overdue, for ever."""
        while True:
            await asyncio.sleep(self._limits.tick_s)
            if self._judge.tick(self._true_clock()):
                _log.warning("This coordinator was stopped for a while; its limits begin anew.")
                self._membership.restart_limits(self._clock())
                for session in self._sessions.values():
                    session.negotiation.restart_limits(self._clock())
            for job in self._membership.jobs():
                self._guarded(job, self._look_at_members, job)
            for job, session in list(self._sessions.items()):
                self._guarded(job, session.watch_stalls, self._clock())

    def _look_at_members(self, job: str) -> None:
        vouched = {member_id for member_id in self._membership.troubled(job) if self._processes.lives(member_id)}
        self._carry_out(self._membership.tick(job, self._clock(), vouched))

    def _guarded(self, job: str, look: Callable[..., None], *arguments: Any) -> None:
        """An error in one job must not end the watch over the others."""
        try:
            look(*arguments)
        except Exception:
            _log.exception("A bug in the coordinator: its watch over job %r failed.", job)

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until no world has a member; False when some has after that time."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ends all streams in words. What members do next is theirs to decide; the store keeps their world."""
        self._stopping = True
        self._processes.close()
        for events in self._events.values():
            events.fail(grpc.StatusCode.UNAVAILABLE, "The coordinator is stopping.")
        for session in self._sessions.values():
            for decisions in session.streams.values():
                decisions.fail(grpc.StatusCode.UNAVAILABLE, "The coordinator is stopping.")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("Work on the store failed: %s", error, exc_info=error)
