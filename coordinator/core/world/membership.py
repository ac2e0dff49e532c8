"""The members of all jobs of one coordinator: finds the job that an event is about (job_membership.py).

Of each job, rendezvous.py knows who forms its next world and when, and liveness.py who of its running world is lost.

Every method takes the time it needs as an argument and returns effects: what to send to whom. The caller carries
them out in order and feeds `formed` with an epoch from the store, where it grows by compare-and-swap.

Invariant: `_job_of` has exactly the members that wait, are present or are on their way from one world to the next, each
until the effect Close says that it is none any more. A job is known while it has one; the last worlds of jobs that are
over are remembered for those who come late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from horovod.base.errors import coded_like, without_code
from horovod.base.words import capitalized
from horovod.coordinator.core.ending import Attendance, RankEnded
from horovod.protos.v1 import membership_pb2 as pb
from horovod.protos.v1 import negotiation_pb2, story_pb2

from .checks import refusal_of, refusal_of_attach
from .effects import Close, Effect
from .job_membership import JobMembership
from .life import Sight
from .rendezvous import LastWorld
from .waiting import Formation

# A job's state for the status page and the metrics: a copy, which does not change with the job.


@dataclass(frozen=True)
class MemberOverview:
    rank: int
    host: str
    pid: int
    away: bool  # the member's stream is broken, and it may come back


@dataclass(frozen=True)
class JobOverview:
    name: str
    epoch: int  # 0: no world runs
    size: int  # members of its world, or of the next one while none runs
    members: tuple[MemberOverview, ...]  # members of its world that are not gone
    waiting: int  # members that wait for the next world
    waits_for: str  # a sentence about what the waiting members wait for; "" if nobody waits
    # By the ranks that launchers have given waiting members: how many seconds each took to start.
    waiting_ranks: Mapping[int, float] = field(default_factory=dict)
    reports: Mapping[int, negotiation_pb2.RankReport] = field(default_factory=dict)  # rank -> its latest report
    newcomers: int = 0  # how many of `waiting` were not in the running world
    story: tuple[story_pb2.StoryEntry, ...] = ()  # the latest entries, the oldest first


def overview_of(
    job: JobMembership,
    reports: Mapping[int, negotiation_pb2.RankReport],
    story: tuple[story_pb2.StoryEntry, ...] = (),
) -> JobOverview:
    liveness, waiting = job.liveness, job.rendezvous.waiting
    first = waiting.first
    return JobOverview(
        name=job.name,
        epoch=liveness.world.epoch if liveness.runs else 0,
        size=len(liveness.world.members) if liveness.runs else first.size if first else 0,
        members=tuple(
            MemberOverview(one.rank, one.request.host.name, one.request.pid, one.life.away_since_s is not None)
            for one in list(liveness.present.values())
        ),
        waiting=len(waiting),
        waits_for=job.rendezvous.progress(),
        waiting_ranks={rank: request.started_seconds for rank, request in list(waiting.by_rank.items())},
        reports=dict(reports),
        newcomers=len(waiting) - len(waiting.claims) if liveness.runs else 0,
        story=story,
    )


MAX_REMEMBERED_JOBS = 1024


class Membership:
    """All jobs of one coordinator."""

    def __init__(
        self,
        grace_s: float = 10.0,
        agent_s: Callable[[str, int], float] = lambda job, rank: 0.0,
        host_goes: Callable[[str, int, int], bool] = lambda job, slot, incarnation: False,
    ) -> None:
        """grace_s: how long a member may be away while no witness says that its process lives. agent_s: how
        long to wait, at most, until the agent that has started this rank of the job reports how its process ended; 0:
        no agent will. host_goes: whether the launcher of the job gives up the whole host of this process (by slot and
        incarnation) when it fails.
        """
        self._grace_s = grace_s
        self._agent_s = agent_s
        self._host_goes = host_goes
        self._jobs: dict[str, JobMembership] = {}
        self._job_of: dict[str, JobMembership] = {}  # member id -> its job
        self._last: OrderedDict[str, LastWorld] = OrderedDict()  # job -> the last world that it had
        self._asked: OrderedDict[str, None] = OrderedDict()  # jobs of which a process has asked to join
        self._given_up: dict[str, str] = {}  # job -> why none of its worlds forms any more

    def _job(self, name: str) -> JobMembership:
        """The job; a new one, which is not known yet, if there is none of this name."""
        return self._jobs.get(name) or JobMembership(name, self._last.get(name), self._agent_s, self._host_goes)

    def _settled(self, job: JobMembership, effects: list[Effect]) -> list[Effect]:
        """The effects, once members that are none any more are forgotten, and the job if it has no others."""
        for effect in effects:
            if isinstance(effect, Close):
                self._job_of.pop(effect.member_id, None)
        if job.is_over:
            self._jobs.pop(job.name, None)
        return effects

    # -- joining -----------------------------------------------------------------------------------------------------

    def join(self, request: pb.JoinRequest, now_s: float) -> tuple[str, list[Effect]]:
        """The sentence why `request` is refused ("" when it is not), and the effects on members."""
        if refusal := refusal_of(request) or self._given_up.get(request.job, ""):
            return refusal, []
        self._asked[request.job] = None
        self._asked.move_to_end(request.job)
        while len(self._asked) > MAX_REMEMBERED_JOBS:
            self._asked.popitem(last=False)
        job = self._job(request.job)
        effects = self._settled(job, job.make_way(request, now_s))
        job = self._job(request.job)
        refusal, others = job.join(request, request.member_id in self._job_of, now_s)
        if not refusal:
            self._jobs[job.name] = job
            self._job_of[request.member_id] = job
        return refusal, [*effects, *self._settled(job, others)]

    def tell_progress(self, job_name: str, now_s: float) -> list[Effect]:
        """Tells the waiting members how far the job is: the time that TellLater asked for has come."""
        job = self._jobs.get(job_name)
        return job.rendezvous.progress_is_due(now_s) if job else []

    def hindered(self, job_name: str, sentence: str) -> list[Effect]:
        """Tells the waiting members why their world can't form for the time being."""
        job = self._jobs.get(job_name)
        return job.rendezvous.tell(sentence) if job else []

    # -- forming -----------------------------------------------------------------------------------------------------

    def is_forming(self, formation: Formation) -> bool:
        """False once a member of `formation` has gone away, so that its world does not form."""
        job = self._jobs.get(formation.job)
        return job is not None and job.rendezvous.is_forming(formation)

    def unformable(self, formation: Formation, sentence: str, now_s: float) -> list[Effect]:
        """Refuses the members of `formation` with this sentence, because their world can never form."""
        job = self._jobs.get(formation.job)
        return self._settled(job, job.unformable(formation, sentence, now_s)) if job else []

    def give_up(self, job_name: str, sentence: str) -> list[Effect]:
        """The launcher of a job says that one of its processes will not come: refuses those that wait for it, and all
        that come later under this name, with this sentence. A world that stands is left alone.
        """
        self._given_up[job_name] = sentence
        job = self._jobs.get(job_name)
        return self._settled(job, job.give_up(sentence)) if job else []

    def end(self, job_name: str, cause: str, now_s: float) -> list[Effect]:
        """The launcher of a job waits for none of it any more: as `give_up`, and a world that stands loses its members.
        cause: completes "rank 1 was lost: ", has no full stop, and may end with a code.
        """
        sentence = coded_like(cause, f"{capitalized(without_code(cause))}.")
        self._given_up[job_name] = sentence
        job = self._jobs.get(job_name)
        return self._settled(job, job.give_up(sentence) + job.end(cause, now_s)) if job else []

    def formed(self, formation: Formation, epoch: int, secret: bytes, now_s: float) -> list[Effect]:
        """The store gave `formation` its epoch. Nothing happens when it is no longer forming (the epoch is skipped)."""
        job = self._jobs.get(formation.job)
        effects = self._settled(job, job.formed(formation, epoch, secret, now_s)) if job else []
        if job and effects:
            self._remember(job)
        return effects

    def received(self, member_id: str, epoch: int) -> None:
        """The member has received its world, so it can come back to it when its stream breaks."""
        if (job := self._job_of.get(member_id)) is not None:
            job.liveness.received(member_id, epoch)

    # -- taking over -------------------------------------------------------------------------------------------------

    def restore(
        self, record: pb.WorldRecord, gone: pb.GoneRecord, now_s: float, rested_s: float = 0.0
    ) -> list[pb.JoinRequest]:
        """Another coordinator had this world. Its members that are not gone are away from now on. Returns them, and
        those on their way to the next world. rested_s: for how long the job has had no process.
        """
        job = JobMembership.restored(record, gone, self._agent_s, now_s, self._host_goes, rested_s)
        self._remember(job)
        if job.is_over:
            return []
        self._jobs[job.name] = job
        self._job_of.update(dict.fromkeys(job.members(), job))
        return [one.request for one in (*job.liveness.present.values(), *job.rendezvous.on_their_way())]

    def _remember(self, job: JobMembership) -> None:
        assert job.rendezvous.last is not None
        self._last[job.name] = job.rendezvous.last
        self._last.move_to_end(job.name)
        if len(self._last) > MAX_REMEMBERED_JOBS:
            self._last.popitem(last=False)

    def drop(self, job_name: str) -> list[str]:
        """Another coordinator has taken the job over; forgets it. Returns those who waited or were in its world."""
        self._last.pop(job_name, None)
        job = self._jobs.pop(job_name, None)
        members = job.members() if job else []
        for member_id in members:
            self._job_of.pop(member_id, None)
        return members

    def gone(self, job_name: str) -> pb.GoneRecord | None:
        """Who of the job's latest world has left or was lost; None when it had none."""
        job = self._jobs.get(job_name)
        return job.gone() if job else None

    def kept(self, job_name: str) -> pb.WorldRecord | None:
        """What is to be kept of an elastic job of which no process is left, for those that come later: what it has done
        of its work, and of its last world as much as one needs that has been in it. None: nothing.
        """
        last = self._last.get(job_name)
        if last is None or not last.work.is_worth_keeping or job_name in self._jobs:
            return None
        world = pb.World(job=job_name, epoch=last.epoch, secret=last.secret, sizes=pb.Sizes())
        return pb.WorldRecord(world=world, work=last.work.record())

    # -- coming back -------------------------------------------------------------------------------------------------

    def may_attach(self, attach: pb.Attach) -> pb.Refused | None:
        """Why the member can't come back, whatever it proves; None when it is to be asked for its proof."""
        if sentence := refusal_of_attach(attach):
            return pb.Refused(sentence=sentence, reason=pb.REFUSAL_REASON_UNKNOWN_WORLD)
        return self._job(attach.job).may_attach(attach)

    def attach(
        self, attach: pb.Attach, nonce: bytes, proof: bytes, now_s: float
    ) -> tuple[pb.Refused | None, list[Effect]]:
        """The member answered the challenge. Its stream, if it has an older one, is replaced by the caller."""
        if refused := self.may_attach(attach):  # asked once more, because things may have changed since the challenge
            return refused, []
        job = self._job(attach.job)
        refused, effects = job.attach(attach, nonce, proof, now_s)
        return refused, self._settled(job, effects)

    # -- evidence ----------------------------------------------------------------------------------------------------

    def disconnected(self, member_id: str, now_s: float, *, broke: bool = True) -> list[Effect]:
        """The member's stream ended. broke: its connection did, and neither side had ended the stream."""
        return self._about(member_id, lambda job: job.disconnected(member_id, now_s, broke=broke))

    def process_ended(self, member_id: str, cause: str, now_s: float) -> list[Effect]:
        """The coordinator saw by a pidfd that the member's process ended."""
        return self._about(member_id, lambda job: job.process_ended(member_id, cause, now_s))

    def rank_ended(self, ended: RankEnded, now_s: float) -> list[Effect]:
        """An agent says that a process ended which it had started as a rank."""
        job = self._jobs.get(ended.job)
        return self._settled(job, job.rank_ended(ended, now_s)) if job else []

    def peer_lost(self, witness_id: str, report: pb.PeerLost, now_s: float) -> list[Effect]:
        """A member's data plane lost its connections to a peer."""
        return self._about(witness_id, lambda job: job.peer_lost(witness_id, report, now_s))

    def reported(self, member_id: str, message: pb.MemberMessage, now_s: float) -> list[Effect]:
        """A member says something of itself or of its peers: that it lost one or can't connect to some, or that it will
        leave.
        """
        match message.WhichOneof("message"):
            case "peer_lost":
                return self.peer_lost(member_id, message.peer_lost, now_s)
            case "unconnected":
                return self._about(member_id, lambda job: job.unconnected(member_id, message.unconnected, now_s))
            case "leaving":
                return self.leaving(member_id, message.leaving, now_s)
            case "work":
                return self._about(member_id, lambda job: job.did(member_id, message.work))
        return []

    def testified(self, witness_id: str, testimony: pb.Testimony, now_s: float) -> list[Effect]:
        """A witness answers a probe. The answer counts only from a member that can see the process."""
        return self._about(witness_id, lambda job: job.testified(witness_id, testimony, now_s))

    def tick(self, job_name: str, now_s: float, sight: Sight = Sight()) -> list[Effect]:  # noqa: B008 - a frozen value
        """Declares members lost that are away for too long, except those whose processes live; and of an elastic job
        those that stand still for too long.
        """
        job = self._jobs.get(job_name)
        return self._settled(job, job.tick(now_s, self._grace_s, sight)) if job else []

    def restart_limits(self, now_s: float) -> None:
        """The coordinator was stopped for a while (services/ticks.py), and read no message in that time."""
        for job in self._jobs.values():
            job.liveness.restart_limits(now_s)
            job.rendezvous.restart_limits(now_s)

    # -- going -------------------------------------------------------------------------------------------------------

    def leave(
        self, member_id: str, reason: str, now_s: float, *, returns: bool = False, failed: bool = False
    ) -> list[Effect]:
        """An orderly goodbye. Unknown members are ignored: a goodbye may come after its world has ended.

        returns: it joins again at once, so that the next world of an elastic job has it. failed: its work is not done.
        """
        cause = reason or "it called hvd.shutdown() or ended"
        effects = self._about(member_id, lambda job: job.leave(member_id, cause, now_s, returns=returns, failed=failed))
        return effects or [Close(member_id)]

    def leaving(self, member_id: str, leaving: pb.Leaving, now_s: float) -> list[Effect]:
        """The member of an elastic job will leave its world for good at the next commit. It may say so again."""
        return self._about(member_id, lambda job: job.leaving(member_id, leaving, now_s))

    def lost(self, member_id: str, cause: str, now_s: float) -> list[Effect]:
        """The member is gone without a goodbye. `cause` completes "rank 1 was lost: ..." and has no full stop."""
        return self._about(member_id, lambda job: job.remove(member_id, cause, now_s))

    def coming(self, job_name: str, count: int) -> list[Effect]:
        """So many further processes of an elastic job are being started, which the members of its world are told."""
        job = self._jobs.get(job_name)
        return job.coming(count) if job else []

    def ask_to_leave(self, job_name: str, slot: int, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        """The launcher of an elastic job wants this process back: all members are told, as if it had said that it
        leaves, and it does so at the next commit. Nothing happens where the process is in no world; it may be asked
        again.
        """
        job = self._jobs.get(job_name)
        return self._settled(job, job.ask_to_leave(slot, incarnation, reason, now_s)) if job else []

    def _about(self, member_id: str, decide: Callable[[JobMembership], list[Effect]]) -> list[Effect]:
        """Lets the member's job decide; nothing follows for an unknown member."""
        job = self._job_of.get(member_id)
        return self._settled(job, decide(job)) if job else []

    # -- questions ---------------------------------------------------------------------------------------------------

    def jobs(self) -> list[str]:
        return list(self._jobs)

    def knows(self, job_name: str) -> bool:
        """Whether anybody is in a world of the job, or waits for one."""
        return job_name in self._jobs

    def waits_for(self, job_name: str) -> str:
        """What the processes that wait for the job's next world wait for, as a sentence; "" if none waits."""
        job = self._jobs.get(job_name)
        return job.rendezvous.progress() if job else ""

    def suspected(self, job_name: str) -> list[str]:
        """The ids of members that may be lost. The caller may vouch for them in its next tick."""
        return list(self._job(job_name).liveness.suspected)

    def to_look_at(self, job_name: str) -> list[str]:
        """The ids of members whose processes the caller is to look at, where it can, for its next tick."""
        return self._job(job_name).to_look_at()

    def doubted(self, job_name: str) -> list[str]:
        """The ids of members of whom it matters whether their hosts acknowledge what was sent to them."""
        return self._job(job_name).liveness.doubted()

    def members_of(self, job_name: str, ranks: Collection[int]) -> dict[str, str]:
        """The members of the running world that have these ranks: by member id, in words."""
        members = self._job(job_name).liveness.by_rank
        return {members[rank].member_id: str(members[rank]) for rank in sorted(ranks) if rank in members}

    def pids_on(self, job_name: str, host: str) -> dict[str, int]:
        """The processes of the members of the running world that are on this host, by member id; and of those that are
        on their way to the next one.
        """
        job = self._job(job_name)
        members = [*job.liveness.present.values(), *job.rendezvous.on_their_way()]
        return {one.member_id: one.request.pid for one in members if one.request.host.name == host}

    def attendance(self, job_name: str) -> Attendance | None:
        """Which hosts of the job's world, or of those who wait for one, have ranks here; None for an unknown job."""
        job = self._jobs.get(job_name)
        return job.attendance() if job else None

    def latest_epoch(self, job_name: str) -> int | None:
        """That of the job's latest world, as far as it is known here; 0: it has had none; None: no process has asked to
        join it.
        """
        job = self._jobs.get(job_name)
        last = job.rendezvous.last if job is not None else self._last.get(job_name)
        if last is not None:
            return last.epoch
        return 0 if job is not None or job_name in self._asked else None

    def overview(
        self,
        reports: Mapping[str, Mapping[int, negotiation_pb2.RankReport]],
        story: Callable[[str], tuple[story_pb2.StoryEntry, ...]] = lambda job: (),
    ) -> list[JobOverview]:
        """All jobs as they are now. reports: the latest of each rank, by job. story: of a job."""
        jobs = list(self._jobs.values())
        return [overview_of(job, reports.get(job.name, {}), story(job.name)) for job in jobs]

    def world_of(self, job_name: str) -> pb.World | None:
        """The running world of the job, or None."""
        liveness = self._job(job_name).liveness
        return liveness.world if liveness.runs else None

    def stranger(self, job_name: str, epoch: int, member_id: str, rank: int) -> str:
        """Why a claim to be `rank` of that world is false, or "" when it is proven."""
        return self._job(job_name).liveness.stranger(epoch, member_id, rank)
