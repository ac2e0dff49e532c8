"""A job that runs on its hosts: what agents report of its processes, and what follows for the others.

        running ──► succeeded
           ├──a process has failed, or the job is to stop──► ending ──no process is left──► failed | stopped
           └──its one host could not start any of it──► queued

What a failed process means is decided in elastic/decision.py. Where others do not replace it, it makes the job ending:
ranks on other hosts are given the grace that those beside it get from their own agent. When the share of a host is
over, or the host is lost, its ranks of which nobody has said how they ended are lost.

These functions change the job, and the fitness of the agent that reports. Their caller goes on to place jobs
(scheduler.py), since slots may have become free.
"""

from collections.abc import Collection

from horovod.base.errors import without_code
from horovod.base.words import printable
from horovod.coordinator.core.elastic.decision import Observed, Phase, Target, decide
from horovod.coordinator.core.ending import RankEnded
from horovod.protos.v1 import agents_pb2 as pb
from horovod.protos.v1 import jobs_pb2

from . import commands, lines
from .agent import Agent
from .effects import Command, Effect, Notice
from .hosts import failing_hosts, is_aside, set_aside, why_failing
from .job import ClusterJob, rank_ends
from .job_record import incarnations, is_elastic, known, latest, leaving_slots
from .target_record import exits_of

_SIGTERM = 15
MOST_STARTS = 5  # attempts to start one job. A job that no host can start would otherwise set all of them aside.


def reported(
    job: ClusterJob, share: jobs_pb2.Share, agent: Agent, report: pb.JobReport, now_s: float, wall_s: float
) -> list[Effect]:
    """What the agent of this share, which is not over, says of the job."""
    effects: list[Effect] = []
    record = job.record
    if report.over and report.host_fault:
        effects += _could_not_start(job, agent, without_code(printable(report.error)), now_s)
        if record.state == jobs_pb2.JOB_STATE_QUEUED:
            return effects
    elif report.ranks:
        agent.fitness.started()
    before = known(record)
    changed = not share.started or report.lines_done > share.lines_done
    share.started = True
    share.lines_done = max(share.lines_done, report.lines_done)
    is_current = lines.is_current(record, report)
    drains = agent.is_draining and is_elastic(record.spec)
    if is_current and _note_exits(job, agent.name, report, before, wall_s, drains):
        changed = True
    if report.over and not share.over:
        share.over = changed = True
        # Otherwise the share ended before a line that was to come.
        if is_current or record.state == jobs_pb2.JOB_STATE_RUNNING:
            gone = lines.lose(record, share, job.pids, printable(report.error) or lines.NOT_KNOWN, wall_s)
            if drains:  # processes that are to drain were not started any more
                _mark_drained(record, gone)
        effects.append(Command(share.agent, commands.forget(record.id, share.generation)))
    # The world hears of ended ranks first: that is evidence, and no decision that must be stored.
    ended = rank_ends(record, before)
    judged = _judged(job, wall_s) if changed else []
    if agent.is_draining and not share.slots and not share.over and record.state == jobs_pb2.JOB_STATE_RUNNING:
        judged += commands.started(record, share, is_draining=True)
    return [*ended, *judged, *effects, *_next_line(job)]


def _mark_drained(record: jobs_pb2.JobRecord, ranks: Collection[int]) -> None:
    for outcome in latest(record):
        outcome.drained = outcome.drained or (outcome.rank in ranks and outcome.rank not in leaving_slots(record))


def lost(job: ClusterJob, share: jobs_pb2.Share, cause: str, wall_s: float) -> list[Effect]:
    """The ranks of that share which have not ended are lost. A job that has not been started waits again."""
    if job.record.state == jobs_pb2.JOB_STATE_CONNECTING:
        return job.requeue()
    return [*_lose(job, share, cause, wall_s), *_judged(job, wall_s)]


