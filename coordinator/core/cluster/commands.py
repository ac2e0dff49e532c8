"""The commands with which the agents of a job's hosts are told what to do, made of its record."""

from horovod.coordinator.core.ranks import Seat, assign
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

from . import lines
from .effects import Command
from .job import hosts_of
from .job_record import is_elastic

LEAVE_S = 60.0  # seconds that a process may take to its next commit, if the job does not say


def start(record: jobs_pb2.JobRecord, share: jobs_pb2.Share) -> pb.AgentCommand:
    """Start the ranks of that share, in the incarnations that the record names."""
    spec = record.spec
    host_of = hosts_of(record)
    places = assign([Seat(str(slot), host) for slot, host in host_of.items()])
    assert not isinstance(places, str)  # only members that ask for a rank can be refused
    place_of = {int(place.member_id): place for place in places}
    each = len(share.gpus) // max(1, len(share.slots))
    started = pb.StartShare(
        job=record.id,
        command=spec.command,
        environment=spec.environment,
        directory=spec.directory,
        size=_size(spec.policy, len(host_of)),
        interfaces=share.interfaces,
        hold=spec.attended,
        lines=spec.lines,
        processes_per_worker=lines.per_worker(spec),
        code=spec.code,
        python_environment=spec.python_environment,
        replaces_failed=spec.policy.replaces_failed,
        elastic=is_elastic(spec),
        share=share.generation,
    )
    for index, rank in enumerate(share.slots):
        at = place_of[rank]
        started.ranks.add(
            rank=rank,
            local_rank=at.local_rank,
            local_size=at.local_size,
            cross_rank=at.cross_rank,
            cross_size=at.cross_size,
            gpus=share.gpus[index * each : (index + 1) * each],
            incarnation=share.incarnations[index] if share.incarnations else 1,
        )
    return pb.AgentCommand(start=started)


def _size(policy: jobs_pb2.Policy, slots: int) -> int:
    """For how many processes the first world waits: not for spare ones."""
    size = max(slots, policy.fewest)
    return min(size, policy.most - policy.spares) if policy.spares else size


def run_line(record: jobs_pb2.JobRecord) -> pb.AgentCommand:
    """Begin the current line of the run list."""
    return pb.AgentCommand(run_line=pb.RunLine(job=record.id, line=record.line))


def finish(job_id: str) -> pb.AgentCommand:
    """A process has ended well: start none any more, and let those that run end."""
    return pb.AgentCommand(finish=pb.FinishShare(job=job_id))


def leave(record: jobs_pb2.JobRecord, share: jobs_pb2.Share) -> pb.AgentCommand:
    """Slots of that share are taken back: their processes are to end."""
    incarnation_of = dict(zip(share.slots, share.incarnations or [1] * len(share.slots), strict=True))
    incarnations = [incarnation_of[slot] for slot in share.leaving]
    grace_s = record.spec.policy.leave_seconds or LEAVE_S
    leaving = pb.LeaveSlots(job=record.id, ranks=share.leaving, incarnations=incarnations, grace_seconds=grace_s)
    return pb.AgentCommand(leave=leaving)


def started(record: jobs_pb2.JobRecord, share: jobs_pb2.Share, is_draining: bool = False) -> list[Command]:
    """The commands for an agent of a running job: start processes that it has not started, end those that are to leave.

    is_draining: the agent waits for the end of the jobs of which it has a share; one without processes may end.
    """
    if not share.slots:
        return [Command(share.agent, finish(record.id))] if is_draining else []
    leaving = [Command(share.agent, leave(record, share))] if share.leaving else []
    return [Command(share.agent, start(record, share)), *leaving]


def end(job_id: str) -> pb.AgentCommand:
    """A process has failed: end those that run, after a grace."""
    return pb.AgentCommand(end=pb.EndShare(job=job_id))


def signal(job_id: str, signum: int, *, stop: bool) -> pb.AgentCommand:
    """Pass the signal on to the processes. stop: the job is to end."""
    return pb.AgentCommand(signal=pb.SignalShare(job=job_id, signal=signum, stop=stop))


def forget(job_id: str, share: int) -> pb.AgentCommand:
    """The report that the job is over on that host has been recorded. share: its generation."""
    return pb.AgentCommand(forget=pb.ForgetShare(job=job_id, share=share))


def to_each(record: jobs_pb2.JobRecord, command: pb.AgentCommand) -> list[Command]:
    """The command, to each host where the job is not over."""
    return [Command(share.agent, command) for share in record.shares if not share.over]


def repeated(record: jobs_pb2.JobRecord, share: jobs_pb2.Share, is_draining: bool) -> list[Command]:
    """What an agent that was away may not have been told. It has begun this share, which is not over."""
    command = None
    if record.state == jobs_pb2.JOB_STATE_RUNNING:
        if record.spec.policy.replaces_failed and not record.finishes:
            return started(record, share, is_draining)
        if record.finishes:
            command = finish(record.id)
        elif record.line:
            command = run_line(record)
    elif record.state == jobs_pb2.JOB_STATE_ENDING:
        command = signal(record.id, record.stop_signal, stop=True) if record.stop_signal else end(record.id)
    return [Command(share.agent, command)] if command is not None else []
