"""The life of a job's worlds: who joins, when a world forms, who leaves, who is lost.

    join ----> waiting --(size members, none left of the old world)--> forming --(epoch from the store)--> world
                 ^                                                          |
                 +--------------- a member went away meanwhile -------------+

A member is one process and one attempt (its member id); after shutdown() and init() the same process is a new
member, which proves by the old world's secret who it was. So that fast processes can already join again while the
goodbye of slow ones is still under way, joiners wait until every member of the old world is gone or has itself joined
again. A process that has no such proof can neither end nor enter a running, complete world: it is refused, because it
belongs to another job or was started once too often. It may wait while a member of the world is away.

A member whose stream breaks is away and may come back (`attach`). When it counts as lost is in life.py.

A coordinator that takes over from another one begins with what that had written down (`restore`): all members of the
world are away and come back. A process that joins instead, and is one of them by its pid and start time, never heard of
that world, so its place there is given up.

Every method takes the time it needs as an argument and returns effects: what to send to whom. The caller carries
them out in order and feeds `formed` with an epoch from the store, where it grows by compare-and-swap.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Set

from horovod.base.proofs import attach_proof, is_equal, rejoin_proof
from horovod.base.words import capitalized, plural, shortened
from horovod.coordinator.core.attendance import Attendance
from horovod.coordinator.core.ending import RankEnded
from horovod.coordinator.core.ranks import Seat, assign
from horovod.protos.v1 import membership_pb2 as pb
from horovod.protos.v1 import negotiation_pb2

from .checks import conflict_with, describe, refusal_of, refusal_of_attach
from .effects import Close, Effect, Form, Gone, LookLater, Record, Send, TellLater, WorldEnded
from .formation import Formation, requests_of
from .job_membership import JobMembership, LastWorld, Present
from .life import AGENT_S, NEVER_HEARD_OF_ITS_WORLD, PROCESS_ENDED
from .overview import JobOverview, overview_of

MAX_REMEMBERED_JOBS = 1024
MAX_WITNESSES = 2  # witnesses that are asked about one member
# How long a world without any connected member is kept: its members may still train, when only their connections to
# this coordinator broke. A process that wants to join the job ends the wait.
DORMANT_S = 3600.0


class Membership:
    """All jobs of one coordinator."""

    def __init__(self, grace_s: float = 10.0, has_agent: Callable[[str, int], bool] = lambda job, rank: False) -> None:
        """grace_s: how long a member may be away while no witness says that its process lives. has_agent: whether an
        agent will report how the process ends that was started as this rank of the job.
        """
        self._grace_s = grace_s
        self._has_agent = has_agent
        self._jobs: dict[str, JobMembership] = {}
        self._job_of: dict[str, JobMembership] = {}  # member id -> its job
        self._last: OrderedDict[str, LastWorld] = OrderedDict()  # job -> the last world that it had

    # -- joining -----------------------------------------------------------------------------------------------------

    def join(self, request: pb.JoinRequest, now_s: float) -> tuple[str, list[Effect]]:
        """The sentence why `request` is refused ("" when it is not), and the effects on members."""
        refusal = refusal_of(request)
        if refusal:
            return refusal, []
        job = self._jobs.get(request.job) or JobMembership(request.job)
        effects: list[Effect] = []
        claim: int | None = None
        if (unaware := job.unaware(request)) is not None:
            effects += self._remove(
                unaware.member_id, orderly=False, cause=NEVER_HEARD_OF_ITS_WORLD, now_s=now_s, never_stood=True
            )
            job = self._jobs.get(request.job) or JobMembership(request.job)
        for earlier_process in job.predecessors(request):
            cause = "another process was started in its place"
            effects += self._remove(earlier_process.member_id, orderly=False, cause=cause, now_s=now_s)
            job = self._jobs.get(request.job) or JobMembership(request.job)
        if request.member_id not in self._job_of and (claim := self._proven_rank(request)) is not None:
            self._last[job.name].used.add(request.member_id)
            if (earlier := job.waiting.claims.get(claim)) is not None:
                # The same process tries again; the end of its earlier attempt has not been seen here yet.
                effects += self._remove(earlier, orderly=False, cause="it joined once more", now_s=now_s)
        refusal = self._refusal(job, request, claim)
        if refusal:
            if not job.waiting:
                return refusal, effects
            job.refused = f"{describe(request)} was refused ({refusal.rstrip('.')})"
            return refusal, effects + self._progress(job, now_s)
        self._jobs[job.name] = job
        self._job_of[request.member_id] = job
        job.waiting.add(request, claim)
        if claim is not None:
            job.claimed(claim)
        job.refused = ""
        return "", effects + self._advance(job, now_s)

    def _proven_rank(self, request: pb.JoinRequest) -> int | None:
        """Which rank of the job's last world this process was, if it can prove that."""
        last = self._last.get(request.job)
        if not request.HasField("rejoin") or last is None or request.rejoin.epoch != last.epoch:
            return None
        rejoin = request.rejoin
        expected = rejoin_proof(last.secret, request.job, rejoin.epoch, rejoin.rank, request.member_id)
        if request.member_id in last.used or not is_equal(rejoin.proof, expected):
            return None
        return rejoin.rank

    def _refusal(self, job: JobMembership, request: pb.JoinRequest, claim: int | None) -> str:
        """Why `request` can't be part of the job's next world."""
        last = self._last.get(job.name)
        used = claim is None and last is not None and request.HasField("rejoin") and request.member_id in last.used
        if used or request.member_id in self._job_of:
            return (
                f"The member id {request.member_id!r} of {describe(request)} is already in use; every process and "
                "every attempt to join needs an id of its own."
            )
        if (later := job.successor(request)) is not None:
            return f"{capitalized(describe(request))} was replaced: {describe(later)} was started later in its place."
        if claim is None and job.is_whole():
            return _already_runs(job)
        return conflict_with(job.waiting, request)

    def _advance(self, job: JobMembership, now_s: float) -> list[Effect]:
        """Forms the next world if it can, else tells the waiting members what is missing."""
        first = job.waiting.first
        if job.forming is None and first is not None and len(job.waiting) == first.size and not job.awaited:
            places = assign(self._seats(job))
            if isinstance(places, tuple):
                job.forming = Formation(job.name, dict(job.waiting.requests), places)
                return [Form(job.forming)]
            # join() refuses every request that could lead here; to wait in words is still better than to crash.
            job.refused = places
        return self._progress(job, now_s)

    def _seats(self, job: JobMembership) -> list[Seat]:
        """The waiting members in rank order: those of the last world keep their order, others follow as they came."""
        order = dict.fromkeys([job.waiting.claims[rank] for rank in sorted(job.waiting.claims)])
        order.update(dict.fromkeys(job.waiting.requests))
        seats = []
        for member_id in order:
            request = job.waiting.requests[member_id]
            rank = request.requested_rank if request.HasField("requested_rank") else None
            seats.append(Seat(member_id, request.host.name, rank))
        return seats

    def tell_progress(self, job_name: str, now_s: float) -> list[Effect]:
        """Tells the waiting members how far the job is: the time that TellLater asked for has come."""
        job = self._jobs.get(job_name)
        if job is None:
            return []
        job.waiting.tell_later = False
        return self._progress(job, now_s)

    def _progress(self, job: JobMembership, now_s: float) -> list[Effect]:
        """Tells all waiting members how far the job is: now, or later if they were told just before."""
        if not job.waiting or job.waiting.tell_later:
            return []
        delay_s = job.waiting.tell_after_s(now_s)
        if delay_s > 0:
            job.waiting.tell_later = True
            return [TellLater(job.name, delay_s)]
        sentence = job.progress()
        told = job.waiting.told
        news = [one for one in job.waiting.requests if sentence and told.get(one) != sentence]
        if not news:
            return []
        job.waiting.told_at_s = now_s
        event = pb.MembershipEvent(progress=pb.Progress(sentence=sentence))
        told.update(dict.fromkeys(news, sentence))
        return [Send(member_id, event) for member_id in news]

    def hindered(self, job_name: str, sentence: str) -> list[Effect]:
        """Tells the waiting members why their world can't form for the time being."""
        if (job := self._jobs.get(job_name)) is None:
            return []
        told = job.waiting.told
        news = [one for one in job.waiting.requests if told.get(one) != sentence]
        told.update(dict.fromkeys(news, sentence))
        event = pb.MembershipEvent(progress=pb.Progress(sentence=sentence))
        return [Send(member_id, event) for member_id in news]

    # -- forming -----------------------------------------------------------------------------------------------------

    def is_forming(self, formation: Formation) -> bool:
        """False once a member of `formation` has gone away, so that its world does not form."""
        job = self._jobs.get(formation.job)
        return job is not None and job.forming is formation

    def unformable(self, formation: Formation, sentence: str, now_s: float) -> list[Effect]:
        """Refuses the members of `formation` with this sentence, because their world can never form."""
        effects: list[Effect] = []
        if self.is_forming(formation):
            self._jobs[formation.job].refused = ""
            refused = pb.MembershipEvent(refused=pb.Refused(sentence=sentence))
            for member_id in formation.requests:
                effects.append(Send(member_id, refused))
                effects += self._remove(member_id, orderly=False, cause="its world can't be", now_s=now_s)
        return effects

    def formed(self, formation: Formation, epoch: int, secret: bytes) -> list[Effect]:
        """The store gave `formation` its epoch. Nothing happens when it is no longer forming (the epoch is skipped)."""
        if not self.is_forming(formation):
            return []
        job = self._jobs[formation.job]
        effects: list[Effect] = []
        if job.world is not None:
            # Only members that have joined again are left: their goodbyes are late and change nothing.
            effects += [Close(member_id) for member_id in job.present]
            effects.append(WorldEnded(job.name, job.world.epoch))
            for member_id in job.present:
                del self._job_of[member_id]
        job.start(formation.world(epoch, secret), formation.requests)
        self._remember(job.name, LastWorld(epoch, secret))
        event = pb.MembershipEvent(world=job.world)
        return [*effects, *(Send(member_id, event) for member_id in job.present)]

    def received(self, member_id: str, epoch: int) -> None:
        """The member has received its world, so it can come back to it when its stream breaks."""
        if (found := self._present(member_id)) and found[0].world and found[0].world.epoch == epoch:
            found[1].life.has_world = True

    # -- taking over -------------------------------------------------------------------------------------------------

    def restore(self, record: pb.WorldRecord, gone: pb.GoneRecord, now_s: float) -> list[pb.JoinRequest]:
        """Another coordinator had this world. Its members that are not gone are away from now on, and returned."""
        world = record.world
        job = JobMembership(world.job)
        job.start(world, {request.member_id: request for request in requests_of(record)})
        self._remember(job.name, LastWorld(world.epoch, world.secret))
        for one in gone.gone:
            if (member := job.by_rank.get(one.rank)) is not None:
                job.remove_present(member.member_id)
                job.gone[one.rank] = one
                if not one.orderly:
                    job.causes[member.member_id] = one.sentence
        if not job.present:
            return []
        self._jobs[job.name] = job
        for member in job.present.values():
            self._job_of[member.member_id] = job
            member.life.restored(now_s)
            job.suspected[member.member_id] = member
        return [member.request for member in job.present.values()]

    def _remember(self, job_name: str, last: LastWorld) -> None:
        self._last[job_name] = last
        self._last.move_to_end(job_name)
        if len(self._last) > MAX_REMEMBERED_JOBS:
            self._last.popitem(last=False)

    def drop(self, job_name: str) -> list[str]:
        """Another coordinator has taken the job over; forgets it. Returns those who waited or were in its world."""
        self._last.pop(job_name, None)
        job = self._jobs.pop(job_name, None)
        if job is None:
            return []
        members = [*job.waiting.requests, *job.present]
        for member_id in members:
            self._job_of.pop(member_id, None)
        return members

    def gone(self, job_name: str) -> pb.GoneRecord | None:
        """Who of the job's latest world has left or was lost; None when it had none."""
        job = self._jobs.get(job_name)
        return pb.GoneRecord(epoch=job.epoch, gone=job.gone.values()) if job is not None and job.epoch else None

    # -- coming back -------------------------------------------------------------------------------------------------

    def may_attach(self, attach: pb.Attach) -> pb.Refused | None:
        """Why the member can't come back, whatever it proves; None when it is to be asked for its proof."""
        if sentence := refusal_of_attach(attach):
            return pb.Refused(sentence=sentence, reason=pb.REFUSAL_REASON_UNKNOWN_WORLD)
        job = self._jobs.get(attach.job)
        epoch = job.world.epoch if job and job.world else 0
        if job is None or epoch == 0 or attach.epoch > epoch:
            last = self._last.get(attach.job)
            if last is not None and attach.epoch <= last.epoch:
                return _lost(f"Epoch {attach.epoch} of job {attach.job!r} is over.")
            return pb.Refused(
                sentence=f"The coordinator does not know epoch {attach.epoch} of job {attach.job!r}; it was restarted.",
                reason=pb.REFUSAL_REASON_UNKNOWN_WORLD,
            )
        if attach.epoch < epoch:
            return _lost(f"Epoch {attach.epoch} of job {attach.job!r} is over; it is in epoch {epoch} now.")
        if (cause := job.causes.get(attach.member_id)) is not None:
            return _lost(cause)
        one = job.present.get(attach.member_id)
        if one is None or one.rank != attach.rank:
            return pb.Refused(
                sentence=f"Rank {attach.rank} of epoch {epoch} of job {attach.job!r} is not the member that asks; the "
                "coordinator was restarted.",
                reason=pb.REFUSAL_REASON_UNKNOWN_WORLD,
            )
        return None

    def attach(
        self, attach: pb.Attach, nonce: bytes, proof: bytes, now_s: float
    ) -> tuple[pb.Refused | None, list[Effect]]:
        """The member answered the challenge. Its stream, if it has an older one, is replaced by the caller."""
        if refused := self.may_attach(attach):  # again, because things may have changed since the challenge
            return refused, []
        job = self._jobs[attach.job]
        assert job.world is not None
        if not is_equal(proof, attach_proof(job.world.secret, attach, nonce)):
            sentence = f"Whoever asks for the place of rank {attach.rank} of job {attach.job!r} did not prove to be it."
            return pb.Refused(sentence=sentence, reason=pb.REFUSAL_REASON_UNKNOWN_WORLD), []
        one = job.present[attach.member_id]
        one.life.attached()
        if not one.life.needs_watching():
            job.suspected.pop(attach.member_id, None)
        event = pb.MembershipEvent(attached=pb.Attached(gone=job.gone.values()))
        effects: list[Effect] = [Send(attach.member_id, event)]
        if job.is_whole():  # every member is connected, so the world goes on: those that wait for its end are refused
            no = pb.MembershipEvent(refused=pb.Refused(sentence=_already_runs(job)))
            for member_id in list(job.waiting.requests):
                effects.append(Send(member_id, no))
                effects += self._remove(member_id, orderly=False, cause="its job runs", now_s=now_s)
        return None, effects

    # -- evidence ----------------------------------------------------------------------------------------------------

    def disconnected(self, member_id: str, now_s: float) -> list[Effect]:
        """The member's stream ended without a goodbye."""
        found = self._present(member_id)
        if found is None:
            return self._remove(member_id, orderly=False, cause="its stream ended", now_s=now_s)
        job, one = found
        effects = self._judge(job, one, one.life.disconnected(now_s), now_s)
        return effects or self._probe(job, one)

    def process_ended(self, member_id: str, cause: str, now_s: float) -> list[Effect]:
        """The coordinator saw by a pidfd that the member's process ended."""
        found = self._present(member_id)
        if found is None:
            return self._remove(member_id, orderly=False, cause=cause, now_s=now_s)
        return self._judge(*found, found[1].life.process_ended(cause, now_s), now_s)

    def rank_ended(self, ended: RankEnded, now_s: float) -> list[Effect]:
        """An agent says that a process ended which it had started as a rank."""
        job = self._jobs.get(ended.job)
        one = job.started_as(ended) if job else None
        return self._judge(job, one, one.life.agent_saw_its_end(ended.cause, now_s), now_s) if job and one else []

    def peer_lost(self, witness_id: str, report: pb.PeerLost, now_s: float) -> list[Effect]:
        """A member's data plane lost its connections to a peer."""
        found = self._accused(witness_id, report.epoch, report.rank)
        if found is None:
            return []
        job, witness, one = found
        if report.process_ended and one in job.by_namespace.get(witness.request.process.namespace, ()):
            return self._judge(job, one, one.life.process_ended(PROCESS_ENDED, now_s), now_s)
        return self._judge(job, one, one.life.peer_broke(str(witness)), now_s)

    def testified(self, witness_id: str, testimony: pb.Testimony, now_s: float) -> list[Effect]:
        """A witness answers a probe. The answer counts only from a member that can see the process."""
        found = self._accused(witness_id, testimony.epoch, testimony.rank)
        if found is None or found[1] not in found[0].witnesses(found[2]):
            return []
        job, _, one = found
        if not testimony.lives:
            return self._judge(job, one, one.life.process_ended(PROCESS_ENDED, now_s), now_s)
        one.life.vouched(now_s)
        return []

    def jobs(self) -> list[str]:
        return list(self._jobs)

    def knows(self, job_name: str) -> bool:
        """Whether anybody is in a world of the job, or waits for one."""
        return job_name in self._jobs

    def suspected(self, job_name: str) -> list[str]:
        """The ids of members that may be lost. The caller may vouch for them in its next tick."""
        job = self._jobs.get(job_name)
        return list(job.suspected) if job else []

    def tick(self, job_name: str, now_s: float, vouched: Set[str] = frozenset()) -> list[Effect]:
        """Declares members lost that are away for too long, except those in `vouched`, whose processes live."""
        job = self._jobs.get(job_name)
        if job is None:
            return []
        for member_id in vouched & job.suspected.keys():
            job.suspected[member_id].life.vouched(now_s)
        waited_for = job.waiting or job.connected()
        effects = self._end_overdue(job, now_s, self._grace_s if waited_for else max(DORMANT_S, self._grace_s))
        for member_id, one in job.suspected.items():
            if member_id not in vouched:
                effects += self._probe(job, one)
        return effects

    def _end_overdue(self, job: JobMembership, now_s: float, grace_s: float) -> list[Effect]:
        overdue = {member_id: one.life.overdue(now_s, grace_s) for member_id, one in job.suspected.items()}
        return [
            effect for member_id, cause in overdue.items() if cause for effect in self.lost(member_id, cause, now_s)
        ]

    def restart_limits(self, now_s: float) -> None:
        """The coordinator was stopped for a while (clock.py), and read no message in that time."""
        for job in self._jobs.values():
            for one in job.suspected.values():
                one.life.restart_limits(now_s)

    def _present(self, member_id: str) -> tuple[JobMembership, Present] | None:
        job = self._job_of.get(member_id)
        one = job.present.get(member_id) if job else None
        return (job, one) if job and one else None

    def _accused(self, witness_id: str, epoch: int, rank: int) -> tuple[JobMembership, Present, Present] | None:
        """The job, the witness, and the member of the witness's world that has this rank."""
        found = self._present(witness_id)
        if found is None or found[0].world is None or found[0].world.epoch != epoch:
            return None
        one = found[0].by_rank.get(rank)
        return (*found, one) if one is not None and one is not found[1] else None

    def _judge(self, job: JobMembership, one: Present, cause: str, now_s: float) -> list[Effect]:
        if cause:
            if one.life.agent_told or not self._has_agent(job.name, one.started_as):
                return self.lost(one.member_id, cause, now_s)
            job.suspected[one.member_id] = one
            return [LookLater(job.name, AGENT_S)] if one.life.hold(cause, now_s) else []
        if one.life.needs_watching():
            job.suspected[one.member_id] = one
        return []

    def _probe(self, job: JobMembership, one: Present) -> list[Effect]:
        """Asks other members on the host whether the process of a member that is away still lives."""
        if one.life.away_since_s is None or job.world is None:
            return []
        process = one.request.process
        event = pb.MembershipEvent(
            probe=pb.Probe(epoch=job.world.epoch, rank=one.rank, pid=one.request.pid, start_time=process.start_time)
        )
        return [Send(witness.member_id, event) for witness in job.witnesses(one)[:MAX_WITNESSES]]

    # -- going -------------------------------------------------------------------------------------------------------

    def leave(self, member_id: str, reason: str, now_s: float) -> list[Effect]:
        """An orderly goodbye. Unknown members are ignored: a goodbye may come after its world has ended."""
        cause = reason or "it called hvd.shutdown() or ended"
        return self._remove(member_id, orderly=True, cause=cause, now_s=now_s) or [Close(member_id)]

    def lost(self, member_id: str, cause: str, now_s: float) -> list[Effect]:
        """The member is gone without a goodbye. `cause` completes "rank 1 was lost: ..." and has no full stop."""
        return self._remove(member_id, orderly=False, cause=cause, now_s=now_s)

    def _remove(
        self, member_id: str, *, orderly: bool, cause: str, now_s: float, never_stood: bool = False
    ) -> list[Effect]:
        job = self._job_of.pop(member_id, None)
        if job is None:
            return []
        effects: list[Effect] = []
        if member_id in job.waiting:
            claim = job.waiting.remove(member_id)
            if claim is not None:
                job.unclaimed(claim)
            job.forming = None
        elif (one := job.remove_present(member_id)) is not None and job.world is not None:
            gone = pb.MemberGone(
                epoch=job.world.epoch,
                rank=one.rank,
                host=one.request.host.name,
                orderly=orderly,
                sentence=f"{capitalized(str(one))} {'left' if orderly else 'was lost'}: {cause.rstrip('.')}.",
                never_stood=never_stood,
            )
            job.gone[one.rank] = gone
            if job.present or job.waiting:  # otherwise the job is over
                effects.append(Record(job.name))
            event = pb.MembershipEvent(gone=gone)
            effects += [Send(other, event) for other in job.present]
            effects.append(Gone(job.name, job.world.epoch, one.rank, gone.sentence, orderly))
            if not orderly:
                # Should the member live after all, it learns from this that the others go on without it.
                sentence = f"{capitalized(str(one))} was declared lost: {cause.rstrip('.')}."
                job.causes[member_id] = sentence
                effects.append(Send(member_id, pb.MembershipEvent(refused=_lost(sentence))))
            if not job.present:
                effects.append(WorldEnded(job.name, job.world.epoch))
                job.world = None
        effects.append(Close(member_id))
        if not job.waiting and job.world is None:
            self._jobs.pop(job.name, None)
        return effects + self._advance(job, now_s)

    # -- questions ---------------------------------------------------------------------------------------------------

    def attendance(self, job_name: str) -> Attendance | None:
        """Which hosts of the job's world, or of those who wait for one, have ranks here; None for an unknown job."""
        job = self._jobs.get(job_name)
        if job is None:
            return None
        present = {one.request.host.name for one in job.present.values()}
        connected = {one.request.host.name for one in job.present.values() if one.life.away_since_s is None}
        connected |= {request.host.name for request in job.waiting.requests.values()}
        lost = {gone.host for gone in job.gone.values() if not gone.orderly}
        away = present - connected
        return Attendance(frozenset(connected), frozenset(away), frozenset(lost - connected - away))

    def overview(self, reports: Mapping[str, Mapping[int, negotiation_pb2.RankReport]]) -> list[JobOverview]:
        """All jobs as they are now. reports: the latest of each rank, by job."""
        return [overview_of(job, reports.get(job.name, {})) for job in list(self._jobs.values())]

    def world_of(self, job_name: str) -> pb.World | None:
        job = self._jobs.get(job_name)
        return job.world if job else None

    def stranger(self, job_name: str, epoch: int, member_id: str, rank: int) -> str:
        """Why a claim to be `rank` of that world is false, or "" when it is proven."""
        job = self._jobs.get(job_name)
        if job is None or job.world is None:
            return f"Job {job_name!r} has no running world; epoch {epoch} is over."
        if epoch != job.world.epoch:
            return f"Epoch {epoch} of job {job_name!r} is over; it is in epoch {job.world.epoch} now."
        one = job.present.get(member_id)
        if one is None:
            return f"Member {member_id!r} is not part of epoch {epoch} of job {job_name!r}."
        if one.rank != rank:
            return f"Member {member_id!r} of job {job_name!r} is rank {one.rank}, not rank {rank}."
        return ""


def _already_runs(job: JobMembership) -> str:
    who = shortened([str(one) for one in job.present.values()], 4)
    return (
        f"Job {job.name!r} already runs with {plural(len(job.present), 'member')} in epoch "
        f"{job.world.epoch if job.world else 0}: {who}. Wait until it has ended, or give this job another name "
        "(HOROVOD_JOB)."
    )


def _lost(sentence: str) -> pb.Refused:
    return pb.Refused(sentence=sentence, reason=pb.REFUSAL_REASON_LOST)
