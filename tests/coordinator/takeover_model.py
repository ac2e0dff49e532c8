"""Members of one job, their data plane and coordinators over one store, without a socket: how a job changes hands.

The coordinators are real Hubs. A member is what worker/runtime and the engine are to a coordinator: it attaches, says
hello, announces, remembers (the real Known), arrives under ids in a common log, answers recalls, joins. All messages
wait until the test delivers them, so that a coordinator can end, or be replaced without noticing, between any two.

Every member runs the same script: rounds of operations, some in a process set that comes and goes, at whose end it
joins, each after as many operations as it has data for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from coordinator_builders import attach_request, message, op, request

from horovod.base.proofs import attach_proof
from horovod.coordinator.core.agreement.budget import TooMuchError
from horovod.coordinator.core.world.life import NEVER_HAD_ITS_WORLD
from horovod.coordinator.services.hub import EventOutbox, Hub
from horovod.coordinator.services.negotiation_session import DecisionsOutbox, NegotiationSession
from horovod.coordinator.services.sending import Outbox
from horovod.coordinator.store import MemoryStore
from horovod.protos.v1 import membership_pb2, negotiation_pb2
from horovod.worker.runtime.known import Known

JOB = "digits"
IN_FLIGHT = 3  # operations that a member starts ahead


@dataclass(frozen=True)
class Step:
    """Of a script: an operation (`name`), or a change of process set `number` when there is none."""

    number: int = 0  # process set
    name: str = ""
    shape: int = 1
    adds: bool = False


Key = tuple[int, str, int]  # process set, name, shape: what a lane of the engine stands for


class Log:
    """The data plane of a world: who has arrived under which id, and with what."""

    def __init__(self, members: dict[int, tuple[int, ...]]) -> None:
        self.members = members  # by process set
        self.arrived: dict[tuple[int, int], dict[int, Key]] = {}  # process set and id -> rank -> key
        self.reached: dict[int, set[int]] = {}  # position of a change of process sets -> ranks that wait there


class Member:
    def __init__(self, model: Model, number: int) -> None:
        self.model = model
        self.number = number
        self.attempts = itertools.count()
        self.request = membership_pb2.JoinRequest()
        self.hub: int | None = None  # of the present streams
        self.events: EventOutbox | None = None
        self.decisions: DecisionsOutbox | None = None
        self.session: NegotiationSession | None = None
        self.taken_in: deque[Iterator[None]] = deque()  # messages on the present stream that are not wholly taken in
        self.world: membership_pb2.World | None = None
        self.past: tuple[membership_pb2.World, int] | None = None
        self.epochs: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """A new world."""
        self.term = 0
        self.rank = -1
        self.attached = False
        self.connected = False  # to all others of the world
        self.known = Known(0)
        self.to_send = message()
        self.sets: dict[int, negotiation_pb2.ProcessSetChange] = {}
        self.undecided: dict[tuple[int, str], Key] = {}
        self.lanes: dict[Key, int] = {}  # ids
        self.recalled: list[negotiation_pb2.Recall] = []  # and not answered yet
        self.in_flight: list[Key] = []
        self.position = 0  # in the script
        self.round = 0
        self.join: negotiation_pb2.Join | None = None
        self.zeros = False  # contributes them
        self.lasts: list[int] = []  # who joined last, by round

    # -- streams -----------------------------------------------------------------------------------------------------

    def lose_streams(self, tell: bool = True) -> None:
        """tell: the coordinator notices."""
        hub, events, decisions = self.hub, self.events, self.decisions
        self.hub = self.events = self.decisions = None
        self.taken_in.clear()
        self.attached = False
        if hub is None or not tell:
            return
        if decisions is not None and self.session is not None:
            self.model.hubs[hub].close_session(self.session, self.rank, decisions)
        if events is not None:
            self.model.hubs[hub].disconnected(self.request.member_id, events)

    async def connect(self, number: int) -> None:
        """To this coordinator, or to where it sends us: a membership stream."""
        self.lose_streams()
        hub = self.model.hubs[number]
        if address := await hub.serve(JOB):
            number = int(address)
            hub = self.model.hubs[number]
            if await hub.serve(JOB):
                return
        events: EventOutbox = Outbox(1 << 16)
        if self.world is None:
            name = f"m{self.number}.{next(self.attempts)}"
            size = self.model.size
            self.request = request(
                name,
                job=JOB,
                size=size,
                pid=self.number + 1,
                start_time=7,
                namespace="elsewhere",
                rejoin=self.past,
            )
            assert not hub.join(self.request, events)
        else:
            attach = attach_request(self.request, self.world)
            challenge = hub.challenge(attach)
            assert isinstance(challenge, bytes), challenge.sentence
            refused = hub.attach(attach, challenge, attach_proof(self.world.secret, attach, challenge), events)
            assert refused is None, refused.sentence
        self.hub, self.events = number, events

    def negotiate(self) -> None:
        """Opens a negotiation stream."""
        assert self.hub is not None
        hub = self.model.hubs[self.hub]
        hello = self.known.hello(negotiation_pb2.Hello(job=JOB, member_id=self.request.member_id, rank=self.rank))
        hello.term = self.term
        if self.join is not None:
            self.known.place(self.join)
        first = negotiation_pb2.NegotiationMessage(
            epoch=self.epoch,
            hello=hello,
            announce=[_operation(key) for key in self.undecided.values()],
            recalled=self.to_send.recalled,
            join=self.join,
            process_sets=[*self.sets.values(), *(one for one in self.to_send.process_sets if one.removed)],
        )
        self.to_send = message(epoch=self.epoch)
        decisions: DecisionsOutbox = Outbox(1 << 14)
        session = hub.open_session(first, decisions)
        if isinstance(session, NegotiationSession):
            self.session, self.decisions = session, decisions
            self.taken_in.clear()
            self.taken_in.append(hub.negotiate(session, self.rank, first))
            self.step()

    def step(self) -> bool:
        """The coordinator takes in a part of what was sent. False: there is nothing left."""
        if self.taken_in:
            try:
                next(self.taken_in[0])
            except StopIteration:
                self.taken_in.popleft()
        return bool(self.taken_in)

    def send(self, lost: bool = False) -> None:
        """What has come together since the last message. lost: the stream breaks on the way."""
        if self.hub is None or self.decisions is None or self.session is None:
            return
        sent, self.to_send = self.to_send, message(epoch=self.epoch)
        if lost:
            self.lose_streams()
        elif not self.decisions.ended.is_set():
            try:
                self.taken_in.append(self.model.hubs[self.hub].negotiate(self.session, self.rank, sent))
                self.step()
            except TooMuchError as error:
                raise AssertionError(error) from error

    @property
    def epoch(self) -> int:
        return self.world.epoch if self.world else 0

    # -- what comes in -----------------------------------------------------------------------------------------------

    async def deliver(self) -> bool:
        """All that waits to be read. False when that was nothing."""
        found = False
        while self.events is not None and (self.events._items or self.events.ended.is_set()):
            found = True
            events = self.events
            for event in await events.take():
                self._heard(event)
            if events.ended.is_set() and self.events is events:
                self.lose_streams()
        decisions = self.decisions
        if decisions is not None and decisions._items:
            found = True
            for one in await decisions.take():
                assert one.term == self.term
                self._decided(one)
        return found

    def _heard(self, event: membership_pb2.MembershipEvent) -> None:
        if 0 < event.term < self.term:
            self.lose_streams()
            return
        kind = event.WhichOneof("event")
        if kind == "world":
            world = event.world
            assert not self.epochs or world.epoch > self.epochs[-1], "an epoch went back"
            self._begin()
            self.world, self.term, self.attached = world, event.term, True
            self.epochs.append(world.epoch)
            self.rank = [one.member_id for one in world.members].index(self.request.member_id)
            self.known = Known(self.rank)
            self.model.stands(world)
            assert self.hub is not None
            self.model.hubs[self.hub].received(self.request.member_id, world.epoch)
        elif kind == "attached":
            self.term, self.attached = event.term, True
            for gone in list(event.attached.gone)[:1]:
                self._gone(gone)
        elif kind == "gone":
            self._gone(event.gone)
        elif kind == "redirect":
            self.lose_streams()
        else:
            assert kind in ("progress", "probe"), event  # a probe is for members of one host

    def _gone(self, gone: membership_pb2.MemberGone) -> None:
        if gone.epoch != self.epoch:
            return
        had_none = gone.never_stood or NEVER_HAD_ITS_WORLD in gone.sentence
        assert had_none or gone.orderly, f"lost without cause: {gone.sentence}"
        assert not self.connected, "a world ended in which members worked"
        assert self.world is not None
        if self.hub is not None:
            self.model.hubs[self.hub].leave(self.request.member_id, "it could not connect to the other members")
        self.past = self.world, self.rank
        self.world = None  # joins again
        self.lose_streams()

    def _decided(self, decisions: negotiation_pb2.Decisions) -> None:
        self.known.heard(decisions)
        for plan in decisions.plans:
            key = self.undecided.pop((plan.process_set, plan.name), None)
            if key is None and plan.HasField("operation") and self.join is not None:
                key = (plan.process_set, plan.name, plan.operation.tensors[0].shape[0])
                assert key not in self.in_flight
            elif key is None:
                continue
            self.lanes[key] = plan.id
            if key in self.in_flight:
                self._arrive(key)
        assert not decisions.errors, decisions.errors
        for recall in decisions.recalls:
            self._recalled(recall)
        for join in decisions.joins:
            self._joined(join)

    def _recalled(self, recall: negotiation_pb2.Recall) -> None:
        for key, one in list(self.lanes.items()):
            if key[0] != recall.process_set or one not in recall.ids:
                continue
            del self.lanes[key]
            if key in self.in_flight:
                del self.model.log(self).arrived[recall.process_set, one][self.rank]
                self._announce(key)
        self.recalled.append(recall)

    def answer(self) -> None:
        """The recalls, which an engine may do later: it answers for several ids at once."""
        for recall in self.recalled:
            self.to_send.recalled.add(process_set=recall.process_set, ids=recall.ids)
            self.known.freed(recall.process_set, recall.ids)
        self.recalled.clear()

    def _joined(self, join: negotiation_pb2.JoinState) -> None:
        if join.round != self.round:
            return
        if join.phase == negotiation_pb2.JOIN_PHASE_OVER:
            assert self.join is not None, "a round is over that this member is not in"
            assert join.ranks
            self.lasts.append(join.ranks[-1])
            self.round, self.join, self.position, self.zeros = self.round + 1, None, 0, False
        elif join.phase == negotiation_pb2.JOIN_PHASE_ENDING:
            self.zeros = False
            self.join = negotiation_pb2.Join(round=self.round, contributes_none=True)
            self.to_send.join.CopyFrom(self.join)
        elif self.rank in join.ranks:
            self.zeros = True

    # -- the engine --------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Starts the next step of the script; False when it can't yet, or has done all."""
        if self.world is None or self.join is not None or self.round == len(self.model.script):
            return False
        self.connected = self.connected or all(each.epoch == self.epoch for each in self.model.members)
        if not self.connected:
            return False
        steps = self.model.script[self.round]
        if self.position == min(len(steps), self.model.data[self.round][self.rank]):
            if self.in_flight:
                return False
            self.join = negotiation_pb2.Join(round=self.round)
            self.to_send.join.CopyFrom(self.join)
            return True
        step = steps[self.position]
        if not step.name:
            return self._change(step)
        key = (step.number, step.name, step.shape)
        if self.rank not in self.model.members_of(step.number):
            self.position += 1
            return True
        if len(self.in_flight) == IN_FLIGHT or any(one[:2] == key[:2] for one in self.in_flight):
            return False
        self.position += 1
        self.in_flight.append(key)
        if key in self.lanes:
            self._arrive(key)
        else:
            self._announce(key)
        return True

    def _change(self, step: Step) -> bool:
        """Of process sets: over the data plane, when every member has come to it with nothing in flight."""
        if self.in_flight:
            return False
        log = self.model.log(self)
        there = log.reached.setdefault((self.round << 16) + self.position, set())
        there.add(self.rank)
        if len(there) < self.model.size:
            return False
        self.position += 1
        change = negotiation_pb2.ProcessSetChange(process_set=step.number, ranks=self.model.members_of(step.number))
        if step.adds:
            self.sets[step.number] = change
        else:
            del self.sets[step.number]
            change.removed = True
            self.known.forget_set(step.number)
            self.lanes = {key: one for key, one in self.lanes.items() if key[0] != step.number}
        self.to_send.process_sets.append(change)
        return True

    def _announce(self, key: Key) -> None:
        self.undecided[key[:2]] = key
        self.to_send.announce.append(_operation(key))

    def _arrive(self, key: Key) -> None:
        number, one = key[0], self.lanes[key]
        arrived = self.model.log(self).arrived.setdefault((number, one), {})
        arrived[self.rank] = key
        self.model.run(self, number, one)


