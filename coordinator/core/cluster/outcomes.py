"""How processes of a job ended, as its record says; and which of that counts: the latest process of each slot."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from horovod.base.errors import STATE_LOST_EXIT
from horovod.protos.v1 import jobs_pb2


def incarnations(record: jobs_pb2.JobRecord) -> Mapping[int, int]:
    """The incarnation of each slot, by its number."""
    return {
        number: incarnation
        for share in record.shares
        for number, incarnation in zip(share.slots, share.incarnations or [1] * len(share.slots), strict=True)
    }


def leaving_slots(record: jobs_pb2.JobRecord) -> Set[int]:
    """Those whose processes were asked to end, so that others may have the slots."""
    return {number for share in record.shares for number in share.leaving}


def incarnation_of(outcome: jobs_pb2.RankOutcome) -> int:
    """That of the process which has ended."""
    return outcome.incarnation or 1


@dataclass(frozen=True)
class RankExit:
    """How a rank of the job ended, in the form that ending.py takes (its protocol Outcome)."""

    rank: int
    pid: int
    code: int | None
    stopped: bool
    ended_s: float
    lost: str
    incarnation: int

    @classmethod
    def of(cls, outcome: jobs_pb2.RankOutcome, each: int = 1) -> "RankExit":
        """each: how many ranks count as one here, as those of one worker do."""
        code = outcome.code if outcome.HasField("code") else None
        rank, incarnation = outcome.rank // each, incarnation_of(outcome)
        return cls(rank, outcome.pid, code, outcome.stopped, outcome.ended_at, outcome.lost, incarnation)


def latest(record: jobs_pb2.JobRecord) -> Sequence[jobs_pb2.RankOutcome]:
    """Without processes that others have replaced."""
    if not record.spec.policy.replaces_failed:
        return record.outcomes
    current = incarnations(record)
    return [one for one in record.outcomes if current.get(one.rank) == incarnation_of(one)]


def is_unneeded(record: jobs_pb2.JobRecord, outcome: jobs_pb2.RankOutcome) -> bool:
    """Whether it does not matter how this process has ended: the work was done, without it or before it was lost with
    its host. Also where it found the work lost, and others have ended well: no coordinator heard them say that it was
    done.
    """
    if outcome.code == STATE_LOST_EXIT and any(one.HasField("code") and not one.code for one in latest(record)):
        return True
    done = record.work_done
    finished = (outcome.rank, incarnation_of(outcome)) in zip(done.slots, done.incarnations, strict=False)
    return record.HasField("work_done") and (not finished or bool(outcome.lost))


def known(record: jobs_pb2.JobRecord) -> set[tuple[int, int]]:
    """The processes that have ended: slot and incarnation of each."""
    return {(one.rank, incarnation_of(one)) for one in record.outcomes}


def forget_replaced(record: jobs_pb2.JobRecord) -> None:
    """Keeps, of the processes of a slot that others have replaced, the last one alone, so that a record stays small."""
    current = incarnations(record)
    kept: dict[int, int] = {}  # slot -> the incarnation of its last replaced process
    for one in record.outcomes:
        if incarnation_of(one) < current.get(one.rank, 0):
            kept[one.rank] = max(kept.get(one.rank, 0), incarnation_of(one))
    # Outcomes of slots that the job has given up are kept when they may explain why processes on other hosts end soon
    # after.
    keeps_all = record.spec.policy.supplied_hosts
    wanted = [
        one
        for one in record.outcomes
        if (keeps_all or one.rank in current) and incarnation_of(one) >= kept.get(one.rank, 0)
    ]
    if len(wanted) < len(record.outcomes):
        copies = jobs_pb2.JobRecord(outcomes=wanted)
        del record.outcomes[:]
        record.outcomes.extend(copies.outcomes)
