"""One job: the rendezvous of its next world beside the liveness of its last one, which may still run.

Invariant: a process of the job either waits (rendezvous.py), or is present in the running world (liveness.py), or has
left that and is expected to join again (rendezvous.py). Whoever ceases to be any of these goes through `remove`, which
alone lets both halves know: a rank that is gone is no longer waited for, and one who waited gives its claim back.

A process that has no proof that it belongs to the running world can neither end nor enter one that is complete: it is
refused, because it belongs to another job or was started once too often. It may wait while a member of the world is
away; if that one comes back, it is refused then. Of an elastic job, it waits until the members take it in.

A coordinator that takes over from another one begins with what that had written down (`restored`): all members of the
world are away and come back, or were on their way to the next one. A process that joins instead, and is one of those
that are away by its pid and start time, never heard of that world, so its place there is given up.

Where a scheduler has started several processes for one rank, one after the other, each has a later incarnation than the
one before. The later one shows that the earlier one is gone, and the earlier one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from horovod.base.errors import WorldCode, coded
from horovod.base.words import capitalized, plural, shortened
from horovod.coordinator.core.ending import Attendance, RankEnded
from horovod.protos.v1 import membership_pb2 as pb

from .checks import asked_for_twice, conflict_with_world, describe
from .effects import Close, Effect, Formed, Record, Send, WorkDone, WorldEnded
from .leavers import Leavers, Unconnected, to_go, told
from .life import NEVER_HEARD_OF_ITS_WORLD, Present, Sight
from .liveness import Finding, Liveness, Loss, is_same_process, lost, unknown
from .rendezvous import LastWorld, Rendezvous
from .waiting import Formation, requests_of, sizes_of, sizes_of_world
from .work import NEW_RUN_S, JobWork, Lost, Verdict


class JobMembership:
    """The waiting and present members of the job with this name."""

    def __init__(
        self,
        name: str,
        last: LastWorld | None,
        agent_s: Callable[[str, int], float],
        host_goes: Callable[[str, int, int], bool],
    ) -> None:
        """last: the last world that the job had, if that is still remembered. The others are as in `Membership`."""
        self.name = name
        self._agent_s = agent_s
        self._host_goes = host_goes
        self.liveness = Liveness(pb.World(job=name), {}, agent_s)
        self.rendezvous = Rendezvous(name, last, {})
        self._leavers = Leavers()
        self._unconnected = Unconnected()
        # Slot -> the latest incarnation that a launcher which gives up whole hosts has ended, or has seen end.
        self._over: dict[int, int] = {}

    @classmethod
    def restored(
        cls,
        record: pb.WorldRecord,
        gone: pb.GoneRecord,
        agent_s: Callable[[str, int], float],
        now_s: float,
        host_goes: Callable[[str, int, int], bool],
        rested_s: float = 0.0,
    ) -> JobMembership:
        """As another coordinator left it. No member is present where all of the world are gone. rested_s: as
        `JobWork.rested_s`.
        """
        job = cls(record.world.job, None, agent_s, host_goes)
        facts = [record.work, gone.work] if gone.HasField("work") else [record.work]
        job._run(Liveness.restored(record, gone, agent_s, now_s), JobWork.restored(*facts))
        job._work.rested_s = rested_s
        for one in gone.gone:
            if one.may_live and (lost := job.liveness.of_rank(one.rank)) is not None:
                job._work.lost(lost, one.sentence, may_live=True)
        requests = requests_of(record)
        for one in gone.gone:
            if one.returns and one.rank < len(requests):
                job.rendezvous.comes_back(Present(one.rank, requests[one.rank]), now_s)
            if one.done and job.rendezvous.last is not None:
                job.rendezvous.last.is_done = True
        return job

    @property
    def _work(self) -> JobWork:
        return self.rendezvous.work

    def _run(self, liveness: Liveness, work: JobWork) -> None:
        world = liveness.world
        self.liveness = liveness
        self._leavers = Leavers()
        self._unconnected = Unconnected()
        slots = liveness.incarnations() if sizes_of_world(world).is_elastic else {}
        last = LastWorld(world.epoch, world.secret, slots=slots, work=work, is_elastic=sizes_of_world(world).is_elastic)
        self.rendezvous = Rendezvous(self.name, last, liveness.by_rank)

    @property
    def is_over(self) -> bool:
        """The job has no process left: in its world, waiting for one, or on the way from one world to the next."""
        return not self.rendezvous.waiting and not self.liveness.runs and not self.rendezvous.returning

    def _is_whole(self) -> bool:
        """True when a world runs of which no member is gone, has joined again, or is suspected."""
        return self.liveness.is_whole() and len(self.rendezvous.awaited) == len(self.liveness.present)

    # -- joining -----------------------------------------------------------------------------------------------------

    def make_way(self, request: pb.JoinRequest, now_s: float) -> list[Effect]:
        """Gives up the place of a process that joins without ever having heard of its world, and the places of those
        that were started before the one that joins.
        """
        effects: list[Effect] = []
        for earlier in self._same_slot(request):
            if earlier.incarnation < request.incarnation:
                why = "another process was started instead of it"
                effects += self.remove(earlier.member_id, why, now_s, has_ended=True)
        if (unaware := self.liveness.unaware(request)) is not None:
            effects += self.remove(unaware.member_id, NEVER_HEARD_OF_ITS_WORLD, now_s, never_stood=True)
        return effects

    def _same_slot(self, request: pb.JoinRequest) -> list[pb.JoinRequest]:
        """Members that a scheduler has started as the same rank: those who ask for a rank get it."""
        rank = request.requested_rank
        if not request.incarnation or not request.HasField("requested_rank"):
            return []
        members = [self.rendezvous.waiting.by_rank.get(rank)]
        old = self.liveness.started_as(rank)
        if old is not None and (old.member_id in self.liveness.present or old.member_id in self.rendezvous.returning):
            members.append(old.request)
        return [one for one in members if one is not None and one.incarnation]

    def join(self, request: pb.JoinRequest, is_in_use: bool, now_s: float) -> tuple[str, list[Effect]]:
        """As `Membership.join`. is_in_use: another member, of whatever job, has its member id."""
        claim = None if is_in_use else self.rendezvous.prove(request)
        effects: list[Effect] = []
        if self.is_over and self.rendezvous.last is not None and self._work.is_new_run(request):
            self._work.begins_anew(self.rendezvous.last.epoch + 1)
        if not is_in_use and (earlier := self._earlier_attempt(request, claim)) is not None:
            # The same process tries again; the end of its earlier attempt has not been seen here yet. No world may
            # form between the two.
            self.rendezvous.withdraw(earlier, self.liveness.by_rank)
            effects.append(Close(earlier))
        if refusal := self._refusal(request, claim, is_in_use, now_s):
            told = self.rendezvous.refuse(request, refusal, now_s)
            return refusal, [*effects, *told, *(self.rendezvous.advance(now_s) if effects else [])]
        return "", effects + self.rendezvous.admit(request, claim, now_s)

    def _earlier_attempt(self, request: pb.JoinRequest, claim: int | None) -> str | None:
        """The member id with which the same process waits already, as far as its proof or its launcher's number says
        that it is the same.
        """
        waiting = self.rendezvous.waiting
        if claim is not None and claim in waiting.claims:
            return waiting.claims[claim]
        other = waiting.by_rank.get(request.requested_rank) if request.HasField("requested_rank") else None
        return other.member_id if other is not None and is_same_process(other, request) else None

    def _verdict_with(self, request: pb.JoinRequest, now_s: float) -> Verdict:
        return self.rendezvous.verdict([*self.rendezvous.waiting.requests.values(), request], now_s)

    def _refusal(self, request: pb.JoinRequest, claim: int | None, is_in_use: bool, now_s: float) -> str:
        """Why `request` can't be part of the job's next world."""
        if is_in_use or (claim is None and self.rendezvous.has_come_before(request)):
            return coded(
                WorldCode.MEMBER_ID_IN_USE,
                f"The member id {request.member_id!r} of {describe(request)} is already in use; every process and "
                "every attempt to join needs its own id.",
            )
        later = (one for one in self._same_slot(request) if one.incarnation > request.incarnation)
        if (successor := next(later, None)) is not None:
            return coded(
                WorldCode.REPLACED,
                f"{capitalized(describe(request))} was replaced: {describe(successor)} was started later instead of "
                "it.",
            )
        if self._is_over(request):
            return self._over_in_words(request)
        is_late = claim is None and (request.incarnation > 0 or request.HasField("rejoin") or self._work.done)
        if is_late and sizes_of(request).is_elastic and self._work_is_done and not self._follows_a_failure(request):
            # The launcher started this process before it heard that the job is done, or the others have gone on without
            # it.
            return self._done_in_words()
        if not self.liveness.runs and isinstance(verdict := self._verdict_with(request, now_s), Lost):
            return verdict.sentence
        if claim is None and (self.liveness.runs or self.rendezvous.returning) and self._is_elastic:
            if conflict := conflict_with_world(self.liveness.world, request):
                return conflict
            if (awaited := self._awaited_slot(request)) is not None:
                return asked_for_twice(awaited.request, request)
        elif claim is None and self._is_whole():
            return self._already_runs()
        return self.rendezvous.conflict_with(request)

    def _is_over(self, request: pb.JoinRequest) -> bool:
        return 0 < request.incarnation <= self._over.get(request.requested_rank, 0)

    def _may_take_others_along(self, failed: pb.JoinRequest) -> bool:
        """Whether the launcher of this process has not decided yet, and may give up its whole host. It decides when the
        agent of that host tells it, so of a host without an agent nothing is awaited.
        """
        if not self._is_elastic or not failed.incarnation or self._is_over(failed):
            return False
        slot = failed.requested_rank
        return self._agent_s(self.name, slot) > 0 and self._host_goes(self.name, slot, failed.incarnation)

    def _over_in_words(self, request: pb.JoinRequest) -> str:
        why = "because another process failed on its host, which the job does not use any more"
        return coded(WorldCode.REPLACED, f"The launcher ends {describe(request)}, {why}.")

    def _awaited_slot(self, request: pb.JoinRequest) -> Present | None:
        """The member that has the number that `request` asks for, and that would be refused when it joins again."""
        if not request.HasField("requested_rank"):
            return None
        one = self.liveness.started_as(request.requested_rank)
        if one is None or not one.request.HasField("requested_rank") or one.member_id in self.liveness.suspected:
            return None
        return self.rendezvous.awaited.get(one.rank)

    @property
    def _is_elastic(self) -> bool:
        last = self.rendezvous.last
        # Another coordinator, or an earlier run of this one, had the job's last world.
        if not self.liveness.world.epoch and last is not None:
            return last.is_elastic
        return sizes_of_world(self.liveness.world).is_elastic

    def _already_runs(self) -> str:
        present = self.liveness.present
        who = shortened([str(one) for one in present.values()], 4)
        return coded(
            WorldCode.JOB_RUNS_ALREADY,
            f"Job {self.name!r} already runs with {plural(len(present), 'member')} in world "
            f"{self.liveness.world.epoch}: {who}. Wait until it has ended, or give this job another name "
            "(HOROVOD_JOB).",
        )

    # -- forming -----------------------------------------------------------------------------------------------------

    def unformable(self, formation: Formation, sentence: str, now_s: float) -> list[Effect]:
        """As `Membership.unformable`."""
        if not self.rendezvous.is_forming(formation):
            return []
        self.rendezvous.forget_refused()
        # All are sent away before some of them could form a world.
        effects = self._send_away(formation.requests, sentence)
        return [*effects, *self.rendezvous.advance(now_s)]

    def give_up(self, sentence: str) -> list[Effect]:
        """As `Membership.give_up`."""
        return self._send_away(self.rendezvous.waiting.requests, sentence)

    def end(self, cause: str, now_s: float) -> list[Effect]:
        """As `Membership.end`, of the world that stands."""
        return self._follow([Loss(member_id, cause) for member_id in list(self.liveness.present)], now_s)

    def _send_away(self, member_ids: Iterable[str], sentence: str) -> list[Effect]:
        effects: list[Effect] = []
        refused = pb.MembershipEvent(refused=pb.Refused(sentence=sentence))
        for member_id in list(member_ids):
            self.rendezvous.withdraw(member_id, self.liveness.by_rank)
            effects += [Send(member_id, refused), Close(member_id)]
        return effects

    def formed(self, formation: Formation, epoch: int, secret: bytes, now_s: float) -> list[Effect]:
        """As `Membership.formed`."""
        if not self.rendezvous.is_forming(formation):
            return []
        effects: list[Effect] = []
        later, claims = self.rendezvous.leftover(formation), self.rendezvous.waiting.claim_of
        if self.liveness.runs:
            # Only members that have joined again are left: their goodbyes are late and change nothing.
            effects += [Close(member_id) for member_id in self.liveness.present]
            effects.append(WorldEnded(self.name, self.liveness.world.epoch))
        if formation.anew:
            self._work.begins_anew(epoch)
        self._run(Liveness(formation.world(epoch, secret), formation.requests, self._agent_s), self._work)
        effects.append(Formed(self.liveness.world, claims))
        event = pb.MembershipEvent(world=self.liveness.world)
        effects += [Send(member_id, event) for member_id in self.liveness.present]
        for request in later:
            effects += self.rendezvous.admit(request, None, now_s)
        return effects

    # -- coming back -------------------------------------------------------------------------------------------------

    def may_attach(self, attach: pb.Attach) -> pb.Refused | None:
        """Why the member can't come back, whatever it proves; None when it is to be asked for its proof."""
        if self.liveness.runs and attach.epoch <= self.liveness.world.epoch:
            return self.liveness.may_attach(attach)
        last = self.rendezvous.last
        if last is not None and attach.epoch <= last.epoch:
            return lost(WorldCode.EPOCH_OVER, f"World {attach.epoch} of job {attach.job!r} is over.")
        return unknown(
            WorldCode.UNKNOWN_WORLD,
            f"The coordinator does not know world {attach.epoch} of job {attach.job!r}; it was restarted.",
        )

    def attach(
        self, attach: pb.Attach, nonce: bytes, proof: bytes, now_s: float
    ) -> tuple[pb.Refused | None, list[Effect]]:
        """As `Membership.attach`, for a member that `may_attach`."""
        refused, effects = self.liveness.attach(attach, nonce, proof)
        if refused is None and self._is_elastic:
            effects = [*effects, *self.rendezvous.announced_to(attach.member_id)]
            if (leavers := self._leavers.told) is not None:
                effects.append(Send(attach.member_id, leavers))
        elif refused is None and self._is_whole():
            # Every member is connected, so the world goes on: those that wait for its end are refused.
            no = pb.MembershipEvent(refused=pb.Refused(sentence=self._already_runs()))
            for member_id in list(self.rendezvous.waiting.requests):
                effects.append(Send(member_id, no))
                effects += self.remove(member_id, "its job runs", now_s)
        return refused, effects

    # -- evidence ----------------------------------------------------------------------------------------------------

    def disconnected(self, member_id: str, now_s: float, *, broke: bool) -> list[Effect]:
        if member_id in self.rendezvous.returning:
            return self.rendezvous.disconnected(member_id, now_s) if broke else []
        if member_id in self.rendezvous.waiting:
            return self.remove(member_id, "its stream ended", now_s)
        return self._follow(self.liveness.disconnected(member_id, now_s), now_s)

    def process_ended(self, member_id: str, cause: str, now_s: float) -> list[Effect]:
        if member_id in self.rendezvous.waiting or member_id in self.rendezvous.returning:
            return self.remove(member_id, cause, now_s, has_ended=True)
        return self._follow(self.liveness.process_ended(member_id, cause, now_s), now_s)

    def rank_ended(self, ended: RankEnded, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if ended.well and self._work.is_awaited(ended) and not self.liveness.runs and self._work.committed_epoch:
            effects = self._told_of_work(pb.Work(epoch=self.liveness.world.epoch, done=True))
        may_not_come = self._work.ended(ended)
        if self._host_goes(self.name, ended.rank, ended.incarnation):
            self._over[ended.rank] = max(ended.incarnation, self._over.get(ended.rank, 0))
            waits = self.rendezvous.waiting.by_rank.get(ended.rank)
            if waits is not None and self._is_over(waits):
                effects += self._send_away([waits.member_id], self._over_in_words(waits))
                may_not_come = True
        for one in self.rendezvous.returning_as(ended):
            effects += self.remove(one.member_id, ended.cause, now_s, has_ended=True)
        if ended.well and self._is_elastic and (one_done := self.liveness.member_of(ended)) is not None:
            effects += self._ended_well(one_done, ended.cause, now_s)
        effects += self._follow(self.liveness.rank_ended(ended, now_s), now_s)
        effects += self.rendezvous.decided(ended.rank, ended.incarnation, now_s)
        return [*effects, *(self._dismissed() or self.rendezvous.advance(now_s) if may_not_come else [])]

    def _ended_well(self, one: Present, cause: str, now_s: float) -> list[Effect]:
        """A member's process has ended with exit code 0, and no coordinator was there to hear that its work is done. As
        a goodbye; and the last member to end takes with it all who could say more.
        """
        effects: list[Effect] = []
        if self._work.committed_epoch and len(self.liveness.present) == 1 and not self.rendezvous.returning:
            effects = self._told_of_work(pb.Work(epoch=self.liveness.world.epoch, done=True))
        return [*effects, *self.leave(one.member_id, cause, now_s, returns=False, failed=False)]

    def _expect_soon(self, rank: int, now_s: float) -> None:
        """A peer's connections to a member of an elastic job broke, which has said that it joins again. It may be that
        it can speak, but hears nothing any more.
        """
        if limit_s := self.liveness.hung_limit_s:
            self.rendezvous.expect_within(rank, 2 * limit_s, now_s)

    def peer_lost(self, witness_id: str, report: pb.PeerLost, now_s: float) -> list[Effect]:
        if witness_id in self.liveness.present and report.epoch == self.liveness.world.epoch:
            self._expect_soon(report.rank, now_s)
        return self._follow(self.liveness.peer_lost(witness_id, report, now_s), now_s)

    def unconnected(self, member_id: str, report: pb.Unconnected, now_s: float) -> list[Effect]:
        """As `Membership.reported`."""
        one = self.liveness.present.get(member_id)
        if one is None or report.epoch != self.liveness.world.epoch:
            return []
        return self._unconnected.add(one, report, self.liveness.by_rank, now_s)

    def _part_unconnected(self, now_s: float) -> list[Effect]:
        """Members that can't connect to each other are no world."""
        world, members = self.liveness.world, self.liveness.by_rank
        if not (pairs := self._unconnected.due(members, now_s)):
            return []
        words = self._unconnected.in_words(pairs, members)
        going = to_go(pairs, world.newcomers)
        if not self._is_elastic or len(members) - len(going) < sizes_of_world(world).fewest:
            going = set(members)
        leaving = [members[rank].member_id for rank in sorted(going)]
        effects = told(world.epoch, words, leaving)
        cause = coded(WorldCode.UNREACHABLE_PEER, words)
        return [*effects, *self._follow([Loss(member_id, cause) for member_id in leaving], now_s)]

    def testified(self, witness_id: str, testimony: pb.Testimony, now_s: float) -> list[Effect]:
        return self._follow(self.liveness.testified(witness_id, testimony, now_s), now_s)

    def tick(self, now_s: float, grace_s: float, sight: Sight) -> list[Effect]:
        losses = self.liveness.overdue(now_s, grace_s, sight, self.rendezvous.waiting.requests)
        effects = [*self._follow(losses, now_s), *self._part_unconnected(now_s)]
        effects += self._follow(self._stopped_on_their_way(now_s, sight), now_s)
        for member_id in self.rendezvous.overdue(now_s):
            effects += self.remove(member_id, "it did not join again", now_s)
        effects += [*self.rendezvous.settle(now_s), *self._tell_of_leavers(now_s)]
        asked = self.liveness.ask_others(sight, self.rendezvous.waiting.requests)
        return effects + self.liveness.probe_suspected(sight.lives) + asked

    def _stopped_on_their_way(self, now_s: float, sight: Sight) -> list[Loss]:
        """Those that have left a world to join the next one, and stand still while others wait for them."""
        if not (limit_s := self.liveness.hung_limit_s):
            return []
        runs = not sight.runs.isdisjoint(self.rendezvous.waiting.requests)
        found = []
        for one in self.rendezvous.on_their_way():
            turns, at_s = sight.stopped.get(one.member_id) if runs else None, sight.stopped_at_s.get(one.member_id)
            one.life.seen(turns, is_silent=False, now_s=now_s, stopped_at_s=at_s)
            if cause := one.life.hung(now_s, limit_s, is_world_torn=False):
                found.append(Loss(one.member_id, cause))
        return found

    def to_look_at(self) -> list[str]:
        """Members of an elastic job whose processes the caller is to look at, where it can, for its next tick."""
        if not self.liveness.hung_limit_s or not (self.liveness.runs or self.rendezvous.returning):
            return []
        return [*self.liveness.present, *self.rendezvous.waiting.requests, *self.rendezvous.returning]

    def _follow(self, findings: Sequence[Finding], now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for finding in findings:
            if isinstance(finding, Loss):
                effects += self.remove(finding.member_id, finding.cause, now_s)
            else:
                effects.append(finding)
        return effects

    # -- going -------------------------------------------------------------------------------------------------------

    def leaving(self, member_id: str, leaving: pb.Leaving, now_s: float) -> list[Effect]:
        """As `Membership.leaving`."""
        one = self.liveness.present.get(member_id)
        if one is None or leaving.epoch != self.liveness.world.epoch or not self._is_elastic:
            return []
        self._leavers.add(one, leaving.reason)
        return self._tell_of_leavers(now_s)

    def coming(self, count: int) -> list[Effect]:
        """As `Membership.coming`."""
        if not self._is_elastic:
            return []
        event = pb.MembershipEvent(coming=pb.Coming(epoch=self.liveness.world.epoch, count=count))
        return [Send(member_id, event) for member_id in self.liveness.present]

    def ask_to_leave(self, slot: int, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        """As `Membership.ask_to_leave`."""
        one = self.liveness.started_as(slot)
        is_meant = one is not None and one.member_id in self.liveness.present and one.request.incarnation == incarnation
        if one is None or not is_meant or not self._is_elastic:
            return []
        self._leavers.add(one, reason)
        return self._tell_of_leavers(now_s)

    def _tell_of_leavers(self, now_s: float) -> list[Effect]:
        waiting = self.rendezvous.waiting
        count = len(waiting) - len(waiting.claims)
        has_commits = bool(self._work.committed_epoch)
        return self._leavers.tell(self.liveness.world, self.liveness.present, count, now_s, has_commits)

    def did(self, member_id: str, work: pb.Work) -> list[Effect]:
        """The member says what it has done of the job's work, and hears when the store has it."""
        is_member = member_id in self.liveness.present or member_id in self.rendezvous.returning
        if not is_member or work.epoch != self.liveness.world.epoch or not self._is_elastic:
            return []
        noted = Send(member_id, pb.MembershipEvent(noted=pb.Noted(epoch=work.epoch, done=work.done)))
        return [*self._told_of_work(work), noted]

    def _told_of_work(self, work: pb.Work) -> list[Effect]:
        was_done = self._work.done
        effects: list[Effect] = [Record(self.name)] if self._work.told(work) else []
        if self._work.done != was_done:
            effects.append(WorkDone(self.name, self._slots_at_the_end() if self._work.done else {}))
        return effects

    def _slots_at_the_end(self) -> dict[int, int]:
        """Those that members of the world have in which the work was done, without such as were lost or had failed."""
        here = [*self.liveness.present.values(), *self.rendezvous.on_their_way()]
        done = {rank for rank, gone in self.liveness.gone.items() if gone.done}
        here += [one for rank in sorted(done) if (one := self.liveness.of_rank(rank)) is not None]
        return {one.started_as: one.request.incarnation for one in here if one.request.incarnation}

    def leave(self, member_id: str, cause: str, now_s: float, *, returns: bool, failed: bool) -> list[Effect]:
        """An orderly goodbye. `cause` as in `remove`. returns, failed: as in `Membership.leave`."""
        one = self.liveness.present.get(member_id)
        done = one is not None and not returns and not failed
        if done and self.rendezvous.last is not None:
            self.rendezvous.last.is_done = True
        goes = one is None or not returns or self._is_over(one.request)
        if one is None or goes or not self._is_elastic or one.rank not in self.rendezvous.awaited:
            return self.remove(member_id, cause, now_s, orderly=True, done=done)
        told = self.liveness.remove(one, cause, orderly=True, returns=True)
        self.rendezvous.comes_back(one, now_s)
        if one.life.accused:
            self._expect_soon(one.rank, now_s)
        return [Record(self.name), *told]

    def remove(
        self,
        member_id: str,
        cause: str,
        now_s: float,
        *,
        orderly: bool = False,
        never_stood: bool = False,
        done: bool = False,
        has_ended: bool = False,
    ) -> list[Effect]:
        """This process is no member any more. `cause` completes "rank 1 was lost: ..." and has no full stop. has_ended:
        the process is known to have ended.
        """
        effects: list[Effect] = []
        failed: pb.JoinRequest | None = None
        if (request := self.rendezvous.waiting.requests.get(member_id)) is not None:
            failed = request
            claim = self.rendezvous.waiting.claim_of.get(member_id, 0)
            self.rendezvous.withdraw(member_id, self.liveness.by_rank)
            if self._work.holds(request):
                self._miss(Present(claim, request), cause, may_live=not has_ended)
        elif member_id in self.rendezvous.returning:
            returning = self.rendezvous.returning[member_id].one
            failed = returning.request
            self.rendezvous.gives_up(member_id)
            self._miss(returning, cause, may_live=not has_ended)
        elif (one := self.liveness.present.get(member_id)) is not None:
            may_live = not (orderly or has_ended or never_stood or one.life.has_ended)
            if not (may_live or never_stood or self._work.done) and one.rank in self.rendezvous.awaited:
                failed = one.request  # or may have: one that ends with sys.exit(3) says goodbye as if it were done
            may_live = self._miss(one, cause, may_live)
            told = self.liveness.remove(
                one, cause, orderly=orderly, never_stood=never_stood, done=done, may_live=may_live
            )
            self.rendezvous.released(one.rank)
            effects = told if self.is_over else [Record(self.name), *told]
        if failed is not None and self._may_take_others_along(failed):
            effects = [*effects, *self.rendezvous.undecided(failed, now_s)]
        return [*effects, Close(member_id), *(self._dismissed() or self.rendezvous.advance(now_s))]

    def _miss(self, one: Present, cause: str, may_live: bool) -> bool:
        """This member is gone. Whether it may come back, with its state."""
        if not self._is_elastic:
            return False
        return self._work.lost(one, f"{capitalized(str(one))}: {cause}", may_live)

    def _follows_a_failure(self, request: pb.JoinRequest) -> bool:
        """Whether its launcher has started it in the place of a member of the last world. That member may have left it
        in order, as one does that ends with sys.exit(1), but its launcher has seen it fail: the work is not done,
        unless a member has said that it is.
        """
        last = self.rendezvous.last
        if last is None or self._work.done:
            return False
        if last.slots.get(request.requested_rank, request.incarnation) >= request.incarnation:
            return False
        last.is_done = False
        return True

    @property
    def _work_is_done(self) -> bool:
        """No member of the last world is left to go on with it, and one of them has done its work."""
        here = self.rendezvous
        goes_on = self.liveness.runs or here.returning or here.waiting.claims
        is_done = here.last is not None and here.last.is_done
        return (is_done or self._work.done) and not goes_on

    def _done_in_words(self) -> str:
        sentence = f"The members of job {self.name!r} have done its work, so no further process is needed."
        if self._work.done:
            sentence += (
                " To train once more, give the job another name (HOROVOD_JOB), or start it when no process of it has "
                f"come for {NEW_RUN_S / 60:g} minutes."
            )
        return coded(WorldCode.JOB_DONE, sentence)

    def _dismissed(self) -> list[Effect]:
        """Refuses those that wait beside the world of an elastic job that has done its work, and would do it again."""
        waiting = self.rendezvous.waiting
        if not self._work_is_done or not self._is_elastic:
            return []
        refused = pb.Refused(sentence=self._done_in_words())
        effects: list[Effect] = []
        for member_id in list(waiting.requests):
            self.rendezvous.withdraw(member_id, {})
            effects += [Send(member_id, pb.MembershipEvent(refused=refused)), Close(member_id)]
        return effects

    # -- questions ---------------------------------------------------------------------------------------------------

    def gone(self) -> pb.GoneRecord | None:
        """As `Membership.gone`."""
        record = self.liveness.record()
        if record is not None and self._is_elastic:
            record.work.CopyFrom(self._work.record())
        return record

    def members(self) -> list[str]:
        """Those that wait, those in the running world, and those on the way from one world to the next."""
        return [*self.rendezvous.waiting.requests, *self.liveness.present, *self.rendezvous.returning]

    def attendance(self) -> Attendance:
        """Which hosts of its world, or of those who wait for one, have ranks here."""
        members = self.liveness.present.values()
        present = {one.request.host.name for one in members}
        present |= {one.request.host.name for one in self.rendezvous.on_their_way()}
        connected = {one.request.host.name for one in members if one.life.away_since_s is None}
        connected |= {request.host.name for request in self.rendezvous.waiting.requests.values()}
        lost_on = {gone.host for gone in self.liveness.gone.values() if not gone.orderly}
        away = present - connected
        return Attendance(frozenset(connected), frozenset(away), frozenset(lost_on - connected - away))
