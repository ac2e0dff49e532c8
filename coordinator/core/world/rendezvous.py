"""The rendezvous of one job: who forms its next world, and when.

    join ----> waiting --(enough members, none left of the old world)--> forming --(epoch from the store)--> world
                 ^                                                            |
                 +--------------- a member went away meanwhile ---------------+

A member is one process and one attempt (its member id); after shutdown() and init() the same process is a new
member, which proves by the old world's secret who it was: it claims its rank of that world. So that fast processes can
already join again while the goodbye of slow ones is still under way, joiners wait until every member of the old world
is gone or has itself joined again.

Members of an elastic job that leave their world to join the next one say so. `returning` has each of them until it
waits, its process has ended, or RETURN_S have passed: without it, the first of them to join again would make a world
alone. Each leaves its old stream open until it waits, so the stream's end tells that the process has ended.

Invariant: `awaited` has each rank of the running world whose member is there or returning, and which nobody who waits
has claimed. A world forms only while `awaited` is empty, and of members that waited when it began to form: if one of
those that wait goes away, the formation is void, and another one begins when there are enough again.

How many are enough: of a job of fixed size, exactly as many. Of an elastic job, as many as there may be at most; or the
fewest, where members of the last world are among them, which are not to wait for anybody else; or as many as its
launcher said it has started; or the fewest, when nobody new has come for the settle time (for SLOW_START times as long
where the launcher has started more).

A newcomer to an elastic job that runs waits too, with all members awaited: they are told (`Newcomers`), once nobody new
has come for the settle time and if there is a place, and join again at their next commit. Who comes beyond the most
members waits until another one is lost. So a spare process is one that waits.

A job may have a launcher that gives a whole host up when a process fails there. Then no world forms between the end of
that process and the launcher's decision, or it would have the other processes of the host: `undecided`.

Whether members live is not known here (liveness.py). The job tells of both (job_membership.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.base.errors import without_code
from horovod.base.proofs import is_equal, rejoin_proof
from horovod.base.words import plural, ranks_in_words, shortened
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.core.ranks import Seat, assign
from horovod.protos.v1 import membership_pb2 as pb

from .checks import MAX_SIZE, conflict_with, describe
from .effects import Close, Effect, Form, LookLater, Send, TellLater
from .life import Present
from .waiting import Formation, Sizes, Waiting, sizes_of
from .work import Anew, JobWork, Lost, Verdict, Waits

# Seconds that a member may take to join again. That takes less than 0.1 s where processors are free.
RETURN_S = 20.0
BROKEN_S = 3.0  # seconds to join again for a member whose last stream has broken, as it does when the process ends
DECISION_S = 3.0  # seconds in which a failed process exits and its launcher decides what that means
SLOW_START = 10  # processes that were started together come up to so many settle times apart


@dataclass
class LastWorld:
    """The last world of a job: with its secret, former members prove who they were, also after the world has ended."""

    epoch: int
    secret: bytes
    used: set[str] = field(default_factory=set)  # member ids that came with a proof; no member id may come twice
    is_done: bool = False  # a member has left it for good, without an error: its work is done
    # Slot of an elastic job's scheduler -> incarnation of the member in it.
    slots: Mapping[int, int] = field(default_factory=dict)
    work: JobWork = field(default_factory=JobWork)  # one for all worlds of the job
    is_elastic: bool = False


@dataclass
class Returning:
    """A member that has left its world to join the next one."""

    one: Present
    limit_s: float  # how long the member is awaited
    until_s: float


class Rendezvous:
    """Of one world; each world that forms leaves the job a new rendezvous."""

    def __init__(self, job: str, last: LastWorld | None, running: Mapping[int, Present]) -> None:
        """last: the job's last world, which may still run. running: its members that are there, by rank."""
        self.last = last
        self.work = last.work if last is not None else JobWork()
        self.waiting = Waiting()
        self.forming: Formation | None = None
        self.awaited = dict(running)
        self.returning: dict[str, Returning] = {}  # by member id
        self._job = job
        self._refused = ""  # why the last process that tried to join was refused, for the members that wait
        # In an elastic job: until when other newcomers may follow the last one, and processes that a launcher has
        # started.
        self._settled_at_s: float | None = None
        self._late_at_s: float | None = None
        self._announced = False  # the members of the running world have been told that newcomers wait
        # Slot and incarnation of processes that have failed -> until when their launcher's decision is awaited.
        self._undecided: dict[tuple[int, int], float] = {}
        self._held_up = ""  # what the waiting members wait for, if that is a process with the state

    # -- who ---------------------------------------------------------------------------------------------------------

    def prove(self, request: pb.JoinRequest) -> int | None:
        """Which rank of the job's last world this process was, if it can prove that. A proof counts once."""
        last = self.last
        if not request.HasField("rejoin") or last is None or request.rejoin.epoch != last.epoch:
            return None
        rejoin = request.rejoin
        expected = rejoin_proof(last.secret, request.job, rejoin.epoch, rejoin.rank, request.member_id)
        if request.member_id in last.used or not is_equal(rejoin.proof, expected):
            return None
        last.used.add(request.member_id)
        return rejoin.rank

    def has_come_before(self, request: pb.JoinRequest) -> bool:
        """Whether a process has proved with this member id already who it was."""
        return request.HasField("rejoin") and self.last is not None and request.member_id in self.last.used

    def conflict_with(self, request: pb.JoinRequest) -> str:
        """Why it can't be part of one world with those that wait already, or ""."""
        return conflict_with(self.waiting, request)

    def admit(self, request: pb.JoinRequest, claim: int | None, now_s: float) -> list[Effect]:
        """The process waits for the next world. claim: the rank of the last world that it has proved to have been."""
        self.waiting.add(request, claim)
        self.work.joins(request)
        effects: list[Effect] = []
        old = self.awaited.pop(claim, None) if claim is not None else None
        if old is not None and self.returning.pop(old.member_id, None) is not None:
            effects.append(Close(old.member_id))
        self._refused = ""
        self._undecided.pop((request.requested_rank, request.incarnation), None)  # it lives
        if sizes_of(request).is_elastic and claim is None:
            self._settled_at_s = now_s + request.settle_seconds
            self._late_at_s = now_s + SLOW_START * request.settle_seconds
            effects += [LookLater(self._job, until_s - now_s) for until_s in (self._settled_at_s, self._late_at_s)]
        return [*effects, *self.advance(now_s)]

    def refuse(self, request: pb.JoinRequest, sentence: str, now_s: float) -> list[Effect]:
        """The process may not wait here; those that do are told why."""
        if not self.waiting:
            return []
        self._refused = f"{describe(request)} was refused ({without_code(sentence).rstrip('.')})"
        return self._tell_progress(now_s)

    def withdraw(self, member_id: str, running: Mapping[int, Present]) -> None:
        """A member that waits has gone away. running: the members of the running world that are there, by rank."""
        claim = self.waiting.remove(member_id)
        if claim is not None and (one := running.get(claim)) is not None:
            self.awaited[claim] = one
        if self.forming is not None and member_id in self.forming.requests:
            self.forming = None

    def comes_back(self, one: Present, now_s: float) -> None:
        """A member of the running world has left it and joins again."""
        self.awaited[one.rank] = one
        self.returning[one.member_id] = Returning(one, RETURN_S, now_s + RETURN_S)

    def expect_within(self, rank: int, limit_s: float, now_s: float) -> None:
        """The member of `returning` that had this rank is awaited for so long at most, from now on."""
        for returning in self.returning.values():
            if returning.one.rank == rank:
                returning.limit_s = min(returning.limit_s, limit_s)
                returning.until_s = min(returning.until_s, now_s + limit_s)

    def disconnected(self, member_id: str, now_s: float) -> list[Effect]:
        """One of `returning`, which keeps its stream until it waits, has none any more."""
        self.expect_within(self.returning[member_id].one.rank, BROKEN_S, now_s)
        return [LookLater(self._job, BROKEN_S)]

    def gives_up(self, member_id: str) -> None:
        """One of `returning` does not join again."""
        self.awaited.pop(self.returning.pop(member_id).one.rank, None)

    def on_their_way(self) -> list[Present]:
        """Those of `returning`."""
        return [returning.one for returning in self.returning.values()]

    def restart_limits(self, now_s: float) -> None:
        """As `Membership.restart_limits`."""
        self.work.restart_limits(now_s)
        for returning in self.returning.values():
            returning.until_s = now_s + returning.limit_s

    def overdue(self, now_s: float) -> list[str]:
        """Those of `returning` that have taken too long."""
        return [member_id for member_id, returning in self.returning.items() if now_s >= returning.until_s]

    def returning_as(self, ended: RankEnded) -> list[Present]:
        """Those of `returning` whose process has ended, as an agent says; or the process above it that has its slot."""
        members = [one for one in self.on_their_way() if ended.host == one.request.host.name]
        same = [one for one in members if ended.pid == one.request.pid or ended.rank == one.started_as]
        return [one for one in same if ended.incarnation >= one.request.incarnation]

    def released(self, rank: int) -> None:
        """This rank of the running world is gone, so that nobody waits for it any more."""
        self.awaited.pop(rank, None)

    def undecided(self, request: pb.JoinRequest, now_s: float) -> list[Effect]:
        """This process has failed, and its launcher may end others because of that, which are to be in no world."""
        self._undecided[request.requested_rank, request.incarnation] = now_s + DECISION_S
        return [LookLater(self._job, DECISION_S)]

    def decided(self, slot: int, incarnation: int, now_s: float) -> list[Effect]:
        """The launcher knows of the end of this process. It tells of those that it ends because of that at once."""
        known = [one for one in self._undecided if one[0] == slot and one[1] <= incarnation]
        for one in known:
            del self._undecided[one]
        return self.advance(now_s) if known else []

    # -- when --------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> list[Effect]:
        """Forms the next world if it can, else tells the waiting members what is missing."""
        first = self.waiting.first
        if self.forming is not None or first is None or self.awaited or self._undecided:
            return self._tell_progress(now_s)
        verdict = self.verdict(self.waiting.requests.values(), now_s)
        self._held_up = verdict.sentence if isinstance(verdict, Waits) else ""
        if isinstance(verdict, Lost):
            return self._refuse_all(verdict.sentence)
        if not self._held_up and self._are_enough(first, now_s):
            members = self._members(first)
            places = assign(_seats(members, sizes_of(first).is_elastic))
            if isinstance(places, tuple):
                requests = {one.member_id: one for one in members}
                anew = verdict.sentence if isinstance(verdict, Anew) else ""
                work = pb.JobWork(first_epoch=self.last.epoch + 1) if anew and self.last else self.work.record()
                self.forming = Formation(self._job, requests, places, self._newcomers(members), work, anew)
                return [Form(self.forming)]
            # join() refuses every request that could lead here; to wait with a message is still better than to crash.
            self._refused = places
        return self._tell_progress(now_s)

    def verdict(self, requests: Iterable[pb.JoinRequest], now_s: float) -> Verdict:
        """Whether an elastic world may form of these, as far as what the job has committed is concerned."""
        requests = list(requests)
        if self.awaited or not requests or not sizes_of(requests[0]).is_elastic:
            return None
        return self.work.verdict(self._job, requests, now_s)

    def _refuse_all(self, sentence: str) -> list[Effect]:
        refused = pb.MembershipEvent(refused=pb.Refused(sentence=sentence))
        effects: list[Effect] = []
        for member_id in list(self.waiting.requests):
            self.withdraw(member_id, {})
            effects += [Send(member_id, refused), Close(member_id)]
        return effects

    def _newcomers(self, members: Sequence[pb.JoinRequest]) -> frozenset[str]:
        """The ids of those whose state counts for nothing beside that of the others."""
        if not sizes_of(members[0]).is_elastic:
            return frozenset()
        if self.work.holder(members) is not None:
            return frozenset(one.member_id for one in members if not self.work.holds(one))
        if old := self.waiting.claim_of.keys():
            return frozenset(one.member_id for one in members if one.member_id not in old)
        older = frozenset(one.member_id for one in members if self.work.is_older(one))
        return older if len(older) < len(members) else frozenset()

    def _are_enough(self, first: pb.JoinRequest, now_s: float) -> bool:
        sizes, count = sizes_of(first), len(self.waiting)
        if count >= sizes.most:
            return True
        if not sizes.is_elastic or count < sizes.fewest:
            return False
        if self.waiting.claims:
            return True
        if self.waiting.expected and count < self.waiting.expected:
            return self._late_at_s is None or now_s >= self._late_at_s
        return bool(self.waiting.expected) or self._settled_at_s is None or now_s >= self._settled_at_s

    def _members(self, first: pb.JoinRequest) -> list[pb.JoinRequest]:
        """Those that the world has, in rank order: those of the last world keep their order; others follow in the order
        of the numbers that a launcher gave them, and then as they came.
        """
        waiting = self.waiting
        old = [waiting.requests[waiting.claims[rank]] for rank in sorted(waiting.claims)]
        new = [request for member_id, request in waiting.requests.items() if member_id not in waiting.claim_of]
        new.sort(key=lambda request: request.requested_rank if request.HasField("requested_rank") else MAX_SIZE)
        members = [*old, *new]
        holder = self.work.holder(members) if sizes_of(first).is_elastic else None
        # The user's own State may broadcast from rank 0. Members may be lost when only some have saved a commit.
        if holder is not None and not (self.work.holds(members[0]) and members[0].commits == holder.commits):
            members.remove(holder)
            members.insert(0, holder)
        return members[: sizes_of(first).most]

    def settle(self, now_s: float) -> list[Effect]:
        """To be called when time has passed: a world may form, or newcomers may be announced, since no others came."""
        effects: list[Effect] = []
        if self._settled_at_s is not None and now_s >= self._settled_at_s:
            self._settled_at_s = None
            effects += [*self.advance(now_s), *self._announce()]
        if self._late_at_s is not None and now_s >= self._late_at_s:
            self._late_at_s = None
            effects += self.advance(now_s)
        if overdue := [one for one, until_s in self._undecided.items() if now_s >= until_s]:
            for one in overdue:
                del self._undecided[one]
            effects += self.advance(now_s)
        if self._held_up:
            effects += self.advance(now_s)
        return effects

    def _announce(self) -> list[Effect]:
        """Tells the members of the running world that newcomers wait for whom there is a place."""
        first = self.waiting.first
        if first is None or self._announced or len(self.awaited) + len(self.waiting.claims) >= sizes_of(first).most:
            return []
        self._announced = True
        return [effect for one in self.awaited.values() for effect in self.announced_to(one.member_id)]

    def announced_to(self, member_id: str) -> list[Effect]:
        """What a member of the running world is told of newcomers, if the others were told."""
        count = len(self.waiting) - len(self.waiting.claims)
        if not self._announced or not count or self.last is None:
            return []
        return [Send(member_id, pb.MembershipEvent(newcomers=pb.Newcomers(epoch=self.last.epoch, count=count)))]

    def leftover(self, formation: Formation) -> list[pb.JoinRequest]:
        """Those that wait, and for whom there is no place in the world that forms."""
        return [one for member_id, one in self.waiting.requests.items() if member_id not in formation.requests]

    def is_forming(self, formation: Formation) -> bool:
        """False once a member of `formation` has gone away, so that its world does not form."""
        return self.forming is formation

    def forget_refused(self) -> None:
        """Those that wait are no longer told why another process was refused."""
        self._refused = ""

    # -- what the waiting members are told -----------------------------------------------------------------------------

    def progress_is_due(self, now_s: float) -> list[Effect]:
        """The time that TellLater asked for has come."""
        self.waiting.tell_later = False
        return self._tell_progress(now_s)

    def _tell_progress(self, now_s: float) -> list[Effect]:
        """Tells all waiting members how far the job is: now, or later if they were told just before."""
        if not self.waiting or self.waiting.tell_later:
            return []
        delay_s = self.waiting.tell_after_s(now_s)
        if delay_s > 0:
            self.waiting.tell_later = True
            return [TellLater(self._job, delay_s)]
        sentence = self.progress()
        effects = self.tell(sentence) if sentence else []
        if effects:
            self.waiting.told_at_s = now_s
        return effects

    def tell(self, sentence: str) -> list[Effect]:
        """Tells it to the waiting members that were told something else last."""
        told = self.waiting.told
        news = [one for one in self.waiting.requests if told.get(one) != sentence]
        told.update(dict.fromkeys(news, sentence))
        event = pb.MembershipEvent(progress=pb.Progress(sentence=sentence, refused=bool(self._refused)))
        first = self.waiting.first
        if first is None or not (self.awaited or self._held_up) or not sizes_of(first).is_elastic:
            return [Send(member_id, event) for member_id in news]
        parked = pb.MembershipEvent(progress=pb.Progress(sentence=sentence, parked=True, refused=bool(self._refused)))
        return [Send(one, event if one in self.waiting.claim_of else parked) for one in news]

    def progress(self) -> str:
        """What the waiting members wait for, as a sentence; "" while they wait for the store alone."""
        first = self.waiting.first
        if first is None or self.forming is not None:
            return ""
        sizes = sizes_of(first)
        is_late = self._late_at_s is None
        fewest = sizes.fewest if self.waiting.claims or is_late else max(sizes.fewest, self.waiting.expected)
        missing = max(0, fewest - len(self.waiting))
        parts: list[str] = []
        if sizes.is_elastic and self.awaited and not self.waiting.claims:
            return self._parked_in_words(sizes)
        if missing and first.HasField("requested_rank") and not sizes.is_elastic:
            parts.append(f"waiting for {ranks_in_words(set(range(first.size)) - self.waiting.by_rank.keys())}")
        elif missing:
            parts.append(f"waiting for {missing} more")
        elif self._settled_at_s is not None and not self.waiting.claims:
            parts.append("waiting for others that may still come")
        if self._held_up:
            parts.append(self._held_up)
        if self._undecided:
            failed = ranks_in_words({slot for slot, _ in self._undecided}, "slot")
            parts.append(f"waiting for the end of the failed processes ({failed}), to know who is in the next world")
        if self.awaited and self.last:
            who = shortened([str(one) for one in self.awaited.values()], 4)
            parts.append(f"waiting until world {self.last.epoch} has ended, which still has {who}")
        if self._refused:
            parts.append(self._refused)
        return f"{len(self.waiting)} of {sizes} of job {self._job!r} joined; {'; '.join(parts)}."

    def _parked_in_words(self, sizes: Sizes) -> str:
        assert self.last is not None
        members = f"{plural(len(self.awaited), 'member')} in world {self.last.epoch}"
        who = f"{plural(len(self.waiting), 'process')} {'waits' if len(self.waiting) == 1 else 'wait'}"
        if len(self.awaited) >= sizes.most:
            return f"Job {self._job!r} runs with {members}, the most that it may have; {who} for a place."
        return f"Job {self._job!r} runs with {members}; {who} to join at their next commit."


def _seats(members: Sequence[pb.JoinRequest], is_elastic: bool) -> list[Seat]:
    """Of an elastic job, its launcher's numbers of processes are no ranks."""
    seats = []
    for one in members:
        number = one.requested_rank if one.HasField("requested_rank") else None
        seats.append(Seat(one.member_id, one.host.name, *((None, number) if is_elastic else (number, None))))
    return seats