def abandoned(job: ClusterJob, wall_s: float) -> list[Effect]:
    """Ends a job that was started, and of which nothing may be started any more."""
    record = job.record
    record.state = jobs_pb2.JOB_STATE_ENDING
    ended: list[Effect] = []
    for share in record.shares:
        # If its agent has started the share nevertheless, the agent is told to end it.
        if not share.started and not share.over:
            ended += _lose(job, share, lines.NOT_STARTED, wall_s)
    ends = commands.to_each(record, commands.end(record.id))
    return [*ended, *ends, *_judged(job, wall_s)]


def give_back(job: ClusterJob, slots: Collection[int], why: str, wall_s: float) -> list[Effect]:
    """Takes these slots from a job that runs: their processes are to end. why: completes "... given back, since "."""
    record = job.record
    target, sentence = decide(wall_s, job.target, Observed(taken_back=slots))
    if target.generation == job.target.generation:
        return []
    job.obey(target)
    record.sentence = sentence if target.phase is Phase.ENDS else f"{sentence.removesuffix('.')}, since {why}."
    if target.phase is Phase.ENDS:  # the job is left with too few processes, and has no patience
        return [*job.saved(), *commands.to_each(record, commands.end(record.id))]
    told = [Command(share.agent, commands.leave(record, share)) for share in record.shares if share.leaving]
    return [*job.saved(), *told]


def _note_exits(
    job: ClusterJob, agent: str, report: pb.JobReport, before: set[tuple[int, int]], wall_s: float, drains: bool
) -> bool:
    """Writes down how ranks of the current line ended; whether any is new. before: those known to have ended. drains:
    they were told to leave, as their host is drained.
    """
    current, leaving = incarnations(job.record), leaving_slots(job.record)
    is_news = False
    for rank in report.ranks:
        incarnation = rank.incarnation or 1
        if incarnation != current.get(rank.rank):
            continue  # this is about a process that was replaced; its end is known
        if job.pids.get(rank.rank) != rank.pid:
            job.pids[rank.rank], job.began_s[rank.rank] = rank.pid, wall_s
        if rank.ended and (rank.rank, incarnation) not in before:
            outcome = job.record.outcomes.add(rank=rank.rank, pid=rank.pid, stopped=rank.stopped, ended_at=wall_s)
            if rank.HasField("code"):
                outcome.code = rank.code
            if incarnation > 1:
                outcome.incarnation = incarnation
            outcome.drained = drains and lines.failed(outcome) and rank.rank not in leaving
            if not rank.stopped and not outcome.drained:
                outcome.early = job.count_start(agent, rank.rank, lines.failed(outcome), wall_s)
            is_news = True
    return is_news


def _could_not_start(job: ClusterJob, agent: Agent, error: str, now_s: float) -> list[Effect]:
    """The host is set aside. The job waits again if no process of it was started anywhere.

    Where it has other hosts, processes may run there by now, and what a program has done can't be taken back.
    """
    record, fitness = job.record, agent.fitness
    fitness.could_not_start(error, now_s)
    seconds = fitness.until_s - now_s
    effects: list[Effect] = [Notice(f"Host {agent.name} is set aside for {seconds:g} s, since it failed: {error}.")]
    record.failed_starts += 1
    is_first = not (record.line or record.outcomes or record.replacements)
    waits = record.state == jobs_pb2.JOB_STATE_RUNNING and len(record.shares) == 1 and is_first
    if waits and record.failed_starts < MOST_STARTS:
        record.ClearField("started_at")
        generation = record.shares[0].generation
        effects += [*job.requeue(), Command(agent.name, commands.forget(record.id, generation))]
    return effects


def _lose(job: ClusterJob, share: jobs_pb2.Share, cause: str, wall_s: float) -> list[Effect]:
    """The share is over, and its ranks that have not ended are lost."""
    share.over = True
    before = known(job.record)
    lines.lose(job.record, share, job.pids, cause, wall_s)
    return [*rank_ends(job.record, before)]


def _next_line(job: ClusterJob) -> list[Effect]:
    record = job.record
    if record.state != jobs_pb2.JOB_STATE_RUNNING or not lines.advance(record):
        return []
    job.pids.clear()
    return [*job.saved(), *commands.to_each(record, commands.run_line(record))]