@dataclass
class Peers:
    """Whether a coordinator seems to live to the others."""

    answering: set[str] = field(default_factory=set)  # replicas

    async def serves(self, holder: membership_pb2.Serving, job: str) -> bool:
        return holder.replica in self.answering


class Model:
    def __init__(self, size: int, script: Sequence[Sequence[Step]], data: Sequence[Sequence[int]], ids: int) -> None:
        """data: by round and rank, how many steps the rank has data for."""
        self.size, self.script, self.data, self.ids = size, script, data, ids
        self.store = MemoryStore()
        self.peers = Peers()
        self.hubs: list[Hub] = []
        self.members = [Member(self, number) for number in range(size)]
        self.worlds: dict[int, bytes] = {}  # by epoch
        self._logs: dict[int, Log] = {}  # by epoch

    def begin(self, coordinators: int) -> None:
        self.hubs = [self._hub(number) for number in range(coordinators)]

    def _hub(self, number: int) -> Hub:
        hub = Hub(self.store, id_capacity=self.ids)
        hub.serving._peers = self.peers  # type: ignore[assignment]
        hub.serving.address = str(number)
        self.peers.answering.add(hub.serving.replica)
        return hub

    async def kill(self, number: int) -> None:
        """Nothing of it is left but what is in the store; another one starts at its address."""
        old = self.hubs[number]
        self.peers.answering.discard(old.serving.replica)
        for task in old._tasks.running():
            task.cancel()
        old.sights.close()
        self.hubs[number] = self._hub(number)
        for member in self.members:
            if member.hub == number:
                member.lose_streams(tell=False)
        await settle()

    def silence(self, number: int) -> None:
        """The other coordinators take it for dead, but it goes on."""
        self.peers.answering.discard(self.hubs[number].serving.replica)

    async def notice(self, number: int) -> None:
        """A coordinator's watch over the store tells it whether it was replaced."""
        serving = self.hubs[number].serving
        if (guard := serving.guard(JOB)) is not None:
            found = await self.store.get(guard.key)
            serving._look(JOB, found.value if found else None, found.revision if found else guard.revision + 1)

    def members_of(self, process_set: int) -> tuple[int, ...]:
        return tuple(range(self.size if process_set == 0 else self.size - 1))

    def log(self, member: Member) -> Log:
        return self._logs.setdefault(member.epoch, Log({}))

    def stands(self, world: membership_pb2.World) -> None:
        value = world.SerializeToString(deterministic=True)
        assert self.worlds.setdefault(world.epoch, value) == value, "two worlds of one epoch"

    def run(self, member: Member, process_set: int, one: int) -> None:
        """Everything under the id, if all are there."""
        arrived = self.log(member).arrived[process_set, one]
        assert len(set(arrived.values())) == 1, f"id {one} means {set(arrived.values())}"
        (key,) = set(arrived.values())
        in_world = {each.rank: each for each in self.members if each.epoch == member.epoch}
        for rank in self.members_of(process_set):
            other = in_world.get(rank)
            if rank in arrived:
                continue
            if other is None or process_set or not other.zeros or other.lanes.get(key) != one:
                return
        for rank in list(arrived):
            del arrived[rank]
            in_world[rank].in_flight.remove(key)

    def run_all(self) -> bool:
        """What joined members have made complete with their zeros."""
        before = sum(len(each.in_flight) for each in self.members)
        for member in self.members:
            for key in list(member.in_flight):
                if key in member.in_flight and key in member.lanes:
                    self.run(member, key[0], member.lanes[key])
        return sum(len(each.in_flight) for each in self.members) < before

    def is_done(self) -> bool:
        return all(each.round == len(self.script) and each.world is not None for each in self.members)

    async def finish(self) -> None:
        """No fault any more: everybody comes to a coordinator that lives, and does what is left."""
        for number, hub in enumerate(self.hubs):
            self.peers.answering.add(hub.serving.replica)
            await self.notice(number)
        for _ in range(500):
            if not self.is_done() and not await self.round():
                break
        assert self.is_done(), "it does not go on: " + "; ".join(self.state_of(each) for each in self.members)

    async def round(self) -> bool:
        """Every member does what it can. False when that is nothing."""
        progress = False
        for member in self.members:
            if member.events is None:
                await member.connect(0)
                progress = True
            elif member.attached and (member.decisions is None or member.decisions.ended.is_set()):
                member.negotiate()
                progress = True
            progress |= member.work()
            member.answer()
            while member.step():
                pass
            member.send()
            progress |= bool(member.taken_in)
        await settle()
        for member in self.members:
            progress |= await member.deliver()
        return self.run_all() or progress

    def state_of(self, member: Member) -> str:
        return (
            f"member {member.number} (rank {member.rank}, epoch {member.epoch}, term {member.term}) in round "
            f"{member.round} at {member.position}, join {member.join}, in flight {member.in_flight}, undecided "
            f"{list(member.undecided)}, lanes {member.lanes}, zeros {member.zeros}"
        )


async def settle() -> None:
    """Until all tasks of the coordinators wait for something else than each other."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # whoever can go on
    for _ in range(12):
        if not ready:
            break
        await asyncio.sleep(0)


def _operation(key: Key) -> negotiation_pb2.types__pb2.Operation:  # type: ignore[name-defined]
    return op(key[1], process_set=key[0], shape=(key[2],))
