"""How many processes a job may have."""

from dataclasses import dataclass

from horovod.protos.v1 import jobs_pb2

MAX_PROCESSES = 1 << 16


@dataclass(frozen=True)
class Sizes:
    """Of a job of a fixed size, both numbers are that size."""

    fewest: int
    most: int


def is_elastic(spec: jobs_pb2.JobSpec) -> bool:
    """Whether the number of its processes may change while it runs."""
    return spec.policy.fewest > 0


def sizes_of(spec: jobs_pb2.JobSpec) -> Sizes:
    if not is_elastic(spec):
        return Sizes(spec.processes, spec.processes)
    return Sizes(spec.policy.fewest, spec.policy.most or MAX_PROCESSES)


def processes_of(record: jobs_pb2.JobRecord) -> int:
    """As many as it has now, or asks for while it waits."""
    return sum(len(share.slots) for share in record.shares) or record.spec.processes
