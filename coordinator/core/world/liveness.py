"""The liveness of one running world: who of its members is away, who comes back, who is lost.

A member whose stream breaks is away and may come back (`attach`). What is evidence of a loss, and when, is in life.py;
this class gives each piece of evidence to the member that it is about, and asks witnesses about those that are away.

Invariant: each rank of the world is either in `present` or in `gone`, and never comes back from there. `suspected` has
each member of `present` that is away, or whose end somebody has noticed: time decides about these (`overdue`), and
about no others.

A finding that a member is lost changes nothing here yet: it is a `Loss`, and the job removes the member (`remove`),
since the rendezvous of its next world must know it too (job_membership.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from horovod.base.errors import WorldCode, coded, coded_like, without_code
from horovod.base.proofs import attach_proof, is_equal
from horovod.base.words import capitalized
from horovod.coordinator.core.ending import RankEnded
from horovod.protos.v1 import membership_pb2 as pb

from .effects import Effect, Gone, LookLater, Send, WorldEnded
from .life import PROCESS_ENDED, Present, Sight, hung_limit_s, was_stopped
from .waiting import requests_of

MAX_WITNESSES = 2  # witnesses that are asked about one member
MAX_ASKED = 4  # members that are asked at a time to show that they run, of a world and of those that wait for its end
# How long a world without any connected member is kept: its members may still train, when only their connections to
# this coordinator broke. A process that wants to join the job ends the wait.
DORMANT_S = 3600.0


@dataclass(frozen=True)
class Loss:
    """The evidence says that the member is lost. `cause` completes "rank 1 was lost: ..." and has no full stop."""

    member_id: str
    cause: str


Finding = Effect | Loss


class Liveness:
    """Of the members of `world`. Without members it is that of a job which has had no world yet."""

    def __init__(
        self,
        world: pb.World,
        requests: Mapping[str, pb.JoinRequest],
        agent_s: Callable[[str, int], float],
    ) -> None:
        """requests: those with which the members joined, by member id. agent_s: as in `Membership`."""
        self.world = world
        self.present: dict[str, Present] = {}  # by member id
        self.suspected: dict[str, Present] = {}  # by member id
        self.gone: dict[int, pb.MemberGone] = {}  # rank -> how it left the world or was lost
        self.hung_limit_s = hung_limit_s(world)
        # Whether a member has lost its connections to a peer. If several are out of reach, the first is named.
        self._is_torn = False
        self._agent_s = agent_s
        self._causes: dict[str, str] = {}  # member id -> the sentence with which it was declared lost
        # Process namespace -> its members, also those that are gone.
        self._by_namespace: dict[str, list[Present]] = {}
        for rank, member in enumerate(world.members):
            one = Present(rank, requests[member.member_id])
            self.present[member.member_id] = one
            if namespace := one.request.process.namespace:
                self._by_namespace.setdefault(namespace, []).append(one)
        self.by_rank = {one.rank: one for one in self.present.values()}
        # Each member by the rank that its launcher gave it, also members that are gone.
        self._by_slot = {one.started_as: one for one in self.present.values()}

    @classmethod
    def restored(
        cls, record: pb.WorldRecord, gone: pb.GoneRecord, agent_s: Callable[[str, int], float], now_s: float
    ) -> Liveness:
        """Another coordinator had this world. Its members that are not gone are away from now on."""
        found = cls(record.world, {request.member_id: request for request in requests_of(record)}, agent_s)
        for one in gone.gone:
            if (member := found.by_rank.get(one.rank)) is not None:
                found._forget(member)
                found.gone[one.rank] = one
                if not one.orderly:
                    found._causes[member.member_id] = one.sentence
        for member in found.present.values():
            member.life.restored(now_s)
            found.suspected[member.member_id] = member
        return found

    @property
    def runs(self) -> bool:
        return bool(self.present)

    def is_whole(self) -> bool:
        """True when the world runs, and none of its members is gone or suspected."""
        return self.runs and len(self.present) == len(self.world.members) and not self.suspected

    def unaware(self, request: pb.JoinRequest) -> Present | None:
        """The member of a taken-over world whose process joins anew, so it never got that world."""
        if request.rejoin.epoch == self.world.epoch:
            return None
        same = (one for one in self.suspected.values() if one.life.unseen and is_same_process(one.request, request))
        return next(same, None)

    # -- coming back -------------------------------------------------------------------------------------------------

    def may_attach(self, attach: pb.Attach) -> pb.Refused | None:
        """Why a member of the running world, or of an earlier one, can't come back, whatever it proves."""
        job, epoch = self.world.job, self.world.epoch
        if attach.epoch < epoch:
            return lost(
                WorldCode.EPOCH_OVER, f"World {attach.epoch} of job {job!r} is over; it is in world {epoch} now."
            )
        if (cause := self._causes.get(attach.member_id)) is not None:
            return lost(WorldCode.DECLARED_LOST, cause)
        one = self.present.get(attach.member_id)
        if one is None or one.rank != attach.rank:
            return unknown(
                WorldCode.UNKNOWN_WORLD,
                f"Rank {attach.rank} of world {epoch} of job {job!r} is not the member that asks; the coordinator was "
                "restarted.",
            )
        return None

    def attach(self, attach: pb.Attach, nonce: bytes, proof: bytes) -> tuple[pb.Refused | None, list[Effect]]:
        """A member that may come back answered the challenge."""
        if not is_equal(proof, attach_proof(self.world.secret, attach, nonce)):
            sentence = (
                f"A process that claims the place of rank {attach.rank} of job {attach.job!r} did not prove that "
                "it is this rank."
            )
            return unknown(WorldCode.UNPROVEN_MEMBER, sentence), []
        one = self.present[attach.member_id]
        one.life.attached()
        if not one.life.needs_watching():
            self.suspected.pop(attach.member_id, None)
        event = pb.MembershipEvent(attached=pb.Attached(gone=self.gone.values()))
        return None, [Send(attach.member_id, event)]

    # -- evidence ----------------------------------------------------------------------------------------------------

    def received(self, member_id: str, epoch: int) -> None:
        """The member has received its world, so it can come back to it when its stream breaks."""
        if (one := self.present.get(member_id)) is not None and self.world.epoch == epoch:
            one.life.has_world = True

    def disconnected(self, member_id: str, now_s: float) -> Sequence[Finding]:
        """The member's stream ended without a goodbye."""
        if (one := self.present.get(member_id)) is None:
            return []
        return self._judge(one, one.life.disconnected(now_s), now_s) or self._probe(one)

    def process_ended(self, member_id: str, cause: str, now_s: float) -> Sequence[Finding]:
        """The coordinator saw by a pidfd that the member's process ended."""
        one = self.present.get(member_id)
        return self._judge(one, one.life.process_ended(cause, now_s), now_s) if one is not None else []

    def rank_ended(self, ended: RankEnded, now_s: float) -> Sequence[Finding]:
        """An agent says that a process ended which it had started as a rank."""
        one = self.member_of(ended)
        return self._judge(one, one.life.agent_saw_its_end(ended.cause, now_s), now_s) if one is not None else []

    def peer_lost(self, witness_id: str, report: pb.PeerLost, now_s: float) -> Sequence[Finding]:
        """A member's data plane lost its connections to a peer."""
        if (found := self._accused(witness_id, report.epoch, report.rank)) is None:
            return []
        witness, one = found
        if report.process_ended and one in self._by_namespace.get(witness.request.process.namespace, ()):
            return self._judge(one, one.life.process_ended(PROCESS_ENDED, now_s), now_s)
        self._is_torn = True
        return self._judge(one, one.life.peer_broke(str(witness)), now_s)

    def testified(self, witness_id: str, testimony: pb.Testimony, now_s: float) -> Sequence[Finding]:
        """A witness answers a probe. The answer counts only from a member that can see the process."""
        found = self._accused(witness_id, testimony.epoch, testimony.rank)
        if found is None or found[0] not in self._witnesses(found[1]):
            return []
        one = found[1]
        if not testimony.lives:
            return self._judge(one, one.life.process_ended(PROCESS_ENDED, now_s), now_s)
        if testimony.stopped and self.hung_limit_s:
            return [Loss(one.member_id, was_stopped(self.hung_limit_s))]
        one.life.vouched(now_s)
        return []

    def _accused(self, witness_id: str, epoch: int, rank: int) -> tuple[Present, Present] | None:
        """The witness, and the member of its world that has this rank."""
        witness, one = self.present.get(witness_id), self.by_rank.get(rank)
        if witness is None or one is None or one is witness or self.world.epoch != epoch:
            return None
        return witness, one

    def started_as(self, rank: int) -> Present | None:
        """The member whose launcher gave it this rank, also one that is gone."""
        return self._by_slot.get(rank)

    def of_rank(self, rank: int) -> Present | None:
        """The member that has this rank, also one that is gone."""
        return next((one for one in self._by_slot.values() if one.rank == rank), None)

    def incarnations(self) -> dict[int, int]:
        """Of all members that a scheduler has started, also of those that are gone, by the rank that it gave them."""
        return {slot: one.request.incarnation for slot, one in self._by_slot.items() if one.request.incarnation}

    def member_of(self, ended: RankEnded) -> Present | None:
        """The member whose process an agent saw end, or that ran below that process and has the rank given to it."""
        one = self._by_slot.get(ended.rank)
        if one is not None and one.member_id not in self.present:
            return None
        if one is None or one.request.pid != ended.pid:
            same = (other for other in self.present.values() if other.request.pid == ended.pid)
            one = next((other for other in same if other.request.host.name == ended.host), one)
        if one is None or one.request.host.name != ended.host or ended.incarnation < one.request.incarnation:
            return None
        return one if ended.pid == one.request.pid or ended.rank == one.started_as else None

    def _judge(self, one: Present, cause: str, now_s: float) -> Sequence[Finding]:
        if cause:
            agent_s = self._agent_s(self.world.job, one.started_as)
            if one.life.agent_told or not agent_s:
                return [Loss(one.member_id, cause)]
            self.suspected[one.member_id] = one
            return [LookLater(self.world.job, agent_s)] if one.life.hold(cause, now_s, agent_s) else []
        if one.life.needs_watching():
            self.suspected[one.member_id] = one
        return []

    # -- time --------------------------------------------------------------------------------------------------------

    def overdue(self, now_s: float, grace_s: float, sight: Sight, waiting: Collection[str]) -> list[Loss]:
        """Those that are lost by now, since nothing was heard of them for too long, or they are seen to stand still.

        waiting: member ids of those who wait for the end of this world.
        """
        hung = self._hung(now_s, sight, waiting) if self.hung_limit_s else {}
        for member_id in sight.lives & self.suspected.keys():
            self.suspected[member_id].life.vouched(now_s)
        if not waiting and not self._has_connected():
            grace_s = max(DORMANT_S, grace_s)
        causes = {member_id: one.life.overdue(now_s, grace_s) for member_id, one in self.suspected.items()}
        for member_id, cause in hung.items():
            causes[member_id] = causes.get(member_id) or cause
        return [Loss(member_id, cause) for member_id, cause in causes.items() if cause]

    def _hung(self, now_s: float, sight: Sight, waiting: Collection[str]) -> dict[str, str]:
        """Members of an elastic job that stand still while others run; member id -> cause.

        Where nobody is known to run, the whole job may have been stopped. Then those of its processes that are
        continued last are not to be given up for that: the limit begins when the first of them runs.
        """
        runs = not sight.runs.isdisjoint(self.present) or not sight.runs.isdisjoint(waiting)
        for member_id, one in self.present.items():
            turns, at_s = sight.stopped.get(member_id) if runs else None, sight.stopped_at_s.get(member_id)
            one.life.seen(turns, member_id in sight.silent, now_s, at_s)
        limit_s, is_torn = self.hung_limit_s, self._is_torn
        return {member_id: one.life.hung(now_s, limit_s, is_torn) for member_id, one in self.present.items()}

    def ask_others(self, sight: Sight, waiting: Collection[str]) -> list[Effect]:
        """Where a process is stopped, asks some others whether it lives. What they say matters less than that they say
        something: they run, though this coordinator may not see their processes.
        """
        stopped = next((one for member_id, one in self.present.items() if member_id in sight.stopped), None)
        if stopped is None or not self.hung_limit_s:
            return []
        here = [other for other in self.present if other not in sight.stopped][:MAX_ASKED]
        return [Send(other, self._question(stopped)) for other in [*here, *list(waiting)[:MAX_ASKED]]]

    def doubted(self) -> list[str]:
        """Members of an elastic job of whom it matters whether their hosts acknowledge what was sent to them."""
        if not self.hung_limit_s:
            return []
        return [one.member_id for one in self.present.values() if one.life.doubted(self._is_torn)]

    def restart_limits(self, now_s: float) -> None:
        """The coordinator was stopped for a while (services/ticks.py), and read no message in that time."""
        for one in self.present.values():
            one.life.restart_limits(now_s)

    def _has_connected(self) -> bool:
        return len(self.suspected) < len(self.present) or any(
            one.life.away_since_s is None for one in self.suspected.values()
        )

    # -- witnesses ---------------------------------------------------------------------------------------------------

    def probe_suspected(self, vouched: Set[str]) -> list[Effect]:
        """Asks about all members that are away, except those in `vouched`."""
        return [
            effect
            for member_id, one in self.suspected.items()
            if member_id not in vouched
            for effect in self._probe(one)
        ]

    def _probe(self, one: Present) -> list[Effect]:
        """Asks other members on the host whether the process of a member that is away still lives."""
        if one.life.away_since_s is None:
            return []
        event = self._question(one)
        return [Send(witness.member_id, event) for witness in self._witnesses(one)[:MAX_WITNESSES]]

    def _question(self, one: Present) -> pb.MembershipEvent:
        start_time = one.request.process.start_time
        probe = pb.Probe(epoch=self.world.epoch, rank=one.rank, pid=one.request.pid, start_time=start_time)
        return pb.MembershipEvent(probe=probe)

    def _witnesses(self, one: Present) -> list[Present]:
        """Connected members that see the process of `one`, because they share its process namespace."""
        return [
            other
            for other in self._by_namespace.get(one.request.process.namespace, ())
            if other is not one and other.member_id in self.present and other.life.away_since_s is None
        ]

    # -- going -------------------------------------------------------------------------------------------------------

    def remove(
        self,
        one: Present,
        cause: str,
        *,
        orderly: bool = False,
        never_stood: bool = False,
        returns: bool = False,
        done: bool = False,
        may_live: bool = False,
    ) -> list[Effect]:
        """The member is gone for good, and the others are told. returns: its process joins again. done: it has done its
        work. may_live: it may come back as another member.
        """
        epoch, rank = self.world.epoch, one.rank
        why = without_code(cause).rstrip(".")
        self._forget(one)
        gone = pb.MemberGone(
            epoch=epoch,
            rank=rank,
            host=one.request.host.name,
            orderly=orderly,
            sentence=coded_like(cause, f"{capitalized(str(one))} {'left' if orderly else 'was lost'}: {why}."),
            never_stood=never_stood,
            returns=returns,
            done=done,
            may_live=may_live,
        )
        self.gone[rank] = gone
        event = pb.MembershipEvent(gone=gone)
        effects: list[Effect] = [Send(other, event) for other in self.present]
        effects.append(Gone(self.world.job, gone, one.life.evidence))
        if not orderly:
            # Should the member live after all, it learns from this that the others go on without it.
            sentence = f"{capitalized(str(one))} was declared lost: {why}."
            self._causes[one.member_id] = sentence
            effects.append(Send(one.member_id, pb.MembershipEvent(refused=lost(WorldCode.DECLARED_LOST, sentence))))
        if not self.present:
            effects.append(WorldEnded(self.world.job, epoch))
        return effects

    def _forget(self, one: Present) -> None:
        del self.present[one.member_id]
        del self.by_rank[one.rank]
        self.suspected.pop(one.member_id, None)

    # -- questions ---------------------------------------------------------------------------------------------------

    def record(self) -> pb.GoneRecord | None:
        """Who of the world has left or was lost; None when there was no world yet."""
        epoch = self.world.epoch
        return pb.GoneRecord(epoch=epoch, gone=self.gone.values()) if epoch else None

    def stranger(self, epoch: int, member_id: str, rank: int) -> str:
        """Why a claim to be `rank` of that world is false, or "" when it is proven."""
        job = self.world.job
        if not self.runs:
            return coded(WorldCode.EPOCH_OVER, f"Job {job!r} has no running world; world {epoch} is over.")
        if epoch != self.world.epoch:
            now = f"it is in world {self.world.epoch} now"
            return coded(WorldCode.EPOCH_OVER, f"World {epoch} of job {job!r} is over; {now}.")
        one = self.present.get(member_id)
        if one is None:
            none = f"Member {member_id!r} is not part of world {epoch} of job {job!r}."
            return coded(WorldCode.UNPROVEN_MEMBER, none)
        if one.rank != rank:
            other = f"is rank {one.rank}, not rank {rank}"
            return coded(WorldCode.UNPROVEN_MEMBER, f"Member {member_id!r} of job {job!r} {other}.")
        return ""


def lost(code: WorldCode, sentence: str) -> pb.Refused:
    """The refusal of a member without which its world went on or ended."""
    return pb.Refused(sentence=coded(code, sentence), reason=pb.REFUSAL_REASON_LOST)


def unknown(code: WorldCode, sentence: str) -> pb.Refused:
    """The refusal of a member of a world that this coordinator can't tell anything about."""
    return pb.Refused(sentence=coded(code, sentence), reason=pb.REFUSAL_REASON_UNKNOWN_WORLD)


def is_same_process(one: pb.JoinRequest, other: pb.JoinRequest) -> bool:
    """Whether both surely come from one process: a pid alone is used again, and another host has its own."""
    is_known = other.process.start_time != 0
    return is_known and one.pid == other.pid and one.host.name == other.host.name and one.process == other.process
