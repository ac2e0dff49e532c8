"""What the processes of an elastic job have done of its work. The rule: committed work is neither lost nor done again
without a word.

    nothing is committed yet                    a world may form of any processes, and begins with step 0
    a process that waits holds the state        a world forms, and a process that holds the state is rank 0
    none does, and one may come that does       those that wait wait for it, for as long as their patience lasts
    none does, and none can come                those that wait are refused (`state-lost`), or begin anew where they may
    the work is done                            whoever comes without the state is refused: it has nothing to do
    the same, and the job had no process for    a process that has never been in a world begins a new training: whoever
    NEW_RUN_S                                   starts a job again under its name wants that

A process holds the state if that has commits and was made equal on all ranks in the latest world in which a member
committed, or in a later one. A process without which the others went on and committed has a state that nobody wants.

Members say what they have done (`Work`): that they have committed, once in each world; and that the elastic function
has returned. It is a fact of the job, which outlives its worlds: the records of a world and of who is gone have it, so
that a coordinator that takes over knows it, and it is kept when the last process is gone.

Who may come: a member that was lost, but whose process nobody saw end. It may have been stopped or cut off. An agent's
word that its process has ended comes later, or came before.

An agent's word also says how a process has ended. When the coordinator is away while members end, it comes back to
processes that are gone, and only their exit codes tell that they had done the work. So before the work counts as lost,
the word on each of its last members is awaited for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from horovod.base.errors import WorldCode, coded, without_code
from horovod.base.words import shortened
from horovod.coordinator.core.ending import RankEnded
from horovod.protos.v1 import membership_pb2 as pb

from .life import Present

USUAL_PATIENCE_S = 600.0
WORD_S = 10.0  # seconds for an agent to come back to a coordinator that was away, and to report how processes ended
# Kubernetes and systemd restart an ended process within five minutes, and each restart begins this time anew.
NEW_RUN_S = 900.0
_MOST_ENDS = 256  # ends of processes that are remembered until their losses are noticed
ANEW = "HOROVOD_ELASTIC_BEGIN_ANEW=1"


@dataclass(frozen=True)
class Waits:
    """No world may form yet."""

    sentence: str  # a part of a sentence


@dataclass(frozen=True)
class Lost:
    """What was committed is gone, and with it the job."""

    sentence: str


@dataclass(frozen=True)
class Anew:
    """What was committed is gone, and the training may begin anew."""

    sentence: str


Verdict = Waits | Lost | Anew | None  # None: a world may form


@dataclass
class JobWork:
    """Of one job, from its first world to the end."""

    committed_epoch: int = 0  # the latest world in which a member has committed; 0: none has
    done: bool = False  # a member has said that the job's work is done
    last_loss: str = ""  # the sentence about the member that was lost last
    first_epoch: int = 0  # first world of the training, if it has begun anew: states of earlier worlds do not count
    rested_s: float = 0.0  # for how long the job had no process before the first one came again
    # Member id -> a lost member that may come back with the state.
    _absent: dict[str, Present] = field(default_factory=dict)
    # Member id -> a member that is gone, of which no agent has said how it ended.
    _untold: dict[str, Present] = field(default_factory=dict)
    _ends: deque[RankEnded] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))
    _waited_since_s: float | None = None  # since when the job waits for a process that has the state

    @classmethod
    def restored(cls, *records: pb.JobWork) -> JobWork:
        """As the latest of these records of another coordinator says."""
        found = cls()
        for one in records:
            found.committed_epoch = max(found.committed_epoch, one.committed_epoch)
            found.first_epoch = max(found.first_epoch, one.first_epoch)
            found.done, found.last_loss = one.done, one.last_loss or found.last_loss
        return found

    def record(self) -> pb.JobWork:
        return pb.JobWork(
            committed_epoch=self.committed_epoch,
            done=self.done,
            last_loss=self.last_loss,
            first_epoch=self.first_epoch,
        )

    @property
    def is_worth_keeping(self) -> bool:
        """Whether a process that comes later must know of it."""
        return bool(self.committed_epoch) or self.done

    # -- what is done --------------------------------------------------------------------------------------------------

    def told(self, work: pb.Work) -> bool:
        """A member of the world of `work.epoch` says it. Whether that is news."""
        before = self.committed_epoch, self.done
        if work.committed and work.epoch > self.committed_epoch:
            self.committed_epoch = work.epoch
            self._absent.clear()  # a process that is not in this world has an older state
            self._untold.clear()
        if work.HasField("done"):
            self.done = work.done
        return before != (self.committed_epoch, self.done)

    def begins_anew(self, epoch: int) -> None:
        """A world without the state has formed, as its members may do; or a new training begins with this epoch."""
        self.committed_epoch, self.done, self.first_epoch = 0, False, epoch
        self.last_loss = ""
        self._absent.clear()
        self._untold.clear()

    def is_new_run(self, request: pb.JoinRequest) -> bool:
        """Whether this process is the first one of a new training under the name of a job whose work was done."""
        knows_job = request.incarnation or request.HasField("rejoin") or request.commits or request.state_epoch
        return self.done and self.rested_s >= NEW_RUN_S and not knows_job

    # -- who may come --------------------------------------------------------------------------------------------------

    def lost(self, one: Present, sentence: str, may_live: bool) -> bool:
        """A member is lost. Whether it may come back."""
        self.last_loss = without_code(sentence)
        is_told = any(_is_of(ended, one) for ended in self._ends)
        if one.request.incarnation and not is_told:
            self._untold[one.member_id] = one
        may_come = may_live and not is_told
        if may_come:
            self._absent[one.member_id] = one
        return may_come

    def ended(self, ended: RankEnded) -> bool:
        """A process has ended. Whether it was one that might have come back, or whose end was to be told."""
        self._ends.append(ended)
        gone = [member_id for member_id, one in (self._absent | self._untold).items() if _is_of(ended, one)]
        for member_id in gone:
            self._absent.pop(member_id, None)
            self._untold.pop(member_id, None)
        return bool(gone)

    def is_awaited(self, ended: RankEnded) -> bool:
        """Whether this is the word on a member that was lost."""
        return any(_is_of(ended, one) for one in self._untold.values())

    def joins(self, request: pb.JoinRequest) -> None:
        """This process is here, so nobody need wait for it."""
        here = [
            member_id
            for member_id, one in self._absent.items()
            if one.request.pid == request.pid and one.request.host.name == request.host.name
        ]
        for member_id in here:
            del self._absent[member_id]
            self._untold.pop(member_id, None)

    # -- the rule ------------------------------------------------------------------------------------------------------

    def holds(self, request: pb.JoinRequest) -> bool:
        """Whether the process has all that the job has committed."""
        return request.commits > 0 and request.state_epoch >= max(self.committed_epoch, self.first_epoch)

    def is_older(self, request: pb.JoinRequest) -> bool:
        """Whether the process has the state of a training before this one."""
        return request.commits > 0 and request.state_epoch < self.first_epoch

    def holder(self, requests: Iterable[pb.JoinRequest]) -> pb.JoinRequest | None:
        """The first of those that hold the state with the most commits. None: none does, or there are no commits."""
        holders = [one for one in requests if self.holds(one)]
        return max(holders, key=lambda one: one.commits) if holders else None  # the first of equals

    def verdict(self, job: str, requests: Iterable[pb.JoinRequest], now_s: float) -> Verdict:
        """Whether a world may form of these processes, which wait, while no member of the last world is awaited."""
        requests = list(requests)
        if not self.committed_epoch or not requests or self.holder(requests) is not None:
            self._waited_since_s = None
            return None
        if self._waited_since_s is None:
            self._waited_since_s = now_s
        patience_s = max(one.patience_seconds or USUAL_PATIENCE_S for one in requests)
        if self._absent and now_s - self._waited_since_s < patience_s:
            who = shortened([str(one) for one in self._absent.values()], 4)
            return Waits(f"waiting up to {patience_s:g} s for {who} to come back with the job's committed state")
        if self._untold and now_s - self._waited_since_s < WORD_S:
            who = shortened([str(one) for one in self._untold.values()], 4)
            return Waits(f"waiting up to {WORD_S:g} s for the agent's word on how {who} ended")
        what = self._in_words(job)
        if any(one.begins_anew for one in requests):
            return Anew(
                f"{what} The training starts from the beginning, as {ANEW} (horovodrun --elastic-begin-anew) allows."
            )
        return Lost(
            coded(
                WorldCode.STATE_LOST,
                f"{what} A training that starts from the beginning would repeat that work, so the job ends. To start "
                f"it nevertheless, use another name (HOROVOD_JOB) or {ANEW} (horovodrun --elastic-begin-anew), "
                "which suits scripts that read their own checkpoints.",
            )
        )

    def _in_words(self, job: str) -> str:
        loss = f" (the last loss: {self.last_loss.rstrip('.')})" if self.last_loss else ""
        return (
            f"The state that job {job!r} committed up to world {self.committed_epoch} is lost: no process that held it "
            f"is left{loss}."
        )

    def restart_limits(self, now_s: float) -> None:
        """The coordinator was stopped for a while."""
        if self._waited_since_s is not None:
            self._waited_since_s = now_s


def _is_of(ended: RankEnded, one: Present) -> bool:
    """Whether this process has ended, or the one above it that has its slot."""
    if ended.host != one.request.host.name or ended.incarnation < one.request.incarnation:
        return False
    return ended.pid == one.request.pid or (ended.rank == one.started_as and one.request.incarnation > 0)
