"""The state that the servicers share: the core's decisions on one side, open streams and the store on the other.

Everything here runs in one event loop, so that a core decision and its effects are one step. Only the store is
awaited: before a job is served (serving.py), and before anybody is told of a world or of a member that is gone
(worlds.py). So what members know is in the store, and a coordinator that takes a job over (`_restore`) knows no less
than they do.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from horovod.base.errors import ClusterCode, WorldCode, coded
from horovod.base.tasks import Tasks
from horovod.base.telemetry.logs import about
from horovod.coordinator.config import Limits
from horovod.coordinator.core.agreement.budget import TooMuchError
from horovod.coordinator.core.agreement.deadlock import USUAL_TIMES, DeadlockTimes
from horovod.coordinator.core.agreement.deadlock import times_of as deadlock_times_of
from horovod.coordinator.core.agreement.ids import MAX_IDS
from horovod.coordinator.core.agreement.negotiation import STEP, Negotiation
from horovod.coordinator.core.agreement.stall import StallWatch, times_of
from horovod.coordinator.core.ending import Attendance, RankEnded
from horovod.coordinator.core.world.effects import (
    Close,
    Effect,
    Form,
    Gone,
    LookLater,
    Record,
    Send,
    TellLater,
    WorkDone,
    WorldEnded,
)
from horovod.coordinator.core.world.membership import JobOverview, Membership
from horovod.coordinator.core.world.waiting import Formation
from horovod.coordinator.metrics import CoordinatorMetrics
from horovod.coordinator.store import Guard, Store, TooLargeError
from horovod.protos.v1 import agents_pb2, membership_pb2, negotiation_pb2

from .elsewhere import Orphans, Outcomes
from .negotiation_session import DecisionsOutbox, NegotiationSession, epoch_over, newer_stream
from .peers import Peers
from .sending import Outbox
from .serving import LEASE_S, Serving
from .sights import FirstMessage, Sights
from .stories import Stories
from .streams import RefusedError
from .ticks import Ticks
from .worlds import StoredWorlds

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
        peers: Peers | None = None,
        lease_s: float = LEASE_S,
        id_capacity: int = MAX_IDS,
        agent_s: Callable[[str, int], float] = lambda job, rank: 0.0,
        work_done: Callable[[str, Mapping[int, int]], None] = lambda job, slots: None,
        host_goes: Callable[[str, int, int], bool] = lambda job, slot, incarnation: False,
    ) -> None:
        """told_level: at which the log repeats what rank 0 shows to the user. peers: other coordinators of the store.
        lease_s: after which a coordinator that can't reach the store counts as dead. agent_s, host_goes: as in
        `Membership`. work_done: told as the effect WorkDone says.
        """
        self._told_level = told_level
        self._work_done = work_done
        self._ticks = Ticks(clock, limits.tick_s)
        self._clock = self._ticks.now_s  # the time that counts for every limit
        self._secret = secret
        self._membership = Membership(limits.reattach_grace_s, agent_s, host_goes)
        others = peers or Peers()
        self.serving = Serving(
            store, others, restore=self._restore, lost=self._taken_over, cut_off=self._cut_off, lease_s=lease_s
        )
        self.metrics = CoordinatorMetrics(self.overview)
        self.stories = Stories(store, self.metrics, self.serving.guard, self._clock)
        self._worlds = StoredWorlds(store, self._membership, self.serving, secret, self._do, self.stories)
        self.orphans = Orphans(store, self.serving.serves, self.adopt)
        self.outcomes = Outcomes(store, lambda job: self.serving.guard(job) is not None, self.rank_ended)
        self._job_of: dict[str, str] = {}  # member id -> job, of members in _events or in a world
        self._held: dict[str, list[Effect]] = {}  # job -> effects that wait until the store has recorded who is gone
        self._id_capacity = id_capacity
        self.sights = Sights(self._process_ended)
        self._deadlock = deadlock
        self._events: dict[str, EventOutbox] = {}  # member id -> its events; a member that is away has none
        self._sessions: dict[str, NegotiationSession] = {}  # by job
        self._tasks = Tasks(lambda error: _log.error("Work on the store failed: %s", error, exc_info=error))
        self._empty = asyncio.Event()  # set while no world has a member
        self._empty.set()
        self._stopping = False

    # -- membership --------------------------------------------------------------------------------------------------

    async def adopt(self, job: str) -> None:
        """Takes over a job that nobody serves (elsewhere.py). Raises StoreError."""
        await self.serve(job)
        self._do(job, [])  # releases the job if it has no world

    async def serve(self, job: str, unreachable: str = "", joins: bool = False) -> str:
        return await self.serving.serve(job, unreachable, joins)

    def join(self, request: membership_pb2.JoinRequest, events: EventOutbox, peer: str = "") -> str:
        """Why it is refused; "" when it is not and `events` gets what happens. peer: gRPC's name for the other end."""
        refusal, effects = self._membership.join(request, self._clock())
        if refusal:
            self.metrics.refusals.add(1, "join")
            _log.info("Refused: %s", refusal, extra=about(request.job))
        else:
            self._admit(request, events, peer)
            self.stories.came(request.job)
        self._carry_out(request.job, effects)
        return refusal

    def challenge(self, attach: membership_pb2.Attach) -> membership_pb2.Refused | bytes:
        """What a member that wants to come back has to answer; or why it can't come back at all."""
        if (refused := self._membership.may_attach(attach)) is not None:
            self._carry_out(attach.job, [])
        return refused or self._secret()

    def attach(
        self, attach: membership_pb2.Attach, nonce: bytes, proof: bytes, events: EventOutbox, peer: str = ""
    ) -> membership_pb2.Refused | None:
        """The member is back, and `events` gets what happens from now on; or why not. peer: as in `join`."""
        refused, effects = self._membership.attach(attach, nonce, proof, self._clock())
        told = about(attach.job, attach.epoch, attach.rank)
        if refused is not None:
            self.metrics.refusals.add(1, "attach")
            _log.info("Refused: %s", refused.sentence, extra=told)
            return refused
        _log.info("Rank %d of job %r is attached again.", attach.rank, attach.job, extra=told)
        if older := self._events.get(attach.member_id):
            older.fail(grpc.StatusCode.ABORTED, newer_stream(attach.rank))
        self._admit(attach, events, peer)
        self._carry_out(attach.job, effects)
        return None

    def _admit(self, first: FirstMessage, events: EventOutbox, peer: str) -> None:
        self._events[first.member_id] = events
        self._job_of[first.member_id] = first.job
        self.sights.watch(first, peer)

    def received(self, member_id: str, epoch: int) -> None:
        self._membership.received(member_id, epoch)

    def reported(self, member_id: str, message: membership_pb2.MemberMessage) -> None:
        """As `Membership.reported`."""
        self._carry_out_for(member_id, self._membership.reported(member_id, message, self._clock()))

    def testified(self, member_id: str, testimony: membership_pb2.Testimony) -> None:
        if member_id in self._job_of:
            self.sights.answered(member_id, self._clock())
        self._carry_out_for(member_id, self._membership.testified(member_id, testimony, self._clock()))

    def leave(self, member_id: str, reason: str, *, returns: bool = False, failed: bool = False) -> None:
        effects = self._membership.leave(member_id, reason, self._clock(), returns=returns, failed=failed)
        self._carry_out_for(member_id, effects)

    def lost(self, member_id: str, cause: str) -> None:
        self._carry_out_for(member_id, self._membership.lost(member_id, cause, self._clock()))

    def disconnected(self, member_id: str, events: EventOutbox, *, broke: bool = True) -> None:
        """One of the member's streams is over, which changes nothing if it has another one. broke: as of Membership."""
        if self._events.get(member_id) is events:
            del self._events[member_id]
            if not self._stopping:
                self._carry_out_for(member_id, self._membership.disconnected(member_id, self._clock(), broke=broke))

    def _process_ended(self, member_id: str, cause: str) -> None:
        self._carry_out_for(member_id, self._membership.process_ended(member_id, cause, self._clock()))

    def rank_ended(self, ended: RankEnded) -> None:
        """An agent says that a rank's process has ended. Ignored for a job that is not served here."""
        self._carry_out(ended.job, self._membership.rank_ended(ended, self._clock()))

    def coming(self, job: str, count: int) -> None:
        """As `Membership.coming`."""
        self._carry_out(job, self._membership.coming(job, count))

    def give_up(self, job: str, sentence: str) -> None:
        """As `Membership.give_up`."""
        self._carry_out(job, self._membership.give_up(job, sentence))

    def end(self, job: str, cause: str) -> None:
        """As `Membership.end`."""
        self._carry_out(job, self._membership.end(job, cause, self._clock()))

    def ask_to_leave(self, job: str, slot: int, incarnation: int, reason: str) -> None:
        """As `Membership.ask_to_leave`."""
        self._carry_out(job, self._membership.ask_to_leave(job, slot, incarnation, reason, self._clock()))

    def ranks_seen(self, host: str, report: agents_pb2.JobReport) -> None:
        """As an agent says."""
        self.sights.told_by_agent(host, report, self._membership, self._clock())

    # -- effects -------------------------------------------------------------------------------------------------------

    def _carry_out_for(self, member_id: str, effects: Sequence[Effect]) -> None:
        self._carry_out(self._job_of.get(member_id, ""), effects)

    def _carry_out(self, job: str, effects: Sequence[Effect]) -> None:
        """Carries the effects out in order. Those behind a Record wait until the store has it."""
        if (held := self._held.get(job)) is not None:
            held += effects
        elif any(isinstance(effect, Record) for effect in effects):
            self._held[job] = list(effects)
            self._tasks.start(self._carry_out_recorded(job, self._held[job]))
        else:
            self._do(job, effects)

    async def _carry_out_recorded(self, job: str, held: list[Effect]) -> None:
        while held:
            await self._worlds.record_gone(job, held)
            if self._held.get(job) is not held:
                return  # another coordinator has taken the job over and makes its own decisions
            effects = held[:]
            held.clear()
            self._do(job, effects)
        del self._held[job]
        self._do(job, [])

    def _do(self, job: str, effects: Sequence[Effect]) -> None:
        self.stories.heard(effects)
        for effect in effects:
            if isinstance(effect, Send):
                if stream := self._events.get(effect.member_id):
                    effect.event.term = self.serving.term(job)
                    stream.put(effect.event)
            elif isinstance(effect, Close):
                self.sights.forget(effect.member_id)
                self._job_of.pop(effect.member_id, None)
                if closed := self._events.pop(effect.member_id, None):
                    closed.close()
            elif isinstance(effect, Form):
                self._tasks.start(self._form(effect.formation))
            elif isinstance(effect, TellLater):
                asyncio.get_running_loop().call_later(effect.delay_s, self._tell_progress, effect.job)
            elif isinstance(effect, LookLater):
                asyncio.get_running_loop().call_later(
                    effect.delay_s, self._guarded, effect.job, self._look_at_members, effect.job
                )
            elif isinstance(effect, Gone):
                self._rank_gone(effect)
            elif isinstance(effect, WorkDone):
                self._work_done(job, effect.slots)
            elif isinstance(effect, WorldEnded):
                self._world_ended(effect)
        is_idle = job not in self._held and not self._membership.knows(job)
        if is_idle and self.serving.guard(job) and not self._stopping:
            self.stories.over(job)
            self._tasks.start(self._worlds.release(job))

    def _tell_progress(self, job: str) -> None:
        if not self._stopping:
            self._carry_out(job, self._membership.tell_progress(job, self._clock()))

    async def _form(self, formation: Formation) -> None:
        """Lets the world begin once the store has it, and tells the members."""
        job = formation.job
        try:
            world = await self._worlds.publish(formation)
        except TooLargeError as error:
            sentence = f"The world of job {job!r} is larger than the coordinator's store takes: {error}"
            sentence = coded(WorldCode.WORLD_TOO_LARGE, sentence)
            _log.error("%s", sentence, extra=about(job))
            self._carry_out(job, self._membership.unformable(formation, sentence, self._clock()))
            return
        if world is None:
            return
        effects = self._membership.formed(formation, world.epoch, world.secret, self._clock())
        if not effects:  # a member went away meanwhile, so the world does not form
            await self._worlds.retract(job, world.guard)
            return
        if old := self._sessions.pop(job, None):
            old.end(epoch_over(old.epoch, old.job))
        options = next(iter(formation.requests.values())).options
        negotiation = Negotiation(
            world.epoch,
            len(formation.places),
            self._id_capacity,
            deadlock=deadlock_times_of(options, self._deadlock),
            term=world.guard.revision,
        )
        self._open(job, world.guard, negotiation, options)
        self._carry_out(job, effects)

    def _open(self, job: str, guard: Guard, negotiation: Negotiation, options: Mapping[str, str]) -> None:
        times, ignored = times_of(options)
        self._sessions[job] = NegotiationSession(
            job,
            negotiation.epoch,
            guard.revision,
            negotiation,
            StallWatch(times),
            ignored,
            self._told_level,
            metrics=self.metrics,
            stopped_in_words=lambda ranks: self.sights.stopped_in_words(job, self._membership, ranks),
        )
        self._empty.clear()

    def _rank_gone(self, gone: Gone) -> None:
        job, epoch, rank = gone.job, gone.told.epoch, gone.told.rank
        session = self._sessions.get(job)
        if session is None or session.epoch != epoch:
            return
        if stream := session.streams.pop(rank, None):
            sentence = f"Rank {rank} is no longer part of world {epoch} of job {job!r}."
            stream.fail(grpc.StatusCode.FAILED_PRECONDITION, coded(WorldCode.EPOCH_OVER, sentence))
        session.reports.pop(rank, None)
        session.send(session.negotiation.forget(rank, self._clock()))

    def _world_ended(self, ended: WorldEnded) -> None:
        session = self._sessions.get(ended.job)
        if session is not None and session.epoch == ended.epoch:
            del self._sessions[ended.job]
            if not self._sessions:
                self._empty.set()
            session.end(epoch_over(session.epoch, session.job))

    # -- other coordinators --------------------------------------------------------------------------------------------

    async def _restore(self, job: str, guard: Guard) -> None:
        """Takes up the world that another coordinator has left, or this one before it was replaced."""
        if (found := await self._worlds.read(job)) is None:
            return
        record, gone = found
        world = record.world
        if not (members := self._membership.restore(record, gone, self._clock(), self._worlds.rested_s(record))):
            return
        if self._membership.world_of(job) is not None:  # otherwise all members are on their way to the next world
            negotiation = Negotiation(
                world.epoch,
                len(world.members),
                self._id_capacity,
                deadlock=deadlock_times_of(world.options, self._deadlock),
                term=guard.revision,
                takes_over=True,
            )
            self._open(job, guard, negotiation, world.options)
            for one in gone.gone:
                negotiation.forget(one.rank)
        for request in members:
            self._job_of[request.member_id] = job
            self.sights.watch(request)
        self._tasks.start(self.outcomes.look(job))
        present = f"{len(members)} of {len(world.members)} member(s)"
        _log.warning("Job %r: world %d was taken over, with %s.", job, world.epoch, present)
        self.stories.taken_over(record, gone)

    def _taken_over(self, job: str, address: str) -> None:
        """Another coordinator serves the job from now on. Sends the members to it, and forgets the job."""
        self._held.pop(job, None)
        self._worlds.forget(job)
        where = address or "another coordinator"
        sentence = coded(ClusterCode.NOT_SERVED_HERE, f"Job {job!r} is served by {where} now.")
        if (session := self._sessions.pop(job, None)) is not None:
            session.end(sentence, grpc.StatusCode.UNAVAILABLE)
            if not self._sessions:
                self._empty.set()
        for member_id in self._membership.drop(job):
            self.sights.forget(member_id)
            self._job_of.pop(member_id, None)
            if (events := self._events.pop(member_id, None)) is not None:
                if address:
                    events.put(membership_pb2.MembershipEvent(redirect=membership_pb2.Redirect(address=address)))
                events.fail(grpc.StatusCode.UNAVAILABLE, sentence)

    def _cut_off(self) -> None:
        """Ends the members' streams because this coordinator can't write to the store. They try others first."""
        self._fail_all(coded(ClusterCode.STORE_FAILED, "The coordinator can't reach its store; another one may."))

    def _fail_all(self, sentence: str) -> None:
        for events in self._events.values():
            events.fail(grpc.StatusCode.UNAVAILABLE, sentence)
        for session in self._sessions.values():
            for decisions in session.streams.values():
                decisions.fail(grpc.StatusCode.UNAVAILABLE, sentence)

    # -- negotiation -------------------------------------------------------------------------------------------------

    def open_session(
        self, message: negotiation_pb2.NegotiationMessage, decisions: DecisionsOutbox
    ) -> NegotiationSession | RefusedError:
        """Admits a negotiation stream by its first message; or why not."""
        hello = message.hello
        term = self.serving.term(hello.job)
        if term == 0 or hello.term != term:
            # The member learns from its membership stream who serves the job, and then opens this stream again.
            sentence = f"Rank {hello.rank} of job {hello.job!r} is not attached to this coordinator."
            return RefusedError(grpc.StatusCode.UNAVAILABLE, coded(ClusterCode.NOT_SERVED_HERE, sentence))
        sentence = self._membership.stranger(hello.job, message.epoch, hello.member_id, hello.rank)
        session = self._sessions.get(hello.job)
        if sentence or session is None:
            sentence = sentence or epoch_over(message.epoch, hello.job)
            return RefusedError(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        if old := session.streams.get(hello.rank):
            old.fail(grpc.StatusCode.ABORTED, newer_stream(hello.rank))
        session.streams[hello.rank] = decisions
        if session.shutdown:
            session.tell_shutdown(hello.rank)
        if hello.rank == 0 and session.ignored:
            session.warn(session.ignored)
            session.ignored = ""
        return session

    def negotiate(
        self, session: NegotiationSession, rank: int, message: negotiation_pb2.NegotiationMessage
    ) -> Iterator[None]:
        """In steps of bounded work; others may be served at each yield. Raises TooMuchError or ContradictionError."""
        resumed = message.HasField("hello") and rank in session.seen
        session.seen.add(rank)
        if message.HasField("report"):
            session.reports[rank] = message.report
        self.metrics.announcements.add(len(message.announce), session.job)
        try:
            for number, answers in enumerate(session.negotiation.steps(rank, message, self._clock(), resumed), start=1):
                session.send(answers)
                if number * STEP < len(message.announce):
                    yield
        except TooMuchError as error:
            session.send(error.answers)
            raise

    def close_session(self, session: NegotiationSession, rank: int, decisions: DecisionsOutbox) -> None:
        """The negotiation stream is over; its rank may open another one."""
        if session.streams.get(rank) is decisions:
            del session.streams[rank]

    # -- life --------------------------------------------------------------------------------------------------------

    def attendance(self, job: str) -> Attendance | None:
        """Which hosts of the job's world are connected here; None when the job is not served here, or unknown."""
        return self._membership.attendance(job) if self.serving.guard(job) is not None else None

    def latest_epoch(self, job: str) -> int | None:
        """As `Membership.latest_epoch`."""
        return self._membership.latest_epoch(job)

    def overview(self) -> list[JobOverview]:
        """All jobs as they are now. May be called from other threads."""
        reports = {session.job: session.reports for session in list(self._sessions.values())}
        return self._membership.overview(reports, self.stories.entries)

    async def watch_clock(self) -> None:
        """Finds members and operations that are overdue, for ever."""
        await self._ticks.watch(self._look)

    def _look(self, jumped: bool) -> None:
        if not self.serving.is_sure():
            # Another coordinator may serve its jobs by now, to which members that are away here are connected.
            self._membership.restart_limits(self._clock())
        if jumped:
            _log.warning("This coordinator was stopped for a while; its time limits start again.")
            self._membership.restart_limits(self._clock())
            for session in self._sessions.values():
                session.negotiation.restart_limits(self._clock())
        for job in self._membership.jobs():
            self._guarded(job, self._look_at_members, job)
        for job, session in list(self._sessions.items()):
            self._guarded(job, session.watch_stalls, self._clock())

    def _look_at_members(self, job: str) -> None:
        now_s = self._clock()
        self._carry_out(job, self._membership.tick(job, now_s, self.sights.of(job, self._membership, now_s)))
        self.stories.waits(job, self._membership.waits_for(job))

    def _guarded(self, job: str, look: Callable[..., None], *arguments: Any) -> None:
        """Calls `look` for one job. An error there must not end the watch over the others."""
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
        self.sights.close()
        self._fail_all(coded(ClusterCode.COORDINATOR_ENDS, "The coordinator is stopping."))
        await self._tasks.end()
        await self.stories.stop()
        await self.serving.stop()
