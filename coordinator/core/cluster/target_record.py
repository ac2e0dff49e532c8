"""The target in the record of a job, and what the record says of the processes that were started for it."""

import dataclasses
from collections.abc import Mapping, Sequence, Set

from horovod.base.errors import STATE_LOST_EXIT
from horovod.coordinator.core.cluster.lines import failed
from horovod.coordinator.core.elastic.decision import Exit, OnFailure, Phase, Rules, Slot, Target
from horovod.coordinator.core.ending import follows, how
from horovod.protos.v1 import jobs_pb2

from .job_record import RankExit, forget_replaced, incarnations, is_unneeded, latest, leaving_slots, sizes_of

_ENDS = (
    jobs_pb2.JOB_STATE_ENDING,
    jobs_pb2.JOB_STATE_SUCCEEDED,
    jobs_pb2.JOB_STATE_FAILED,
    jobs_pb2.JOB_STATE_STOPPED,
)
# Rules that are fields of the policy as they stand there (docs/adr/0119-rules-by-name.md).
_BY_NAME = {rule.name for rule in dataclasses.fields(Rules)} & set(jobs_pb2.Policy.DESCRIPTOR.fields_by_name) - {
    "fewest",
    "most",
    "most_replacements",
}


def target_of(record: jobs_pb2.JobRecord) -> Target:
    """The target of a job that has its hosts."""
    policy = record.spec.policy
    replacements = policy.most_replacements if policy.HasField("most_replacements") else None
    on_failure = OnFailure.REPLACE if policy.replaces_failed else OnFailure.END
    sizes = sizes_of(record.spec)
    rules = Rules(
        sizes.fewest,
        sizes.most,
        on_failure,
        replacements,
        policy.patience_seconds,
        host_goes=policy.supplied_hosts,
        **{name: getattr(policy, name) for name in _BY_NAME},
    )
    agents = {number: share.agent for share in record.shares for number in share.slots}
    leaving = leaving_slots(record)
    ended = {one.rank for one in latest(record)} if record.finishes else frozenset()
    retries = {one.slot: one for one in record.retries}
    slots = tuple(
        _slot(number, agents[number], incarnation, number in leaving, retries.get(number))
        for number, incarnation in sorted(incarnations(record).items())
        if number not in ended
    )
    phase = Phase.ENDS if record.state in _ENDS else Phase.FINISHES if record.finishes else Phase.RUNS
    return Target(
        rules,
        slots,
        record.generation,
        phase,
        record.replacements,
        record.setbacks,
        record.progress_epoch,
    )


def _slot(number: int, host: str, incarnation: int, is_leaving: bool, retry: jobs_pb2.Retry | None) -> Slot:
    if retry is None:
        return Slot(number, host, incarnation, is_leaving)
    return Slot(number, host, incarnation, is_leaving, retry.times, retry.at or None)


def gpus_of(share: jobs_pb2.Share) -> Mapping[int, Sequence[str]]:
    """Those of each slot."""
    each = len(share.gpus) // max(1, len(share.slots))
    return {number: share.gpus[place * each : (place + 1) * each] for place, number in enumerate(share.slots)}


def write_target(record: jobs_pb2.JobRecord, target: Target) -> None:
    """Puts a target, made of the one in the record, in its place."""
    record.generation = target.generation
    record.replacements = target.replacements
    record.setbacks, record.progress_epoch = target.setbacks, target.progress_epoch
    if target.phase is Phase.ENDS:
        record.state = jobs_pb2.JOB_STATE_ENDING
        del record.retries[:]
    elif target.phase is Phase.FINISHES:
        record.finishes = True
    else:
        _write_slots(record, target)
        del record.retries[:]
        for slot in target.slots:
            if slot.failures:
                record.retries.add(slot=slot.number, times=slot.failures, at=slot.retry_at_s or 0)
        forget_replaced(record)


def _write_slots(record: jobs_pb2.JobRecord, target: Target) -> None:
    """A share whose host is lost goes with its slots. Another one stays, also when it has no slots any more: its host
    keeps what its processes have printed. Further slots are in the shares already, where the scheduler has added them.
    """
    kept = []
    for share in record.shares:
        here = [
            (target.by_number[number], gpus)
            for number, gpus in gpus_of(share).items()
            if number in target.by_number and target.by_number[number].host == share.agent
        ]
        if not here and share.over:
            continue
        left = {*share.left, *share.slots} - {slot.number for slot, _ in here}
        share.left[:] = sorted(left)
        share.slots[:] = [slot.number for slot, _ in here]
        share.leaving[:] = [slot.number for slot, _ in here if slot.is_leaving]
        share.incarnations[:] = [slot.incarnation for slot, _ in here] if target.generation > 1 else []
        share.gpus[:] = [gpu for _, gpus in here for gpu in gpus]
        kept.append(share)
    if len(kept) < len(record.shares):
        copies = jobs_pb2.JobRecord(shares=kept)
        del record.shares[:]
        record.shares.extend(copies.shares)


def exits_of(record: jobs_pb2.JobRecord, without: Set[str] = frozenset()) -> list[Exit]:
    """How processes ended, in the order in which that came to be known. Those on a host that is drained count once none
    is left there: their slots go together.

    without: agents of hosts on which no other process can take the place of one.
    """
    over = {slot for share in record.shares if share.over for slot in share.slots}
    lost = over | {slot for share in record.shares if share.agent in without for slot in share.slots}
    exits = [RankExit.of(one) for one in record.outcomes]
    return [
        Exit(
            end.rank,
            end.incarnation,
            failed(one),
            how(end),
            host_lost=bool(end.lost) or end.rank in lost,
            drained=one.drained,
            follows=follows(end, exits),
            early=one.early,
            by_itself=(one.code or 0) > 0,
            work_done=record.HasField("work_done"),
            unneeded=is_unneeded(record, one),
            state_lost=one.code == STATE_LOST_EXIT,
        )
        for one, end in zip(record.outcomes, exits, strict=True)
        if not one.drained or one.rank in over
    ]
