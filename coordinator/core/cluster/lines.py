"""The run list of a job file: lines that every worker executes, each begun when all workers have finished the last one.

        line 0 runs ──all workers have finished it──► line 1 runs ──► ... ──► the job is over
             └──────────── one process fails ──────────────────────────────────────┘

A worker is a number of processes of neighbouring ranks on one host. A distributed line is started once for each
process; any other line once on each worker, where its process counts as the worker's first rank. The line that runs
stands in the record (`line`), whose outcomes are those of its processes; how far each host is stands in its share
(`lines_done`). A job without a run list is one distributed line.
"""

from collections.abc import Iterable, Sequence

from horovod.base.words import printable, ranks_in_words
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

from .job_record import incarnations, latest

NOT_KNOWN = "its agent does not know how it ended"
NOT_STARTED = "it was not started"
NOT_AGAIN = "it had failed, and was not started again, since others had ended well"
MAX_LINES = 1000


def per_worker(spec: jobs_pb2.JobSpec) -> int:
    """How many processes a worker has."""
    return spec.processes_per_worker or 1


def slots_of(spec: jobs_pb2.JobSpec, ranks: int) -> int:
    """How many slots so many processes take."""
    return ranks // per_worker(spec) * (spec.slots_per_worker or per_worker(spec))


def is_distributed(record: jobs_pb2.JobRecord) -> bool:
    """Whether the line that runs has a process for each rank."""
    return not record.spec.lines or record.spec.lines[record.line].distributed


def ranks_of(record: jobs_pb2.JobRecord, share: jobs_pb2.Share) -> Sequence[int]:
    """The ranks that have a process of the current line on that host."""
    return share.slots[:: 1 if is_distributed(record) else per_worker(record.spec)]


def is_current(record: jobs_pb2.JobRecord, report: pb.JobReport) -> bool:
    """Whether the ranks of `report` are those of the current line; the host may not have heard of it yet."""
    return report.line == record.line


def advance(record: jobs_pb2.JobRecord) -> bool:
    """Goes to the next line if every host has finished this one and there is another."""
    if record.line + 1 >= len(record.spec.lines):
        return False
    if any(share.over or share.lines_done <= record.line for share in record.shares):
        return False
    record.line += 1
    del record.outcomes[:]
    return True


def lose(
    record: jobs_pb2.JobRecord, share: jobs_pb2.Share, pids: dict[int, int], cause: str, wall_s: float
) -> Sequence[int]:
    """Writes down that the processes of that host which have not ended are lost; returns their ranks.

    Where further lines are to come, a host that has finished this one is needed all the same, and is lost with its
    processes that have ended.
    """
    ranks = ranks_of(record, share)
    known = {one.rank for one in latest(record)}
    is_running = record.state == jobs_pb2.JOB_STATE_RUNNING and record.line + 1 < len(record.spec.lines)
    if is_running and not any(failed(one) for one in record.outcomes if one.rank in ranks):
        others = [one for one in record.outcomes if one.rank not in ranks]
        del record.outcomes[:]
        record.outcomes.extend(others)
        known -= set(ranks)
    current = incarnations(record)
    lost = [rank for rank in ranks if rank not in known]
    if record.state == jobs_pb2.JOB_STATE_ENDING and any(failed(one) for one in record.outcomes):
        # A replacement that was not started before the job began to end is no loss.
        lost = [rank for rank in lost if current.get(rank, 1) == 1 or rank in pids]
    for rank in lost:
        outcome = record.outcomes.add(rank=rank, pid=pids.get(rank, 0), lost=cause, ended_at=wall_s)
        if current.get(rank, 1) > 1:
            outcome.incarnation = current[rank]
            if record.finishes and rank not in pids:
                outcome.lost = NOT_AGAIN
    return lost


def failed(outcome: jobs_pb2.RankOutcome) -> bool:
    """Whether a process ended otherwise than with exit code 0."""
    return bool(outcome.lost) or outcome.code != 0 or not outcome.HasField("code")


def workers_in_words(workers: Iterable[int]) -> str:
    """`worker 3`, `workers 0-2`."""
    return ranks_in_words(workers, "worker")


def in_words(record: jobs_pb2.JobRecord) -> str:
    """`line 2 (`python train.py`)`; empty for a job without a run list."""
    if not record.spec.lines:
        return ""
    line = record.spec.lines[record.line]
    title = printable(line.title) or f"line {record.line + 1}"
    return f"{title} (`{printable(line.shown or ' '.join(line.command), 200)}`)"


def refusal_of(spec: jobs_pb2.JobSpec) -> str:
    """Why this list could not be run on any hosts, as a sentence; empty when it may be."""
    if not spec.lines:
        return ""
    if spec.policy.replaces_failed and len(spec.lines) > 1:
        return "A failed process of a run list can't be replaced: the lines before it are not run once more."
    if spec.command:
        return "The job has a command and a run list: expected one of them."
    if len(spec.lines) > MAX_LINES:
        return f"The run list has {len(spec.lines)} lines: at most {MAX_LINES} are taken."
    if empty := [index for index, line in enumerate(spec.lines) if not line.command]:
        return f"Line {empty[0] + 1} of the run list has no command."
    if not any(line.distributed for line in spec.lines):
        return "No line of the run list is distributed: mark the line that is started for each process."
    return ""
