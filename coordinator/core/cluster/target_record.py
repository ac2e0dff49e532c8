"""The target in the record of a job, and what the record says of the processes that were started for it."""

from horovod.coordinator.core.cluster.lines import failed
from horovod.coordinator.core.elastic.decision import Exit
from horovod.coordinator.core.elastic.target import Phase, Rules, Slot, Target
from horovod.protos.v1 import jobs_pb2

_ENDS = (
    jobs_pb2.JOB_STATE_ENDING,
    jobs_pb2.JOB_STATE_SUCCEEDED,
    jobs_pb2.JOB_STATE_FAILED,
    jobs_pb2.JOB_STATE_STOPPED,
)


def target_of(record: jobs_pb2.JobRecord) -> Target:
    """The target of a job that has its hosts. Its size is fixed: every job has as many slots as it asked for."""
    size = record.spec.processes
    slots = [
        Slot(number, share.agent, incarnation)
        for share in record.shares
        for number, incarnation in zip(share.slots, share.incarnations or [1] * len(share.slots), strict=True)
    ]
    phase = Phase.ENDS if record.state in _ENDS else Phase.RUNS
    return Target(Rules(size, size), tuple(sorted(slots, key=lambda slot: slot.number)), record.generation, phase)


def exits_of(record: jobs_pb2.JobRecord) -> list[Exit]:
    """How processes ended, in the order in which that came to be known."""
    return [
        Exit(
            one.rank,
            one.incarnation or 1,
            failed(one),
            how=f"is lost: {one.lost}" if one.lost else f"ended with {one.code}",
            host_lost=bool(one.lost),
        )
        for one in record.outcomes
    ]
