"""The life of a job's worlds: who joins, when a world forms, who leaves, who is lost.

    join ----> waiting --(size members, nobody of the old world left)--> forming --(epoch from the store)--> world
                 ^                                                          |
                 +--------------- a member went away meanwhile -------------+

A member is one process and one attempt (its member id); after shutdown() and init() the same process is a new
member. So that fast processes can already join again while the goodbye of slow ones is still under way, joiners
wait until every member of the old world is gone or has itself joined again (which host and pid tell). A process
that was never part of a running, complete world is refused instead: it belongs to another job or was started once
too often.

Every method takes the time it needs as an argument and returns effects: what to send to whom. The caller carries
them out in order and feeds `formed` with an epoch from the store, where it grows by compare-and-swap.
"""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from horovod.protos.v1 import membership_pb2 as pb

from .checks import conflict_with, describe, refusal_of
from .ranks import Place, Seat, assign
from .words import capitalized, plural, process_in_words, ranks_in_words, shortened


@dataclass(frozen=True)
class Send:
    member_id: str
    event: pb.MembershipEvent


@dataclass(frozen=True)
class Close:
    """Nothing more will be sent to this member."""

    member_id: str


@dataclass(frozen=True)
class Form:
    """Everybody is here: take the next epoch and call `formed` with it."""

    formation: "Formation"


@dataclass(frozen=True)
class Gone:
    """A rank of a running world left or was lost; what others must be told is in effects of its own."""

    job: str
    epoch: int
    rank: int


@dataclass(frozen=True)
class Ended:
    """The last member of a world is gone."""

    job: str
    epoch: int


Effect = Send | Close | Form | Gone | Ended

MAX_REMEMBERED_JOBS = 1024

_Process = tuple[str, str, int]  # host name, shared-memory domain, pid


@dataclass(eq=False)
class Formation:
    """A world about to form. Compared by identity: when a member goes away meanwhile, a later one takes its place."""

    job: str
    requests: dict[str, pb.JoinRequest]
    places: tuple[Place, ...]

    def world(self, epoch: int, secret: bytes) -> pb.World:
        members = []
        for place in self.places:
            request = self.requests[place.member_id]
            members.append(
                pb.Member(
                    rank=place.rank,
                    local_rank=place.local_rank,
                    local_size=place.local_size,
                    cross_rank=place.cross_rank,
                    cross_size=place.cross_size,
                    member_id=place.member_id,
                    host=request.host,
                    pid=request.pid,
                    endpoints=request.endpoints,
                    segment_address=request.segment_address,
                )
            )
        options = next(iter(self.requests.values())).options
        return pb.World(job=self.job, epoch=epoch, members=members, secret=secret, options=options)


@dataclass
class _Present:
    member: pb.Member
    heard_at_s: float


@dataclass
class _Job:
    name: str
    waiting: dict[str, pb.JoinRequest] = field(default_factory=dict)  # in join order
    told: dict[str, str] = field(default_factory=dict)  # progress sentence that each waiting member saw last
    forming: Formation | None = None
    refused: str = ""  # why the last one that tried to join could not; waiting members want to know
    world: pb.World | None = None
    present: dict[str, _Present] = field(default_factory=dict)

    def old_members_to_wait_for(self) -> list[pb.Member]:
        """Members of the old world that neither went away nor joined again."""
        joined_again = Counter(_process(request.host, request.pid) for request in self.waiting.values() if request.pid)
        remaining = []
        for present in self.present.values():
            process = _process(present.member.host, present.member.pid)
            if joined_again[process] > 0:
                joined_again[process] -= 1
            else:
                remaining.append(present.member)
        return remaining

    def breaks_up(self) -> bool:
        """True when some member of the running world went away or joined again."""
        if self.world is None:
            return True
        return len(self.present) < len(self.world.members) or len(self.old_members_to_wait_for()) < len(self.present)

    def welcomes_back(self, request: pb.JoinRequest) -> bool:
        """True when the request comes from a process that is a member of the running world."""
        process = _process(request.host, request.pid)
        return request.pid != 0 and any(
            _process(member.host, member.pid) == process for member in self.old_members_to_wait_for()
        )


def _process(host: pb.HostIdentity, pid: int) -> _Process:
    return host.name, host.shared_memory_domain, pid


def describe_member(member: pb.Member) -> str:
    return process_in_words(member.rank, member.pid, member.host.name)