def _judged(job: ClusterJob, wall_s: float) -> list[Effect]:
    """Saves a job some of whose ranks have ended; and what that means for the others."""
    record = job.record
    effects = _decided(job, wall_s) if record.state == jobs_pb2.JOB_STATE_RUNNING else []
    waits = record.state == jobs_pb2.JOB_STATE_RUNNING and is_elastic(record.spec) and not record.finishes
    if all(share.over for share in record.shares) and not (waits and not job.has_slots):
        return job.finish(wall_s)
    return [*job.saved(), *effects]


def looked_at(job: ClusterJob, wall_s: float) -> list[Effect]:
    """Time has passed for a job that runs: it had too few processes for too long, or it is time to start one."""
    if job.target.phase is not Phase.RUNS or job.record.state != jobs_pb2.JOB_STATE_RUNNING:
        return []
    if not job.target.is_short and not job.target.is_due(wall_s):
        return []
    generation = job.record.generation
    effects = _decided(job, wall_s)
    if job.record.generation == generation:
        return []
    if all(share.over for share in job.record.shares):
        return job.finish(wall_s)
    return [*job.saved(), *effects]


def _decided(job: ClusterJob, wall_s: float) -> list[Effect]:
    """What the agents of a running job are to do, now that processes of it have ended."""
    record = job.record
    replaces = record.spec.policy.replaces_failed
    # A host that was to be left is not to blame when it goes.
    left = leaving_slots(record) | {one.rank for one in latest(record) if one.drained}
    lost = {share.agent for share in record.shares if share.over and set(share.slots) - left}
    hosts = set(job.hosts().values()) if is_elastic(record.spec) else set()
    aside = {host for host in hosts if is_aside(record, host, wall_s)}
    failing = failing_hosts(job.failed_starts, hosts) - aside - lost
    observed = Observed(
        exits_of(record, aside | failing), well=job.well(wall_s), joined=job.has_joined, epoch=job.epoch
    )
    target, sentence = decide(wall_s, job.target, observed)
    if target is job.target or not (replaces or target.phase is Phase.ENDS):
        return []
    is_news = target.generation != job.target.generation
    ended = _given_up(job, target) if target.phase is Phase.RUNS else []
    blamed = {slot.host for slot in job.target.slots if slot.number not in left} if target.rules.host_goes else set()
    blamed -= {slot.host for slot in target.slots}
    job.obey(target)
    if not is_news:  # the job is short of processes, as it was before
        return []
    if is_elastic(record.spec) and target.phase is Phase.RUNS:
        reasons = dict.fromkeys(blamed, "a process failed there") | dict.fromkeys(lost, "it was lost")
        reasons |= {agent: why_failing(job.failed_starts.pop(agent)) for agent in failing}
        told = [set_aside(record, agent, reason, wall_s) for agent, reason in sorted(reasons.items())]
        sentence = " ".join([sentence, *told])
    if replaces:
        record.sentence = sentence
    if target.phase is Phase.ENDS:
        return [*commands.to_each(record, commands.end(record.id))]
    if target.phase is Phase.FINISHES:
        record.sentence = ""
        return [*commands.to_each(record, commands.finish(record.id))]
    for slot in target.slots:
        if slot.incarnation == target.generation:
            job.forget_process(slot.number)
    renewed = [share for share in record.shares if not share.over and target.generation in share.incarnations]
    return [*ended, *(command for share in renewed for command in commands.started(record, share))]


def _given_up(job: ClusterJob, target: Target) -> list[Effect]:
    """Ends processes that run on hosts which the job is not to use any more. Their world need not wait for it."""
    over = known(job.record)
    gone = [slot for slot in job.target.slots if slot.number not in target.by_number]
    run = [slot for slot in gone if (slot.number, slot.incarnation) not in over]
    cause = "its host is not used any more, because another process failed there"
    pids, job_id = job.pids, job.record.id
    stop = commands.signal(job_id, _SIGTERM, stop=True)
    return [
        *(RankEnded(job_id, one.number, one.host, pids.get(one.number, 0), cause, one.incarnation) for one in run),
        *(Command(host, stop) for host in dict.fromkeys(slot.host for slot in run)),
    ]
