"""Processes of one elastic job that come and go by chance, beside what must hold whatever they do.

Nothing here waits: the clock is the story's. A failure says all that was done, one line each, and the same seed does
the same again.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from coordinator_builders import attach_request, request
from membership_story import SECRET, Story

from horovod.base.proofs import attach_proof
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.core.world.effects import Close, Effect, Form, Formed, Gone
from horovod.coordinator.core.world.membership import Membership
from horovod.coordinator.core.world.rendezvous import RETURN_S
from horovod.coordinator.core.world.story import MAX_ENTRIES, Moment
from horovod.coordinator.core.world.story import Story as JobStory
from horovod.coordinator.core.world.waiting import Formation
from horovod.protos.v1 import membership_pb2 as pb

JOB = "digits"
CALM_S = 150  # longer than all limits one after the other: the grace, the return and the slow start
CALM_STEPS_S = 30  # of it in small steps


class Doing(Enum):
    OUTSIDE = auto()  # has left a world, or never was in one, and joins later
    WAITS = auto()
    TRAINS = auto()
    AWAY = auto()  # trains, but its stream is broken
    ENDED = auto()


class Still(Enum):
    """Why a process does not act, nor hear, for a while."""

    STOPPED = auto()
    CUT_OFF = auto()


@dataclass
class Process:
    name: str
    number: int
    host: str
    slot: int | None
    incarnation: int
    doing: Doing = Doing.OUTSIDE
    attempts: int = 0
    heard: int = 0  # of what the present attempt was told
    world: pb.World | None = None  # its last one
    rank: int = 0
    is_to_reform: bool = False  # at its next commit
    leaves: bool = False  # its world for good, at its next commit
    claims: int = 0  # of an attempt that waits: the epoch of the world that it proved to have been in
    returns_until_s: float = 0.0  # until then nobody goes on without it
    still: Still | None = None
    accused_in: int = 0  # the epoch in which a peer said that its connections to it broke

    member: str = field(init=False)  # of the present attempt

    def __post_init__(self) -> None:
        self.attempt(0)

    def attempt(self, number: int) -> None:
        self.attempts, self.member = number, f"{self.name}.{number}"


@dataclass(order=True)
class Due:
    at_s: float
    number: int
    do: Callable[[], None] = field(compare=False)


class Chaos(Story):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.hold = True
        self.dice = dice = random.Random(seed)
        self.fewest = dice.randint(1, 4)
        self.most = self.fewest + dice.randint(0, 4)
        self.size = dice.choice([0, dice.randint(self.fewest, self.most)])
        self.settle_s = dice.choice([0.0, 0.5, 2.0])
        self.hung_s = dice.choice([0.0, 1.0, 3.0])
        self.has_slots = dice.random() < 0.5
        self.hosts = [f"node-{letter}" for letter in "abc"[: dice.randint(1, 3)]]
        self.processes: list[Process] = []
        self.living: list[Process] = []  # those that have not ended
        self.of: dict[str, Process] = {}  # by member id
        self.slots: list[tuple[int, int]] = []  # of processes that have ended, with the next incarnation
        self.known: set[str] = set()  # those that have joined, until a Close says that they are no members any more
        self.due: list[Due] = []
        self.pending: list[Formation] = []
        self.record: pb.WorldRecord | None = None  # of the last world, as the store has it
        self.known_epoch = 0  # of the world for which the coordinator believes proofs
        self.out: set[tuple[int, int]] = set()  # epoch and rank of each that has left or is lost
        self.story = JobStory(JOB)
        self.is_calm = False
        self.count = 0  # of what was ever due
        self.worlds: list[list[str]] = []  # the names of the members of each, by rank
        first = f"seed {seed}: {self.fewest} to {self.most} members, size {self.size}, settle {self.settle_s} s"
        first += f", hung after {self.hung_s} s"
        self.lines = [f"{first}, {len(self.hosts)} hosts, {'slots' if self.has_slots else 'no slots'}"]

    def play(self) -> int:
        """How many worlds there were."""
        try:
            for _ in range(self.dice.randint(10, 80)):
                self._act()
                self._go_on(self.dice.choice([0.0, 0.05, 0.3, 1.0, 1.0, 5.0, 25.0]))
            self._calm_down()
        except AssertionError as error:
            raise AssertionError("\n".join([*self.lines, f"{type(error).__name__}: {error}"])) from error
        return len(self.worlds)

    # -- time --------------------------------------------------------------------------------------------------------
    def _in(self, at_most_s: float, do: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.due, Due(self.now_s + self.dice.uniform(0.0, at_most_s), self.count, do))

    def _go_on(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.due and self.due[0].at_s <= until_s:
            due = heapq.heappop(self.due)
            self._pass(max(0.0, due.at_s - self.now_s))
            due.do()
            self._listen()
        self._pass(until_s - self.now_s)

    def _pass(self, seconds: float) -> None:
        """The coordinator is on the first host, and sees its processes."""
        seen = [one for one in self.living if one.host == self.hosts[0]]
        self.pass_time(
            seconds,
            runs={one.member for one in seen if one.still is not Still.STOPPED},
            stopped={one.member: 0 for one in seen if one.still is Still.STOPPED},
            silent={one.member for one in self.living if one.still is Still.CUT_OFF},
        )
        self._listen()

    def _calm_down(self) -> None:
        """Nobody goes any more, and all commit. In the end nobody is forgotten."""
        self.is_calm = True
        self.say("calm")
        for seconds in [0.5] * 2 * CALM_STEPS_S + [5.0] * ((CALM_S - CALM_STEPS_S) // 5):
            self._go_on(seconds)
            for one in self._those(Doing.TRAINS):
                self._commit(one)
            while self.pending:
                self._form(0)
                self._listen()
        live = self.living
        trains = {one.name for one in live if one.doing is Doing.TRAINS}
        count = min(len(live), self.most) if len(live) >= self.fewest else 0
        names = self.worlds[-1] if count else []
        assert trains == set(names), f"the last world has {names}, but those that train are {sorted(trains)}"
        assert len(names) == count, f"{count} of {len(live)} processes can train, but {names} do"
        for one in live:
            if one.name not in trains:
                assert one.doing is Doing.WAITS, f"{one.name} {one.doing}"
                assert self.progress(one.member), f"{one.name} waits and was not told why"
        if count:
            assert self.story.epoch == self.known_epoch
            assert self.story.members == count, f"its story says that {self.story.members} are there"
        assert len(self.story.entries) <= MAX_ENTRIES
        known = {one.member for one in live}
        assert not live or self.known == known, f"the coordinator keeps {sorted(self.known - known)}"

    # -- events of processes, agents and coordinators ------------------------------------------------------------------
    def say(self, line: str) -> None:
        self.lines.append(f"{self.now_s:8.2f}  {line}")

    def _those(self, *doing: Doing) -> list[Process]:
        return [one for one in self.living if one.doing in doing]

    def _end(self, one: Process) -> None:
        one.doing = Doing.ENDED
        self.living.remove(one)

    def _act(self) -> None:
        dice = self.dice
        trains = [one for one in self._those(Doing.TRAINS) if one.still is None]
        # Only of these can the coordinator know that they are the same process.
        waits = [one for one in self._those(Doing.WAITS) if self.has_slots or self._has_claim(one)]
        all_ways: list[tuple[int, Callable[[], None], bool]] = [
            (6, self._burst, True),
            (3, lambda: self._kill(dice.choice(self.living)), bool(self.living)),
            (1, lambda: self._leave(dice.choice(trains)), bool(trains)),
            (2, lambda: self._say_leaving(dice.choice(trains)), bool(trains)),
            (3, lambda: self._break(dice.choice(trains)), bool(trains)),
            (2, lambda: self._be_still(dice.choice(trains), Still.STOPPED), bool(trains)),
            (2, lambda: self._be_still(dice.choice(trains), Still.CUT_OFF), bool(trains)),
            (8, lambda: self._commit(dice.choice(trains)), bool(trains)),
            (2, lambda: self._commit_all(trains), bool(trains)),
            (1, lambda: self._join_once_more(dice.choice(waits)), bool(waits)),
            (8, lambda: self._form(dice.randrange(len(self.pending))), bool(self.pending)),
            (1, self._take_over, True),
        ]
        ways = [(weight, do) for weight, do, can in all_ways if can]
        dice.choices([do for _, do in ways], [weight for weight, _ in ways])[0]()
        self._listen()

    def _burst(self) -> None:
        if len(self.living) > self.most + 2:
            return
        for _ in range(self.dice.choice([1, 1, 2, self.most])):
            slot, incarnation = None, 0
            if self.has_slots:
                new = (sum(one.incarnation == 1 for one in self.processes), 1)
                slot, incarnation = self.slots.pop() if self.slots and self.dice.random() < 0.7 else new
            number = len(self.processes)
            one = Process(f"p{number}", number, self.dice.choice(self.hosts), slot, incarnation)
            self.processes.append(one)
            self.living.append(one)
            self._join(one)

    def _join(self, one: Process) -> None:
        """As every attempt, with a proof that it was in its last world."""
        if one.doing is Doing.ENDED:
            return
        one.attempt(one.attempts + 1)
        one.heard, one.is_to_reform, one.doing, one.returns_until_s = 0, False, Doing.WAITS, 0.0
        one.claims = one.world.epoch if one.world is not None and one.world.epoch == self.known_epoch else 0
        self.of[one.member] = one
        slot = "" if one.slot is None else f" as slot {one.slot}, incarnation {one.incarnation}"
        self.say(f"{one.member} joins on {one.host}{slot}{f', was rank {one.rank}' if one.claims else ''}")
        refusal, effects = self.membership.join(
            request(
                one.member,
                pid=100 + one.number,
                host=one.host,
                rank=one.slot,
                incarnation=one.incarnation,
                start_time=1 + one.number,
                sizes=(self.fewest, self.most),
                size=self.size,
                settle_s=self.settle_s,
                options={"hung_seconds": str(self.hung_s)},
                rejoin=(one.world, one.rank) if one.world is not None else None,
            ),
            self.now_s,
        )
        self.known.add(one.member)
        self.take(effects)
        assert not refusal, f"{one.member} is refused: {refusal}"

    def _join_once_more(self, one: Process) -> None:
        """Its stream broke, which is seen only later."""
        old = one.member
        self._join(one)
        self._in(1.0, lambda: self._stream_ends(old))

    def _kill(self, one: Process) -> None:
        member, was, is_on_its_way = one.member, one.doing, one.returns_until_s > self.now_s
        self._end(one)
        one.returns_until_s = 0.0
        self.say(f"{one.name} is killed")
        if self.has_slots:
            assert one.slot is not None
            self.slots.append((one.slot, one.incarnation + 1))
        if was in (Doing.WAITS, Doing.TRAINS) or is_on_its_way:
            self._in(1.0, lambda: self._stream_ends(member))
        if self.dice.random() < 0.6:
            self._in(2.0, lambda: self._end_seen(one, member))

    def _stream_ends(self, member: str) -> None:
        self.say(f"the stream of {member} ends")
        self.disconnect(member)

    def _end_seen(self, one: Process, member: str) -> None:
        self.say(f"the end of {member} is seen")
        if one.slot is None or self.dice.random() < 0.5:
            self.take(self.membership.process_ended(member, "its process ended", self.now_s))
        else:
            ended = RankEnded(JOB, one.slot, one.host, 100 + one.number, "its agent saw it end", one.incarnation)
            self.take(self.membership.rank_ended(ended, self.now_s))

    def _leave(self, one: Process) -> None:
        self._end(one)
        self.say(f"{one.member} leaves for good")
        self.leave(one.member, failed=True)  # else its job is done, and nobody goes on with it

    def _be_still(self, one: Process, still: Still) -> None:
        one.still = still
        self.say(f"{one.member} is {still.name}")
        self._in(self.dice.choice([0.5, 5.0, 30.0]), lambda: self._go_on_with(one))
        assert one.world is not None
        witnesses = [other for other in self._those(Doing.TRAINS) if other.still is None]
        others = [other for other in witnesses if other.world is not None and other.world.epoch == one.world.epoch]
        if others and still is Still.CUT_OFF:
            witness = self.dice.choice(others)
            self.say(f"{witness.member} tells that its connections to {one.member} broke")
            report = pb.PeerLost(epoch=one.world.epoch, rank=one.rank)
            self.take(self.membership.peer_lost(witness.member, report, self.now_s))
            one.accused_in = one.world.epoch

    def _go_on_with(self, one: Process) -> None:
        self.say(f"{one.name} is {one.still and one.still.name} no more")
        one.still = None

    def _say_leaving(self, one: Process) -> None:
        """It leaves for good at its next commit."""
        assert one.world is not None
        one.leaves = True
        self.say(f"{one.member} will leave")
        leaving = pb.Leaving(epoch=one.world.epoch, reason="it got SIGTERM")
        self.take(self.membership.leaving(one.member, leaving, self.now_s))

    def _break(self, one: Process) -> None:
        one.doing = Doing.AWAY
        self.say(f"the stream of {one.member} breaks")
        self.disconnect(one.member)
        self._in(self.dice.choice([0.5, 5.0, 20.0]), lambda: self._attach(one))

    def _attach(self, one: Process) -> None:
        if one.doing is not Doing.AWAY:
            return
        if one.still is not None:
            self._in(1.0, lambda: self._attach(one))
            return
        assert one.world is not None
        self.say(f"{one.member} attaches")
        one.heard = len(self.told.get(one.member, []))
        attach = attach_request(request(one.member, pid=100 + one.number), one.world)
        proof = attach_proof(SECRET, attach, b"nonce")
        refused, effects = self.membership.attach(attach, b"nonce", proof, self.now_s)
        one.doing = Doing.TRAINS
        self.take(effects)
        if refused is not None:
            self.say(f"{one.member} is refused: {refused.sentence}")
            one.doing = Doing.OUTSIDE
            self._in(1.0, lambda: self._join(one))
        elif one.leaves:
            self._say_leaving(one)

    def _commit_all(self, trains: Sequence[Process]) -> None:
        for one in self.dice.sample(trains, len(trains)):
            self._commit(one)

    def _commit(self, one: Process) -> None:
        """It leaves its world to join the next one, if there is a reason."""
        if not one.is_to_reform or one.still is not None:
            return
        one.is_to_reform = False
        if one.leaves:
            self._leave(one)
            return
        old = one.member
        if self.dice.random() < 0.1:  # its goodbye is slow
            self._join(one)
            self._in(1.0, lambda: self._say_goodbye(old))
            return
        one.doing = Doing.OUTSIDE
        is_accused = self.hung_s and one.world is not None and one.accused_in == one.world.epoch
        one.returns_until_s = self.now_s + min(RETURN_S, 2 * self.hung_s if is_accused else RETURN_S)
        self._say_goodbye(old)
        if one.doing is Doing.OUTSIDE:
            slow = 0.5 if self.is_calm else self.dice.choice([0.1, 0.1, 3.0, 30.0])
            self._in(slow, lambda: self._join(one))

    def _say_goodbye(self, member: str) -> None:
        self.say(f"{member} leaves to join again")
        self.leave(member, returns=True)

    def _form(self, place: int) -> None:
        formation = self.pending.pop(place)
        self.epoch += 1
        self.say(f"the store gives epoch {self.epoch} to {', '.join(formation.requests)}")
        before = len(self.closed)
        effects = self.membership.formed(formation, self.epoch, SECRET, self.now_s)
        if effects:
            self._check_world(formation, self.closed[before:])
            self.record = formation.record(self.epoch, SECRET)
            self.known_epoch = self.epoch
        self.take(effects)

    def _take_over(self) -> None:
        """Another coordinator has all from the store: at times a world of which nobody was told."""
        forming = [one for one in self.pending if self.membership.is_forming(one)]
        gone = self.membership.gone(JOB) or pb.GoneRecord()
        self.say("another coordinator takes over")
        if not self.membership.knows(JOB) or not self.membership.gone(JOB):
            self.record = None
        if forming and self.dice.random() < 0.5:
            self.epoch += 1
            self.say(f"which finds epoch {self.epoch} of {', '.join(forming[0].requests)}")
            self.record, gone = forming[0].record(self.epoch, SECRET), pb.GoneRecord(epoch=self.epoch)
            self.worlds.append([self.of[member].name for member in forming[0].requests])
        self.pending.clear()
        self.later.clear()
        self.membership = Membership()
        self.known_epoch = 0
        self.known = set()
        if self.record is not None:
            self.known = {request.member_id for request in self.membership.restore(self.record, gone, self.now_s)}
            self.known_epoch = self.record.world.epoch
            # At times the other coordinator had written nothing.
            self.story = JobStory(JOB, self.story.record if self.epoch % 2 else None)
            self.story.taken_over(self.record, gone, Moment(self.now_s, self.now_s))
        for one in self.processes:
            one.accused_in = 0
            if one.doing is Doing.WAITS:
                one.doing, one.claims = Doing.OUTSIDE, 0
                self._in(1.0, lambda one=one: self._join(one))  # type: ignore[misc]
            elif one.doing is Doing.TRAINS:
                one.doing = Doing.AWAY
                self._in(3.0, lambda one=one: self._attach(one))  # type: ignore[misc]
            is_awaited = one.world is not None and one.world.members[one.rank].member_id in self.known
            one.returns_until_s = self.now_s + RETURN_S if is_awaited and one.doing is Doing.OUTSIDE else 0.0

    # -- what members are told -----------------------------------------------------------------------------------------
    def take(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Form):
                self.say(f"a world begins to form: {', '.join(effect.formation.requests)}")
                self._check_formation(effect.formation)
                self.pending.append(effect.formation)
            if isinstance(effect, Close):
                self.known.discard(effect.member_id)
            if isinstance(effect, Formed):
                self.story.formed(effect.world, effect.claims, Moment(self.now_s, self.now_s))
            if isinstance(effect, Gone):
                self.out.add((effect.told.epoch, effect.told.rank))
                self.story.gone(effect.told, Moment(self.now_s, self.now_s))
                self._check_loss(effect)
            super().take([effect])

    def _listen(self) -> None:
        job = self.membership._jobs.get(JOB)
        members = list(job.members()) if job else []
        assert len(members) == len(self.known) and self.known.issuperset(members), (  # noqa: PT018  (one fact)
            f"{sorted(members)} are members, but {sorted(self.known)} joined and were not closed"
        )
        for one in self.living:
            if one.doing not in (Doing.WAITS, Doing.TRAINS) or one.still is not None:
                continue
            events = self.told.get(one.member, [])
            while one.heard < len(events) and one.doing in (Doing.WAITS, Doing.TRAINS):
                one.heard += 1
                self._hear(one, events[one.heard - 1])

    def _hear(self, one: Process, event: pb.MembershipEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "world":
            one.world, one.doing, one.is_to_reform = event.world, Doing.TRAINS, False
            one.leaves = False
            one.rank = [member.member_id for member in event.world.members].index(one.member)
            self.say(f"{one.member} is rank {one.rank} of epoch {event.world.epoch}")
        elif kind == "refused":
            self.say(f"{one.member} is told: {event.refused.sentence}")
            one.doing = Doing.OUTSIDE
            self._in(1.0, lambda: self._join(one))
        elif kind in ("newcomers", "leavers", "gone") or (kind == "attached" and event.attached.gone):
            one.is_to_reform = True

    def _has_claim(self, one: Process) -> bool:
        return one.claims > 0 and one.claims == self.known_epoch

    # -- what must hold ----------------------------------------------------------------------------------------------
    def _check_loss(self, gone: Gone) -> None:
        """Nobody who trains, and has a stream, is lost."""
        for one in self._those(Doing.TRAINS):
            is_it = one.world is not None and (one.world.epoch, one.rank) == (gone.told.epoch, gone.told.rank)
            assert not is_it or one.still is not None or gone.told.orderly, f"{one.name} is lost, but trains"

    def _check_formation(self, formation: Formation) -> None:
        """When it begins to form."""
        assert self.fewest <= len(formation.places) <= self.most, f"{len(formation.places)} members"
        names = [self.of[place.member_id].name for place in formation.places]
        assert len(set(names)) == len(names), f"one process twice: {names}"
        for one in self.processes:
            if one.doing is Doing.WAITS and self._has_claim(one):
                assert one.member in formation.requests, f"{one.member} was in the last world and is left out"
            assert one.returns_until_s <= self.now_s, f"{one.name} is on its way and is left out"

    def _check_world(self, formation: Formation, closed: Sequence[str]) -> None:
        """When it has formed, as epoch `self.epoch`."""
        old = self.worlds[-1] if self.worlds and self.known_epoch else []
        members = [self.of[place.member_id] for place in formation.places]
        for one in members:
            assert one.doing in (Doing.WAITS, Doing.ENDED), f"{one.name} {one.doing}"
            # The goodbye of who has claimed its place may be late.
            self.out.add((one.claims, one.rank))
        for one in self._those(Doing.TRAINS, Doing.AWAY):
            assert one.world is not None
            assert (one.world.epoch, one.rank) in self.out, f"{one.name} is in epoch {one.world.epoch} still"
        kept = [one for one in members if self._has_claim(one)]
        names = [one.name for one in kept]
        assert names == [name for name in old if name in names], f"{names} had another order in {old}"
        for host in self.hosts:
            kinds = [one not in kept for one in members if one.host == host]
            assert kinds == sorted(kinds), f"a newcomer goes before others on {host}"
        self.worlds.append([one.name for one in members])