class Membership:
    """All jobs of one coordinator."""

    def __init__(self, heartbeat_timeout_s: float = 30.0) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._jobs: dict[str, _Job] = {}
        self._job_of: dict[str, _Job] = {}  # by member id
        # Processes of each job's latest world in rank order, also after it ended: who joins again gets its rank again.
        self._last_processes: OrderedDict[str, tuple[_Process, ...]] = OrderedDict()

    # -- joining -----------------------------------------------------------------------------------------------------

    def join(self, request: pb.JoinRequest) -> tuple[str, list[Effect]]:
        """The sentence why `request` is refused ("" when it is not), and the effects on members."""
        refusal = refusal_of(request)
        if refusal:
            return refusal, []
        job = self._jobs.get(request.job) or _Job(request.job)
        refusal = self._refusal(job, request)
        if refusal:
            if not job.waiting:
                return refusal, []
            job.refused = f"{describe(request)} was refused ({refusal.rstrip('.')})"
            return refusal, self._progress(job)
        self._jobs[job.name] = job
        self._job_of[request.member_id] = job
        job.waiting[request.member_id] = request
        job.refused = ""
        return "", self._advance(job)

    def _refusal(self, job: _Job, request: pb.JoinRequest) -> str:
        """Why `request` can't be part of the job's next world."""
        if request.member_id in self._job_of:
            return (
                f"The member id {request.member_id!r} of {describe(request)} is already in use; every process and "
                "every attempt to join needs an id of its own."
            )
        if job.world is not None and not job.breaks_up() and not job.welcomes_back(request):
            who = shortened([describe_member(member) for member in job.world.members], 4)
            return (
                f"Job {job.name!r} already runs with {plural(len(job.world.members), 'member')} in epoch "
                f"{job.world.epoch}: {who}. Wait until it has ended, or give this job another name (HOROVOD_JOB)."
            )
        return conflict_with(job.waiting.values(), request)

    def _advance(self, job: _Job) -> list[Effect]:
        """Forms the next world if it can, else tells the waiting members what is missing."""
        if job.forming is None and job.waiting:
            size = next(iter(job.waiting.values())).size
            if len(job.waiting) == size and not job.old_members_to_wait_for():
                places = assign(self._seats(job))
                if isinstance(places, tuple):
                    job.forming = Formation(job.name, dict(job.waiting), places)
                    return [Form(job.forming)]
                # join() refuses every request that could lead here; to wait in words is still better than to crash.
                job.refused = places
        return self._progress(job)

    def _seats(self, job: _Job) -> list[Seat]:
        """Who waits, in rank order: the last world's members as they were, then others as they came."""
        came: dict[_Process, deque[str]] = {}
        for member_id, request in job.waiting.items():
            came.setdefault(_process(request.host, request.pid), deque()).append(member_id)
        order: dict[str, None] = {}
        for process in self._last_processes.get(job.name, ()):
            if came.get(process):
                order[came[process].popleft()] = None
        order.update(dict.fromkeys(job.waiting))
        seats = []
        for member_id in order:
            request = job.waiting[member_id]
            rank = request.requested_rank if request.HasField("requested_rank") else None
            seats.append(Seat(member_id, request.host.name, rank))
        return seats

    def _progress(self, job: _Job) -> list[Effect]:
        sentence = self._progress_sentence(job)
        effects: list[Effect] = []
        for member_id in job.waiting:
            if sentence and job.told.get(member_id) != sentence:
                job.told[member_id] = sentence
                effects.append(Send(member_id, pb.MembershipEvent(progress=pb.Progress(sentence=sentence))))
        return effects

    def _progress_sentence(self, job: _Job) -> str:
        if not job.waiting or job.forming is not None:
            return ""
        first = next(iter(job.waiting.values()))
        missing = first.size - len(job.waiting)
        parts: list[str] = []
        if missing and first.HasField("requested_rank"):
            taken = {request.requested_rank for request in job.waiting.values()}
            parts.append(f"waiting for {ranks_in_words(set(range(first.size)) - taken)}")
        elif missing:
            parts.append(f"waiting for {missing} more")
        if old := job.old_members_to_wait_for():
            who = shortened([describe_member(member) for member in old], 4)
            epoch = job.world.epoch if job.world else 0
            parts.append(f"waiting until the world of epoch {epoch} has ended, which still has {who}")
        if job.refused:
            parts.append(job.refused)
        return f"{len(job.waiting)} of {plural(first.size, 'member')} of job {job.name!r} joined; {'; '.join(parts)}."

    # -- forming -----------------------------------------------------------------------------------------------------

    def is_forming(self, formation: Formation) -> bool:
        """False once a member of `formation` went away; its world will not be."""
        job = self._jobs.get(formation.job)
        return job is not None and job.forming is formation

    def formed(self, formation: Formation, epoch: int, secret: bytes, now_s: float) -> list[Effect]:
        """The store gave `formation` its epoch. Nothing happens when it is no longer forming (the epoch is skipped)."""
        if not self.is_forming(formation):
            return []
        job = self._jobs[formation.job]
        effects: list[Effect] = []
        if job.world is not None:
            # Only members that have joined again are left: their goodbyes are late, and nobody waits for them.
            effects += [Close(member_id) for member_id in job.present]
            effects.append(Ended(job.name, job.world.epoch))
            for member_id in job.present:
                del self._job_of[member_id]
        job.world = formation.world(epoch, secret)
        job.present = {member.member_id: _Present(member, now_s) for member in job.world.members}
        self._last_processes[job.name] = tuple(_process(member.host, member.pid) for member in job.world.members)
        self._last_processes.move_to_end(job.name)
        if len(self._last_processes) > MAX_REMEMBERED_JOBS:
            self._last_processes.popitem(last=False)
        job.waiting = {}
        job.told = {}
        job.forming = None
        event = pb.MembershipEvent(world=job.world)
        return [*effects, *(Send(member_id, event) for member_id in job.present)]

    # -- living ------------------------------------------------------------------------------------------------------

    def heartbeat(self, member_id: str, epoch: int, now_s: float) -> str:
        """Notes a sign of life; the sentence why it is refused, or ""."""
        job = self._job_of.get(member_id)
        if job is None:
            return f"Member {member_id!r} is not part of any world here; call hvd.init() to join again."
        present = job.present.get(member_id)
        if present is None or job.world is None:
            return ""  # still waiting for its world
        if epoch not in (0, job.world.epoch):  # 0: sent before its world arrived
            return (
                f"{capitalized(describe_member(present.member))} speaks of epoch {epoch} of job {job.name!r}, which is "
                f"in epoch {job.world.epoch} now."
            )
        present.heard_at_s = now_s
        return ""

    def tick(self, now_s: float) -> list[Effect]:
        """Declares members lost that were silent for too long."""
        effects: list[Effect] = []
        for job in list(self._jobs.values()):
            for member_id, present in list(job.present.items()):
                silent_s = now_s - present.heard_at_s
                if silent_s <= self._heartbeat_timeout_s:
                    continue
                cause = f"it sent no heartbeat for {silent_s:.0f} s; it is stopped, or its host or network is down"
                effects += self.lost(member_id, cause)
                # In case it lives after all, it shall know that the others go on without it.
                sentence = f"{capitalized(describe_member(present.member))} was declared lost: {cause}."
                effects.append(Send(member_id, pb.MembershipEvent(refused=pb.Refused(sentence=sentence))))
                effects.append(Close(member_id))
        return effects

    def leave(self, member_id: str, reason: str) -> list[Effect]:
        """An orderly goodbye. Unknown members are ignored: a goodbye may come after its world has ended."""
        return [
            *self._remove(member_id, orderly=True, cause=reason or "it called hvd.shutdown() or ended"),
            Close(member_id),
        ]

    def lost(self, member_id: str, cause: str) -> list[Effect]:
        """The member is gone without a goodbye. `cause` completes "rank 1 was lost: ..." and has no full stop."""
        return self._remove(member_id, orderly=False, cause=cause)

    def _remove(self, member_id: str, *, orderly: bool, cause: str) -> list[Effect]:
        job = self._job_of.pop(member_id, None)
        if job is None:
            return []
        effects: list[Effect] = []
        if member_id in job.waiting:
            del job.waiting[member_id]
            job.told.pop(member_id, None)
            job.forming = None
        elif (gone := job.present.pop(member_id, None)) is not None and job.world is not None:
            event = pb.MembershipEvent(
                gone=pb.MemberGone(
                    epoch=job.world.epoch,
                    rank=gone.member.rank,
                    host=gone.member.host.name,
                    orderly=orderly,
                    sentence=f"{capitalized(describe_member(gone.member))} {'left' if orderly else 'was lost'}: "
                    f"{cause.rstrip('.')}.",
                )
            )
            effects += [Send(other, event) for other in job.present]
            effects.append(Gone(job.name, job.world.epoch, gone.member.rank))
            if not job.present:
                effects.append(Ended(job.name, job.world.epoch))
                job.world = None
        if not job.waiting and job.world is None:
            self._jobs.pop(job.name, None)
        return effects + self._advance(job)

    # -- questions ---------------------------------------------------------------------------------------------------

    def world_of(self, job_name: str) -> pb.World | None:
        job = self._jobs.get(job_name)
        return job.world if job else None

    def stranger(self, job_name: str, epoch: int, member_id: str, rank: int) -> str:
        """Why somebody who says to be `rank` of that world is not believed, or ""."""
        job = self._jobs.get(job_name)
        if job is None or job.world is None:
            return f"Job {job_name!r} has no running world; epoch {epoch} is over."
        if epoch != job.world.epoch:
            return f"Epoch {epoch} of job {job_name!r} is over; it is in epoch {job.world.epoch} now."
        present = job.present.get(member_id)
        if present is None:
            return f"Member {member_id!r} is not part of epoch {epoch} of job {job_name!r}."
        if present.member.rank != rank:
            return f"Member {member_id!r} of job {job_name!r} is rank {present.member.rank}, not rank {rank}."
        return ""
