"""The rendezvous of one job: who forms its next world, and when.

    join ----> waiting --(size members, none left of the old world)--> forming --(epoch from the store)--> world
                 ^                                                          |
                 +--------------- a member went away meanwhile -------------+

A member is one process and one attempt (its member id); after shutdown() and init() the same process is a new
member, which proves by the old world's secret who it was: it claims its rank of that world. So that fast processes can
already join again while the goodbye of slow ones is still under way, joiners wait until every member of the old world
is gone or has itself joined again.

Invariant: `awaited` has each rank of the running world whose member is there and which nobody who waits has claimed. A
world forms only while `awaited` is empty, and of exactly the members that waited when it began to form: if one of them
goes away, the formation is void, and another one begins when the job has its size again.

Whether members live is not known here (liveness.py). The job tells of both (job_membership.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from horovod.base.errors import without_code
from horovod.base.proofs import is_equal, rejoin_proof
from horovod.base.words import plural, ranks_in_words, shortened
from horovod.coordinator.core.ranks import Seat, assign
from horovod.protos.v1 import membership_pb2 as pb

from .checks import conflict_with, describe
from .effects import Effect, Form, Send, TellLater
from .formation import Formation
from .present import Present
from .waiting import Waiting


@dataclass
class LastWorld:
    """The last world of a job: with its secret, former members prove who they were, also after the world has ended."""

    epoch: int
    secret: bytes
    used: set[str] = field(default_factory=set)  # member ids that came with a proof; no member id may come twice


class Rendezvous:
    """Of one world; each world that forms leaves the job a new rendezvous."""

    def __init__(self, job: str, last: LastWorld | None, running: Mapping[int, Present]) -> None:
        """last: the job's last world, which may still run. running: its members that are there, by rank."""
        self.last = last
        self.waiting = Waiting()
        self.forming: Formation | None = None
        self.awaited = dict(running)
        self._job = job
        self._refused = ""  # why the last process that tried to join was refused, for the members that wait

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
        if claim is not None:
            self.awaited.pop(claim, None)
        self._refused = ""
        return self.advance(now_s)

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
        self.forming = None

    def released(self, rank: int) -> None:
        """This rank of the running world is gone, so that nobody waits for it any more."""
        self.awaited.pop(rank, None)

    # -- when --------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> list[Effect]:
        """Forms the next world if it can, else tells the waiting members what is missing."""
        first = self.waiting.first
        if self.forming is None and first is not None and len(self.waiting) == first.size and not self.awaited:
            places = assign(self._seats())
            if isinstance(places, tuple):
                self.forming = Formation(self._job, dict(self.waiting.requests), places)
                return [Form(self.forming)]
            # join() refuses every request that could lead here; to wait in words is still better than to crash.
            self._refused = places
        return self._tell_progress(now_s)

    def _seats(self) -> list[Seat]:
        """The waiting members in rank order: those of the last world keep their order, others follow as they came."""
        order = dict.fromkeys([self.waiting.claims[rank] for rank in sorted(self.waiting.claims)])
        order.update(dict.fromkeys(self.waiting.requests))
        seats = []
        for member_id in order:
            request = self.waiting.requests[member_id]
            rank = request.requested_rank if request.HasField("requested_rank") else None
            seats.append(Seat(member_id, request.host.name, rank))
        return seats

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
        event = pb.MembershipEvent(progress=pb.Progress(sentence=sentence))
        return [Send(member_id, event) for member_id in news]

    def progress(self) -> str:
        """What the waiting members wait for, as a sentence; "" while they wait for the store alone."""
        first = self.waiting.first
        if first is None or self.forming is not None:
            return ""
        missing = first.size - len(self.waiting)
        parts: list[str] = []
        if missing and first.HasField("requested_rank"):
            parts.append(f"waiting for {ranks_in_words(set(range(first.size)) - self.waiting.by_rank.keys())}")
        elif missing:
            parts.append(f"waiting for {missing} more")
        if self.awaited and self.last:
            who = shortened([str(one) for one in self.awaited.values()], 4)
            parts.append(f"waiting until the world of epoch {self.last.epoch} has ended, which still has {who}")
        if self._refused:
            parts.append(self._refused)
        return f"{len(self.waiting)} of {plural(first.size, 'member')} of job {self._job!r} joined; {'; '.join(parts)}."
