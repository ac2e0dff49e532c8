"""The state that the servicers share: the core's decisions on one side, open streams and the store on the other.

Everything here runs in one event loop, so that a core decision and its effects are one step. Only the store is
awaited.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from horovod.coordinator.core.membership import Close, Effect, Ended, Form, Formation, Gone, Membership, Send
from horovod.coordinator.core.negotiation import Answers, Negotiation
from horovod.coordinator.core.stall import StallWatch, times_of
from horovod.coordinator.store import Store, StoreError
from horovod.coordinator.store.jobs import next_epoch, publish_world, retract_world
from horovod.protos.v1 import membership_pb2, negotiation_pb2

from .outbox import Outbox

TICK_S = 1.0
STORE_RETRY_S = 0.5

EventOutbox = Outbox[membership_pb2.MembershipEvent]
DecisionsOutbox = Outbox[negotiation_pb2.Decisions]

_log = logging.getLogger(__name__)


@dataclass
class Talk:
    """The negotiation of a job's running world and its streams."""

    job: str
    epoch: int
    negotiation: Negotiation
    store_revision: int
    stalls: StallWatch
    ignored: str = ""  # what rank 0 is to hear about the settings when it opens its stream
    told_level: int = logging.WARNING
    streams: dict[int, DecisionsOutbox] = field(default_factory=dict)  # by rank
    seen: set[int] = field(default_factory=set)  # ranks that had a stream
    shutdown: str = ""  # every rank is to end the epoch with this sentence

    def send(self, answers: Answers) -> None:
        for ranks, decisions in answers:
            for rank in ranks:
                if rank in self.streams:
                    self.streams[rank].put(decisions)

    def warn(self, sentence: str) -> None:
        """In the log here, and on the stderr of rank 0."""
        _log.log(self.told_level if 0 in self.streams else logging.WARNING, "Job %r: %s", self.job, sentence)
        if 0 in self.streams:
            self.streams[0].put(negotiation_pb2.Decisions(epoch=self.epoch, warnings=[sentence]))

    def watch_stalls(self, now_s: float) -> None:
        if not (after_s := self.stalls.times.shortest_s):
            return
        verdict = self.stalls.look(self.negotiation.stalls(now_s, after_s), now_s)
        if verdict.warning:
            self.warn(verdict.warning)
        if verdict.shutdown:
            self.shutdown = verdict.shutdown
            _log.log(self.told_level, "Job %r: %s", self.job, verdict.shutdown)
            for rank in self.streams:
                self.tell_shutdown(rank)

    def tell_shutdown(self, rank: int) -> None:
        self.streams[rank].put(negotiation_pb2.Decisions(epoch=self.epoch, shutdown=self.shutdown))

    def end(self, sentence: str) -> None:
        for stream in self.streams.values():
            stream.fail(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        self.streams.clear()


class Hub:
    def __init__(
        self,
        store: Store,
        *,
        heartbeat_timeout_s: float = 30.0,
        told_level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
        secret: Callable[[], bytes] = lambda: secrets.token_bytes(32),
    ) -> None:
        """told_level: at which the log repeats what rank 0 shows to the user."""
        self._store = store
        self._told_level = told_level
        self._clock = clock
        self._secret = secret
        self._membership = Membership(heartbeat_timeout_s)
        self._events: dict[str, EventOutbox] = {}  # by member id
        self._talks: dict[str, Talk] = {}  # by job
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    # -- membership --------------------------------------------------------------------------------------------------

    def join(self, request: membership_pb2.JoinRequest, events: EventOutbox) -> str:
        """Why the request is refused; "" when it is not and `events` gets what happens from now on."""
        refusal, effects = self._membership.join(request)
        if refusal:
            _log.info("Refused: %s", refusal)
        else:
            self._events[request.member_id] = events
        self._carry_out(effects)
        return refusal

    def heartbeat(self, member_id: str, epoch: int) -> str:
        return self._membership.heartbeat(member_id, epoch, self._clock())

    def leave(self, member_id: str, reason: str) -> None:
        self._carry_out(self._membership.leave(member_id, reason))

    def lost(self, member_id: str, cause: str) -> None:
        """The member's stream is over. Nothing happens when it had said goodbye."""
        if not self._stopping:
            self._carry_out([*self._membership.lost(member_id, cause), Close(member_id)])

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if effect.event.HasField("gone"):
                    _log.info("%s", effect.event.gone.sentence)
                if stream := self._events.get(effect.member_id):
                    stream.put(effect.event)
            elif isinstance(effect, Close):
                if closed := self._events.pop(effect.member_id, None):
                    closed.close()
            elif isinstance(effect, Form):
                self._start(self._form(effect.formation))
            elif isinstance(effect, Gone):
                self._rank_gone(effect)
            else:
                self._world_ended(effect)

    async def _form(self, formation: Formation) -> None:
        """Takes the next epoch from the store, writes the world there, and tells the members."""
        while self._membership.is_forming(formation):
            try:
                epoch = await next_epoch(self._store, formation.job)
                secret = self._secret()
                entry = await publish_world(self._store, formation.world(epoch, secret))
            except StoreError as error:
                _log.warning("Job %r can't form its world yet: %s", formation.job, error)
                await asyncio.sleep(STORE_RETRY_S)
                continue
            if entry is None:
                continue  # somebody else published a later epoch; take the one after it
            effects = self._membership.formed(formation, epoch, secret, self._clock())
            if not effects:  # a member went away meanwhile
                await retract_world(self._store, formation.job, entry.revision)
                return
            if old := self._talks.pop(formation.job, None):
                old.end(f"Epoch {old.epoch} of job {old.job!r} is over.")
            size = len(formation.places)
            times, ignored = times_of(next(iter(formation.requests.values())).options)
            self._talks[formation.job] = Talk(
                formation.job,
                epoch,
                Negotiation(epoch, size),
                entry.revision,
                StallWatch(times),
                ignored,
                self._told_level,
            )
            _log.info("Job %r: epoch %d has %d member(s).", formation.job, epoch, size)
            self._carry_out(effects)

    def _rank_gone(self, gone: Gone) -> None:
        talk = self._talks.get(gone.job)
        if talk is None or talk.epoch != gone.epoch:
            return
        if stream := talk.streams.pop(gone.rank, None):
            stream.fail(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"Rank {gone.rank} is no longer part of epoch {gone.epoch} of job {gone.job!r}.",
            )
        talk.send(talk.negotiation.forget(gone.rank))

    def _world_ended(self, ended: Ended) -> None:
        talk = self._talks.get(ended.job)
        if talk is not None and talk.epoch == ended.epoch:
            del self._talks[ended.job]
            talk.end(f"Epoch {talk.epoch} of job {talk.job!r} is over.")
            self._start(retract_world(self._store, talk.job, talk.store_revision))

    # -- negotiation -------------------------------------------------------------------------------------------------

    def open_talk(self, message: negotiation_pb2.NegotiationMessage, decisions: DecisionsOutbox) -> Talk | str:
        """Admits a negotiation stream by its first message; or the sentence why not."""
        hello = message.hello
        sentence = self._membership.stranger(hello.job, message.epoch, hello.member_id, hello.rank)
        talk = self._talks.get(hello.job)
        if sentence or talk is None:
            return sentence or f"Epoch {message.epoch} of job {hello.job!r} is over."
        if old := talk.streams.get(hello.rank):
            old.fail(grpc.StatusCode.ABORTED, f"Rank {hello.rank} opened a newer stream.")
        talk.streams[hello.rank] = decisions
        if talk.shutdown:
            talk.tell_shutdown(hello.rank)
        if hello.rank == 0 and talk.ignored:
            talk.warn(talk.ignored)
            talk.ignored = ""
        return talk

    def negotiate(self, talk: Talk, rank: int, message: negotiation_pb2.NegotiationMessage) -> None:
        """May raise TooMuchError or ContradictionError."""
        resumed = message.HasField("hello") and rank in talk.seen
        talk.seen.add(rank)
        talk.send(talk.negotiation.receive(rank, message, self._clock(), resumed))

    def close_talk(self, talk: Talk, rank: int, decisions: DecisionsOutbox) -> None:
        """The stream is over; its member may come back with another one."""
        if talk.streams.get(rank) is decisions:
            del talk.streams[rank]

    # -- life --------------------------------------------------------------------------------------------------------

    async def watch_clock(self) -> None:
        """Finds silent members and stalled operations, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            self._carry_out(self._membership.tick(self._clock()))
            for talk in self._talks.values():
                talk.watch_stalls(self._clock())

    async def stop(self) -> None:
        """Ends all streams in words. What members do next is theirs to decide; the store keeps their world."""
        self._stopping = True
        for events in self._events.values():
            events.fail(grpc.StatusCode.UNAVAILABLE, "The coordinator is stopping.")
        for talk in self._talks.values():
            for decisions in talk.streams.values():
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
